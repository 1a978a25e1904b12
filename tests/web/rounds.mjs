// Decodes texts in Node: JSON on standard input, {modules, cases: [{folder, isa, prompt, settings, change}]}, and a list
// of {facts, rounds} or {error, code} on standard output.  `change` damages a file: {file, size} cuts it, {file, text}
// replaces it.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { package: from, cases } = JSON.parse(readFileSync(0, "utf8"));
const { Engine, FetchedFolder } = await import(pathToFileURL(`${from}/index.js`));

class Changed {
  constructor(source, change) {
    Object.assign(this, { source, change });
  }
  async *pieces(name) {
    const { file, size, text } = this.change;
    if (name !== file) return yield* this.source.pieces(name);
    if (text !== undefined) return yield new TextEncoder().encode(text);
    let left = size;
    for await (const piece of this.source.pieces(name)) {
      yield piece.subarray(0, left);
      if ((left -= piece.length) <= 0) return;
    }
  }
}

const found = [];
const opened = new Map();
for (const { folder, isa, prompt, settings, change } of cases) {
  try {
    const key = JSON.stringify([folder, isa, change]);
    if (!opened.has(key)) {
      const address = new FetchedFolder(pathToFileURL(folder));
      opened.set(key, await Engine.open(change ? new Changed(address, change) : address, { isa }));
    }
    const engine = opened.get(key);
    engine.patienceMs = 0; // a long prompt is read in pieces
    const rounds = [];
    for await (const round of engine.rounds(prompt, settings)) rounds.push(round);
    found.push({ facts: engine.facts, rounds });
  } catch (error) {
    if (error.name !== "EdgespecError") throw error;
    found.push({ error: error.message, code: error.code });
  }
}
process.stdout.write(JSON.stringify(found));
