// Text files and pictures that go along with a message, and how texts are written into it.

import { el } from "./dom.js";

const LARGEST = 512 * 1024; // bytes of all texts: with the conversation they must fit a request's body
const SENT = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]; // that a server reads
const HEAVY = 4 * 1024 * 1024; // bytes of a picture that is made smaller first
const LONGEST = 2048; // pixels of the longer side of one that was
const SHOWN = 240; // pixels of the longer side of what the page shows

// Reads files -> [{name, text}] and, where the model `sees`, [{name, picture}] with a data URL; throws where one is neither,
// or all texts are too large.
export async function readFiles(files, before = [], sees = false) {
  const found = [];
  let size = before.reduce((sum, file) => sum + (file.text ?? "").length, 0);
  for (const file of files) {
    if (sees && file.type.startsWith("image/") && file.type !== "image/svg+xml") {
      found.push({ name: file.name, picture: await pictureOf(file) });
      continue;
    }
    if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
      throw new Error(`${file.name}: this model reads text alone, and cannot see a picture`);
    }
    size += file.size;
    if (size > LARGEST) throw new Error(`${file.name}: files of more than ${LARGEST / 1024} KiB in one message`);
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      throw new Error(`${file.name} is not a text file in UTF-8`);
    }
    if (text.includes("\0")) throw new Error(`${file.name} is not a text file`);
    found.push({ name: file.name, text });
  }
  return found;
}

// A message as the model reads it: each text file under its name, between fences that it does not contain.
export function written(message) {
  const texts = (message.files ?? []).filter((file) => !file.picture);
  const parts = texts.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, message.text].filter(Boolean).join("\n\n");
}

// The content of a message of a request: its pictures, and then what is written.
export function content(message) {
  const text = written(message);
  const pictures = (message.files ?? []).filter((file) => file.picture);
  if (!pictures.length) return text;
  const parts = pictures.map(({ picture }) => ({ type: "image_url", image_url: { url: picture } }));
  return text ? [...parts, { type: "text", text }] : parts;
}

// Shows sound with a player, or a thumbnail of a picture. A canvas needs no permission of the page's policy for images.
export function view({ name, picture, sound }) {
  if (sound) return el("audio", { controls: "", src: sound, "aria-label": name });
  const canvas = el("canvas", { class: "picture", role: "img", "aria-label": name, width: 1, height: 1 });
  const bytes = Uint8Array.from(atob(picture.split(",")[1]), (letter) => letter.charCodeAt(0));
  createImageBitmap(new Blob([bytes])).then(
    (bitmap) => draw(canvas, bitmap, SHOWN),
    () => canvas.replaceWith(el("span", {}, name)),
  );
  return canvas;
}

async function pictureOf(file) {
  if (SENT.includes(file.type) && file.size <= HEAVY) return dataUrl(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name}: this browser cannot open the picture`);
  }
  const canvas = draw(el("canvas"), bitmap, LONGEST);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function draw(canvas, bitmap, longest) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white"; // as the server shows what is transparent
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
