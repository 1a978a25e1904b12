// A prebuilt llama.cpp (node-llama-cpp, npm): lines {"tokens", "new"} -> {"prefill_ms", "decode_ms", "tokens"}.
//   node node_llama.mjs MODEL.gguf THREADS CONTEXT        NODE_LLAMA_CPP: the folder that has node_modules
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const require = createRequire(`${process.env.NODE_LLAMA_CPP ?? process.cwd()}/`);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const [modelPath, threads, contextSize] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
const context = await model.createContext({
  contextSize: Number(contextSize), batchSize: 512, threads: Number(threads), flashAttention: true,
});
const sequence = context.getSequence();
console.log(JSON.stringify({ready: true}));
for await (const line of createInterface({input: process.stdin})) {
  const asked = JSON.parse(line);
  await sequence.clearHistory();
  const start = performance.now(), tokens = [];
  let first = start;
  for await (const token of sequence.evaluate(asked.tokens, {temperature: 0, yieldEogToken: true})) {
    if (tokens.push(token) === 1) first = performance.now();
    if (tokens.length >= asked.new) break;
  }
  console.log(JSON.stringify({prefill_ms: first - start, decode_ms: performance.now() - first, tokens}));
}
process.exit(0);
