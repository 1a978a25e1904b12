/**
 * Native bundles of edgespec in a browser, in their own worker.  In Node, and in your worker, `Engine` runs them in the
 * calling thread.
 */
import { scriptOf } from "./native.js";
import type { Message, TemplateOptions } from "./text.js";
import { type Counts, EdgespecError, type Facts, type OpenOptions, type Round, type Settings } from "./types.js";
import type { Prompt, Request } from "./worker.js";

export { Engine, type Folder } from "./engine.js";
export { FetchedFolder, GivenFiles, type Source } from "./bundle.js";
export { type Message, type TemplateOptions, Text } from "./text.js";
export * from "./types.js";

type Answer = {
  id: number;
  value?: unknown;
  error?: { message: string; code: EdgespecError["code"] };
  round?: Round;
  done?: number;
  total?: number;
};

/** A bundle that is open in a worker, with one text at a time. */
export class Model {
  private last = 0;
  private closed = false;
  private readonly waiting = new Map<number, (message: Answer) => void>();
  private readonly texts = new Set<number>();
  private constructor(
    private readonly worker: Worker,
    /** The opened bundle, and how exact it is here. */
    public facts: Facts,
  ) {
    worker.onmessage = ({ data }: MessageEvent<Answer>) => this.waiting.get(data.id)?.(data);
    worker.onerror = (event) =>
      this.fail(event.message || "the worker did not start: expected all files of the package's dist/ next to index.js", "broken");
  }

  /** Opens a bundle's folder: its address, or its files by name. */
  static async open(folder: string | URL | Map<string, Uint8Array | Blob>, options: OpenOptions = {}): Promise<Model> {
    const { onProgress, signal, ...plain } = options;
    if (signal?.aborted) throw new EdgespecError("cancelled", "cancelled");
    // bundlers look for this form
    const own = (): Worker => new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    const other = scriptOf(new URL("./worker.js", import.meta.url));
    const model = new Model(other ? new Worker(other, { type: "module" }) : own(), undefined as unknown as Facts);
    const end = (): void => model.close();
    signal?.addEventListener("abort", end);
    for (const name of ["modules", "store"] as const)
      if (typeof plain[name] === "string" || plain[name] instanceof URL) plain[name] = absolute(plain[name]);
    const where = folder instanceof Map ? folder : absolute(folder);
    try {
      model.facts = (await model.ask({ call: "open", folder: where, options: plain }, onProgress)) as Facts;
      return model;
    } catch (error) {
      model.close();
      throw error;
    } finally {
      signal?.removeEventListener("abort", end);
    }
  }

  /** Continues a text, or token ids. */
  generate(prompt: string | number[], settings: Settings = {}): AsyncGenerator<Round, Counts, void> {
    return this.stream(prompt, settings, {});
  }
  /** Answers a conversation. */
  chat(messages: Message[], settings: Settings = {}, more: TemplateOptions = {}): AsyncGenerator<Round, Counts, void> {
    return this.stream(messages, settings, more);
  }
  /** Ends the texts that were begun: their generators throw an error of code `cancelled`. */
  cancel(): void {
    this.cancelTexts([...this.texts]);
  }
  async encode(text: string | Message[], more: TemplateOptions = {}): Promise<number[]> {
    return (await this.ask({ call: "encode", prompt: text, more })) as number[];
  }
  async counts(): Promise<Counts> {
    return (await this.ask({ call: "counts" })) as Counts;
  }
  /** The text and the keys and values of the target, for `restore` in a later session of the same bundle. */
  async save(): Promise<Uint8Array<ArrayBuffer>> {
    return (await this.ask({ call: "save" })) as Uint8Array<ArrayBuffer>;
  }
  /** Loads a text of `save` -> the number of tokens that need not be read again. */
  async restore(saved: Uint8Array): Promise<number> {
    return (await this.ask({ call: "restore", saved })) as number;
  }
  /** Ends the worker, and gives all memory back. Calls that wait fail with an error of code `cancelled`. */
  close(): void {
    this.closed = true;
    this.worker.terminate();
    this.fail("closed", "cancelled");
  }

  private async *stream(prompt: Prompt, settings: Settings, more: TemplateOptions): AsyncGenerator<Round, Counts, void> {
    const known = settings.mask instanceof URL || typeof settings.mask === "string" ? absolute(settings.mask) : undefined;
    if (typeof settings.mask === "function")
      throw new EdgespecError("mask: expected the address of a script here: a worker cannot take a function");
    const rounds: Round[] = [];
    let wake = (): void => {};
    let running = true;
    const id = this.last + 1;
    const request = { call: "generate", prompt, settings: { ...settings, mask: known }, more } as const;
    const end = this.ask(request, undefined, (round) => {
      rounds.push(round);
      wake();
    }).finally(() => {
      running = false;
      this.texts.delete(id);
      wake();
    });
    this.texts.add(id);
    end.catch(() => {}); // it is thrown below
    try {
      while (running || rounds.length) {
        const round = rounds.shift();
        if (round) yield round;
        else if (running) await new Promise<void>((resolve) => (wake = resolve));
      }
    } finally {
      if (running) this.cancelTexts([id]); // the caller went away
    }
    return (await end) as Counts;
  }

  private cancelTexts(texts: number[]): void {
    if (!this.closed) this.post({ call: "cancel", texts }, 0);
  }
  private fail(message: string, code: EdgespecError["code"]): void {
    for (const [id, answer] of this.waiting) answer({ id, error: { message, code } });
  }
  private ask(
    request: Unnumbered<Request>,
    onProgress?: (done: number, total: number) => void,
    onRound?: (round: Round) => void,
  ): Promise<unknown> {
    const id = ++this.last;
    return new Promise((resolve, reject) => {
      if (this.closed) throw new EdgespecError("expected a bundle that is open: this one was closed");
      this.waiting.set(id, (message) => {
        if (message.round) return onRound?.(message.round);
        if (message.done !== undefined) return onProgress?.(message.done, message.total!);
        this.waiting.delete(id);
        if (message.error) reject(new EdgespecError(message.error.message, message.error.code));
        else resolve(message.value);
      });
      try {
        this.post(request, id);
      } catch (error) {
        this.waiting.delete(id);
        throw new EdgespecError(`a value that a worker cannot take: ${(error as Error).message}`);
      }
    });
  }
  private post(request: Unnumbered<Request>, id: number): void {
    this.worker.postMessage({ ...request, id });
  }
}

function absolute(address: string | URL): string {
  return String(new URL(address, location.href));
}

type Unnumbered<T> = T extends unknown ? Omit<T, "id"> : never;
