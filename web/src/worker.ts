// The worker of a page: it has the module, the tokenizer and the bundle, and answers messages in their order.
import { Engine } from "./engine.js";
import type { Message, TemplateOptions } from "./text.js";
import { EdgespecError, type OpenOptions, type Settings } from "./types.js";

export type Prompt = string | number[] | Message[];
export type Request =
  | { id: number; call: "open"; folder: string | Map<string, Uint8Array | Blob>; options: OpenOptions }
  | { id: number; call: "generate"; prompt: Prompt; settings: Settings; more: TemplateOptions }
  | { id: number; call: "encode"; prompt: string | Message[]; more: TemplateOptions }
  | { id: number; call: "restore"; saved: Uint8Array }
  | { id: number; call: "save" | "facts" | "counts" }
  | { id: number; call: "cancel"; texts: number[] };

let engine: Engine | undefined;
let running = 0; // the text that is being decoded
const cancelled = new Set<number>(); // texts that have not begun
let turn: Promise<void> = Promise.resolve();

const scope = globalThis as unknown as {
  onmessage: (event: MessageEvent<Request>) => void;
  postMessage(message: unknown): void;
};

scope.onmessage = ({ data }) => {
  if (data.call !== "cancel") turn = turn.then(() => run(data));
  else
    for (const id of data.texts)
      if (id === running) engine?.cancel();
      else if (id > running) cancelled.add(id);
};

async function run(request: Request): Promise<void> {
  try {
    scope.postMessage({ id: request.id, value: await answer(request) });
  } catch (error) {
    const { message, code } = error as EdgespecError;
    scope.postMessage({ id: request.id, error: { message, code: error instanceof EdgespecError ? code : "broken" } });
  }
}

async function answer(request: Request): Promise<unknown> {
  if (request.call === "open") {
    const onProgress = (done: number, total: number): void => scope.postMessage({ id: request.id, done, total });
    engine = await Engine.open(request.folder, { ...request.options, onProgress });
    return engine.facts;
  }
  if (!engine) throw new EdgespecError("expected a bundle that is open");
  switch (request.call) {
    case "generate":
      return generate(engine, request);
    case "encode":
      return engine.encode(request.prompt, request.more);
    case "save":
      return engine.save();
    case "restore":
      return engine.restore(request.saved);
    case "facts":
      return engine.facts;
    case "counts":
      return engine.counts;
  }
}

async function generate(engine: Engine, { id, prompt, settings, more }: Request & { call: "generate" }): Promise<unknown> {
  running = id;
  if (cancelled.delete(id)) throw new EdgespecError("cancelled", "cancelled");
  const rounds = isConversation(prompt) ? engine.chat(prompt, settings, more) : engine.generate(prompt, settings);
  for (;;) {
    const { done, value } = await rounds.next();
    if (done) return value;
    scope.postMessage({ id, round: value });
  }
}

function isConversation(prompt: Prompt): prompt is Message[] {
  return typeof prompt !== "string" && typeof prompt[0] === "object";
}
