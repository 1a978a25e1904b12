/**
 * Native bundles of edgespec in a browser, in their own worker.  In Node, and in your worker, `Engine` runs them in the
 * calling thread.
 */
import type { Message } from "./text.js";
import { type Counts, EdgespecError, type Facts, type OpenOptions, type Round, type Settings } from "./types.js";
import type { Prompt, Request } from "./worker.js";

export { Engine, type Folder } from "./engine.js";
export { FetchedFolder, GivenFiles, KeptFiles, type Source } from "./bundle.js";
export { type Message, Text } from "./text.js";
export * from "./types.js";

/** A round with its words. */
export interface Piece extends Round {
  /** The new part of the text. */
  text: string;
  /** The part of it that was guessed. */
  guessed: string;
  /** The words of `rejected`. */
  refused: string;
}

export interface ModelOptions extends OpenOptions {
  /** Only token ids: no tokenizer is read. */
  ids?: boolean;
}

interface Waiting {
  answer(message: Answer): void;
}
type Answer = {
  id: number;
  value?: unknown;
  error?: { message: string; code: EdgespecError["code"] };
  round?: Piece;
  done?: number;
  total?: number;
};

/** A bundle that is open in a worker, with one text at a time. */
export class Model {
  private last = 0;
  private readonly waiting = new Map<number, Waiting>();
  private constructor(
    private readonly worker: Worker,
    /** The opened bundle, and how exact it is here. */
    public facts: Facts,
  ) {
    worker.onmessage = ({ data }: MessageEvent<Answer>) => this.waiting.get(data.id)?.answer(data);
    worker.onerror = (event) => {
      for (const [id, one] of this.waiting)
        one.answer({ id, error: { message: event.message || "the worker failed", code: "broken" } });
    };
  }

  /** Opens a bundle's folder: its address, or its files by name. */
  static async open(folder: string | URL | Map<string, Uint8Array | Blob>, options: ModelOptions = {}): Promise<Model> {
    const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    const model = new Model(worker, undefined as unknown as Facts);
    const { onProgress, ids, modules, ...plain } = options;
    const known = { ...plain, ...(modules === undefined ? {} : { modules: String(new URL(modules, location.href)) }) };
    const where = folder instanceof Map ? folder : String(new URL(folder, location.href));
    try {
      const request = { call: "open", folder: where, options: known, ids: ids ?? false } as const;
      model.facts = (await model.ask(request, onProgress)) as Facts;
      return model;
    } catch (error) {
      worker.terminate();
      throw error;
    }
  }

  /** Continues a text, or token ids. */
  generate(prompt: string | number[], settings: Settings = {}): AsyncGenerator<Piece, Counts, void> {
    return this.stream(typeof prompt === "string" ? { text: prompt } : { ids: prompt }, settings);
  }
  /** Answers a conversation. */
  chat(messages: Message[], settings: Settings = {}): AsyncGenerator<Piece, Counts, void> {
    return this.stream({ messages }, settings);
  }
  /** Ends the text that is being decoded: its generator throws an error of code `cancelled`. */
  cancel(): void {
    this.post({ call: "cancel" }, this.last);
  }
  async encode(text: string | Message[]): Promise<number[]> {
    const prompt = typeof text === "string" ? { text } : { messages: text };
    return (await this.ask({ call: "encode", prompt })) as number[];
  }
  async counts(): Promise<Counts> {
    return (await this.ask({ call: "counts" })) as Counts;
  }
  async save(): Promise<Uint8Array> {
    return (await this.ask({ call: "save" })) as Uint8Array;
  }
  async restore(saved: Uint8Array): Promise<number> {
    return (await this.ask({ call: "restore", saved })) as number;
  }
  /** Ends the worker, and gives all memory back. */
  close(): void {
    this.worker.terminate();
    for (const [id, one] of this.waiting) one.answer({ id, error: { message: "closed", code: "cancelled" } });
  }

  private async *stream(prompt: Prompt, settings: Settings): AsyncGenerator<Piece, Counts, void> {
    const pieces: Piece[] = [];
    let wake = (): void => {};
    let running = true;
    const end = this.ask({ call: "generate", prompt, settings }, undefined, (piece) => {
      pieces.push(piece);
      wake();
    }).finally(() => {
      running = false;
      wake();
    });
    end.catch(() => {}); // it is thrown below
    try {
      while (running || pieces.length) {
        const piece = pieces.shift();
        if (piece) yield piece;
        else if (running) await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      if (running) this.cancel(); // the caller went away
    }
    return (await end) as Counts;
  }

  private ask(
    request: Unnumbered<Request>,
    onProgress?: (done: number, total: number) => void,
    onRound?: (piece: Piece) => void,
  ): Promise<unknown> {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, {
        answer: (message) => {
          if (message.round) return onRound?.(message.round);
          if (message.done !== undefined) return onProgress?.(message.done, message.total!);
          this.waiting.delete(id);
          if (message.error) reject(new EdgespecError(message.error.message, message.error.code));
          else resolve(message.value);
        },
      });
      this.post(request, id);
    });
  }
  private post(request: Unnumbered<Request>, id: number): void {
    this.worker.postMessage({ ...request, id });
  }
}

type Unnumbered<T> = T extends unknown ? Omit<T, "id"> : never;
