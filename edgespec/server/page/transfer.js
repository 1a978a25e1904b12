// A conversation as a file: Markdown to read, JSON to keep and to import again.

import { details, figures } from "./figures.js";
import { written } from "./files.js";

const FORMAT = "edgespec-conversation";

export function asMarkdown(conversation) {
  const parts = conversation.messages.map((message) => {
    if (message.role === "user") {
      const pictures = (message.files ?? []).filter((file) => file.picture).map(({ name }) => `(picture ${name})\n\n`);
      return `**You**\n\n${pictures.join("")}${written(message)}`;
    }
    const said = [figures(message.figures), ...details(message.figures, message.how)].filter(Boolean).join(" · ");
    return `**${message.model ?? "Model"}**${said ? ` (${said})` : ""}\n\n${message.text}`;
  });
  return `# ${conversation.title || "Conversation"}\n\n${parts.join("\n\n")}\n`;
}

export function asJson(conversation) {
  return `${JSON.stringify({ format: FORMAT, version: 1, ...conversation }, null, 2)}\n`;
}

// Reads what asJson wrote -> a conversation without an id; throws where it is none.
export function fromJson(text) {
  const found = JSON.parse(text);
  if (found?.format !== FORMAT || found.version !== 1 || !Array.isArray(found.messages)) {
    throw new Error("this file is not a conversation that was exported here");
  }
  return { title: `${found.title ?? ""}`.slice(0, 200), named: Boolean(found.named), messages: found.messages.map(messageOf) };
}

function messageOf(one) {
  if (!["user", "assistant"].includes(one?.role) || typeof one.text !== "string") throw new Error("a message is broken");
  const files = Array.isArray(one.files) ? one.files.map(fileOf) : [];
  if (one.role === "user") return { role: "user", text: one.text, files };
  const pieces = Array.isArray(one.pieces) ? one.pieces.map(([kind, piece]) => [`${kind}`, `${piece}`]) : [];
  const { thoughts = "", figures: counted = {}, how = {}, finish = "", model = "" } = one;
  const answer = { role: "assistant", text: one.text, files, thoughts: `${thoughts}`, pieces, figures: counted, how, finish };
  const [earlier, later] = [one.earlier, one.later].map((versions) => (Array.isArray(versions) ? versions : []).map(versionOf));
  return { ...answer, model: `${model}`, earlier, later };
}

function versionOf({ message, after }) {
  return { message: messageOf(message), after: after.map(messageOf) };
}

function fileOf({ name, text, picture, sound }) {
  for (const [kind, data] of Object.entries({ picture, sound })) {
    if (typeof data !== "string") continue;
    if (!/^data:(image|audio)\/[a-z]+;base64,[A-Za-z0-9+/=]+$/.test(data)) throw new Error(`a ${kind} is broken`);
    return { name: `${name}`, [kind]: data };
  }
  return { name: `${name}`, text: `${text}` };
}

export function download(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

// A file name of a title: letters and digits of any script.
export function fileName(conversation, ending) {
  const stem = (conversation.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${stem.slice(0, 60) || "conversation"}.${ending}`;
}
