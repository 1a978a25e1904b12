// Text files that go along with a message, and how they are written into it.

const LARGEST = 512 * 1024; // bytes of all: with the conversation they must fit a request's body

// Reads files -> [{name, text}]; throws where one is no text, or all are too large.
export async function readFiles(files, before = []) {
  const found = [];
  let size = before.reduce((sum, file) => sum + file.text.length, 0);
  for (const file of files) {
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

// A message as the model reads it: each file under its name, between fences that it does not contain.
export function written(message) {
  const parts = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, message.text].filter(Boolean).join("\n\n");
}
