// A thread of passes: it takes work in the module's memory, and never comes back.
import { type Start, instantiated } from "./native.js";

function serve({ module, memory, block }: Start, ready: () => void): void {
  const serve = instantiated(module, memory).edgespec_web_serve!;
  ready();
  serve(block);
}

const scope = globalThis as unknown as {
  WorkerGlobalScope?: unknown;
  onmessage: (event: MessageEvent<Start>) => void;
  postMessage(message: unknown): void;
};
if (scope.WorkerGlobalScope) scope.onmessage = ({ data }) => serve(data, () => scope.postMessage("ready"));
else
  void import("node:worker_threads").then(({ parentPort }) => {
    parentPort!.once("message", (start: Start) => serve(start, () => parentPort!.postMessage("ready")));
  });
