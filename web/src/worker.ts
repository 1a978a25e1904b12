// The worker of a page: it has the module, the tokenizer and the bundle, and answers messages in their order.
import { Engine } from "./engine.js";
import { type Message, Text } from "./text.js";
import { EdgespecError, type OpenOptions, type Settings } from "./types.js";

export type Prompt = { ids: number[] } | { text: string } | { messages: Message[] };
export type Request =
  | { id: number; call: "open"; folder: string | Map<string, Uint8Array | Blob>; options: OpenOptions; ids: boolean }
  | { id: number; call: "generate"; prompt: Prompt; settings: Settings }
  | { id: number; call: "encode"; prompt: Prompt }
  | { id: number; call: "restore"; saved: Uint8Array }
  | { id: number; call: "save" | "facts" | "counts" | "close" }
  | { id: number; call: "cancel" };

let engine: Engine | undefined;
let text: Text | undefined;
let turn: Promise<void> = Promise.resolve();

const scope = globalThis as unknown as {
  onmessage: (event: MessageEvent<Request>) => void;
  postMessage(message: unknown): void;
};

scope.onmessage = ({ data }) => {
  if (data.call === "cancel") return engine?.cancel();
  turn = turn.then(() => run(data));
};

async function run(request: Request): Promise<void> {
  try {
    scope.postMessage({ id: request.id, value: await answer(request) });
  } catch (error) {
    const { message, code } = error as EdgespecError;
    scope.postMessage({ id: request.id, error: { message, code: code ?? "broken" } });
  }
}

function opened(): Engine {
  if (!engine) throw new EdgespecError("expected a bundle that is open");
  return engine;
}

function idsOf(prompt: Prompt): number[] {
  if ("ids" in prompt) return prompt.ids;
  if (!text) throw new EdgespecError("this bundle was opened for token ids");
  return "text" in prompt ? text.encode(prompt.text) : text.chat(prompt.messages);
}

async function answer(request: Request): Promise<unknown> {
  switch (request.call) {
    case "open": {
      const onProgress = (done: number, total: number): void => scope.postMessage({ id: request.id, done, total });
      engine = await Engine.open(request.folder, { ...request.options, onProgress });
      if (!request.ids) text = await Text.load(engine.source);
      return engine.facts;
    }
    case "generate": {
      const words = text?.stream();
      for await (const round of opened().rounds(idsOf(request.prompt), request.settings)) {
        const pieces = [round.tokens.slice(0, round.accepted), round.tokens.slice(round.accepted)];
        const [guessed, own] = pieces.map((ids) => words?.push(ids) ?? "");
        scope.postMessage({
          id: request.id,
          round: { ...round, text: `${guessed}${own}`, guessed, refused: text?.decode(round.rejected) ?? "" },
        });
      }
      return opened().counts;
    }
    case "encode":
      return idsOf(request.prompt);
    case "save":
      return opened().save();
    case "restore":
      return opened().restore(request.saved);
    case "facts":
      return opened().facts;
    case "counts":
      return opened().counts;
    case "close":
      opened().close();
      engine = undefined;
      return null;
    case "cancel":
      return null;
  }
}
