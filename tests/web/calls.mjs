// All calls of an Engine in Node: JSON on standard input and output (test_node.py).
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const asked = JSON.parse(readFileSync(0, "utf8"));
const { Engine } = await import(pathToFileURL(`${asked.package}/index.js`));
const address = pathToFileURL(asked.folder);
const store = pathToFileURL(asked.store);
const engine = await Engine.open(address, { store, threads: 2 });
const found = { memory: [], left: [] };

async function rounds(text, on = () => {}) {
  const all = [];
  for await (const round of text) all.push(round), on(round);
  return all;
}
async function failed(work) {
  try {
    await work();
    return { error: "it did not fail" };
  } catch (error) {
    return { error: error.message, code: error.code ?? null, name: error.name };
  }
}

const own = { maxNewTokens: asked.tokens, ignoreEos: true };
const plain = { ...own, method: "plain", topLogprobs: 3 };
const even = (prefix, allowed, { prompt, logits, decode }) => {
  if (!prefix.length || prompt > prefix.length || logits.length !== allowed.length || typeof decode([1]) !== "string")
    throw new Error("not what a mask is given");
  for (let token = 1; token < allowed.length; token += 2) allowed[token] = 0;
};
found.plain = await rounds(engine.generate(asked.prompt, plain));
found.stopped = await rounds(engine.generate(asked.prompt, { ...own, method: "ngram", stopTexts: [asked.stop] }));
found.masked = await rounds(engine.generate(asked.prompt, { ...own, method: "ngram", mask: even }));
found.stored = await rounds(engine.generate(asked.known, { ...own, method: "ngram", guesses: 8, fixed: true }));
found.chat = engine.encode(asked.messages);
found.tools = engine.encode(asked.messages, { tools: [{ type: "function", function: { name: "add" } }] });
const prediction = found.plain.flatMap((round) => round.tokens);
const expected = { ...own, method: "plain", prediction, guesses: 6, fixed: true };
found.expected = (await rounds(engine.generate(asked.prompt, expected))).length;

const saved = engine.save();
found.cancelled = await failed(() => rounds(engine.generate(asked.prompt, plain), () => engine.cancel()));
engine.patienceMs = 0;
const long = Array(engine.facts.context - 90).fill(0).map((_, i) => (i * 7) % engine.facts.vocab);
found.cancelledPrompt = await failed(async () => {
  const cancelling = new Promise((resolve) => setTimeout(() => resolve(engine.cancel()), 0));
  const first = engine.generate(long, plain).next();
  await cancelling;
  await first;
});
found.replaced = await failed(async () => {
  const first = engine.generate(asked.prompt, { ...own, method: "ngram" });
  await first.next();
  found.replacing = await rounds(engine.generate(asked.prompt, plain));
  await first.next(); // it is no longer there
});
found.aborted = await failed(() => {
  const abort = new AbortController();
  return Engine.open(address, { signal: abort.signal, onProgress: () => abort.abort() });
});
found.maskFails = await failed(() => {
  const mask = () => {
    throw new Error("no such rule");
  };
  return rounds(engine.generate(asked.prompt, { ...own, mask }));
});
found.infinite = await failed(() => rounds(engine.generate(asked.prompt, { temperature: Infinity })));
found.stopTexts = await failed(() => rounds(engine.generate(asked.prompt, { stopTexts: "end" })));
found.template = await failed(() => engine.encode([{ role: "assistant", content: "" }]));
found.damagedSession = await failed(() => engine.restore(saved.slice(0, -8)));
found.restored = engine.restore(saved);
await rounds(engine.generate([...engine.encode(asked.prompt), ...prediction], { ...own, maxNewTokens: 1 }));
found.reused = engine.counts.reusedTokens;
found.after = await rounds(engine.generate(asked.prompt, plain));
for (let turn = 0; turn < 6; ++turn) {
  for (const method of ["plain", "ngram", "speculative", "self-spec"])
    await rounds(engine.generate(asked.prompt, { ...own, method, mask: method === "plain" ? even : undefined }));
  await failed(() => rounds(engine.generate(asked.prompt, plain), () => engine.cancel()));
  await failed(() => rounds(engine.generate(asked.prompt, { method: "magic" })));
  engine.restore(engine.save());
  await failed(() => engine.restore(saved.slice(0, -8)));
  found.memory.push(engine.facts.memory);
}
engine.close();
engine.close();
found.closed = await failed(() => rounds(engine.generate(asked.prompt)));

found.noStore = await failed(() => Engine.open(address, { store: new URL("nothing", store) }));
found.damagedStore = await failed(() => Engine.open(address, { store: readFileSync(asked.store).subarray(0, -1) }));
found.maxBytes = await failed(() => Engine.open(address, { maxBytes: 1 }));
found.noText = await failed(async () => (await Engine.open(address, { ids: true, threads: 1 })).encode("a"));
for (let turn = 0; turn < 12; ++turn) {
  const other = await Engine.open(address, { threads: 3 });
  await rounds(other.generate(asked.prompt, plain));
  other.close();
  await failed(() => Engine.open(address, { threads: 3, attention: "int2" }));
  await new Promise((resolve) => setTimeout(resolve, 50)); // threads end
  globalThis.gc();
  found.left.push(process.memoryUsage().rss);
}
found.threadsLeft = process.getActiveResourcesInfo().filter((one) => one === "Worker").length;
process.stdout.write(JSON.stringify(found));
