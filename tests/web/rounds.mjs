// Decodes texts in Node: JSON on standard input, {package, cases: [{folder, options, prompt, settings, change}]}, and a
// list of {facts, rounds} or {error, code} on standard output.  `change` damages a file: {file, size} cuts it, {file,
// text} replaces it, {file, flip} changes a byte.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { package: from, cases } = JSON.parse(readFileSync(0, "utf8"));
const { Engine, FetchedFolder } = await import(pathToFileURL(`${from}/index.js`));

class Changed {
  constructor(source, change) {
    Object.assign(this, { source, change });
  }
  async *pieces(name) {
    const { file, size, text, flip } = this.change;
    if (name !== file) return yield* this.source.pieces(name);
    if (text !== undefined) return yield new TextEncoder().encode(text);
    if (flip !== undefined) {
      let at = 0;
      for await (const piece of this.source.pieces(name)) {
        const changed = piece.slice();
        if (flip >= at && flip < at + piece.length) changed[flip - at] ^= 4;
        at += piece.length;
        yield changed;
      }
      return;
    }
    let left = size;
    for await (const piece of this.source.pieces(name)) {
      yield piece.subarray(0, left);
      if ((left -= piece.length) <= 0) return;
    }
  }
}

const found = [];
const opened = new Map();
for (const { folder, options, prompt, settings, change } of cases) {
  try {
    const key = JSON.stringify([folder, options, change]);
    if (!opened.has(key)) {
      const address = new FetchedFolder(pathToFileURL(folder));
      opened.set(key, await Engine.open(change ? new Changed(address, change) : address, options));
    }
    const engine = opened.get(key);
    engine.patienceMs = 0; // a long prompt is read in pieces
    const rounds = [];
    for await (const round of engine.generate(prompt, settings)) rounds.push(round);
    found.push({ facts: engine.facts, rounds });
  } catch (error) {
    if (error.name !== "EdgespecError") throw error;
    found.push({ error: error.message, code: error.code });
  }
}
process.stdout.write(JSON.stringify(found));
