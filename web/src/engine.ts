// A bundle in this thread: the worker runs it, and so does Node.
import { CheckedFiles, FetchedFolder, fetched, GivenFiles, KeptFiles, type Source, parsed, place, whole } from "./bundle.js";
import { Native, moduleName } from "./native.js";
import { type Message, type TemplateOptions, Text } from "./text.js";
import { type Counts, EdgespecError, type Facts, type OpenOptions, type Round, type Settings } from "./types.js";

export type Folder = string | URL | ReadonlyMap<string, Uint8Array | Blob> | Source;

const DEFAULT_CONTEXT = 4096; // keys and values of all of it are reserved

/** An open bundle with one text. All calls are of one thread; a text that is begun ends the one before it. */
export class Engine {
  /** Milliseconds that a prompt is read before other messages are looked at. */
  patienceMs = 50;
  private cancelled = false;
  private closed = false;
  private turn = 0; // of texts: a later one ends those before it
  private constructor(
    private readonly native: Native,
    private readonly bundle: number,
    private readonly session: number,
    /** The tokenizer and the chat template; null where the bundle was opened for token ids. */
    readonly text: Text | null,
    private readonly context: number,
  ) {}

  /** Opens a folder: its address, its files by name, or another source. */
  static async open(folder: Folder, options: OpenOptions = {}): Promise<Engine> {
    const { signal } = options;
    for (const name of ["context", "maxBytes"] as const)
      if (options[name] !== undefined && !(options[name] > 0))
        throw new EdgespecError(`${name} ${options[name]}: expected more than 0; leave it out for the default`);
    const given = sourceOf(folder, signal);
    const manifest = await whole(given, "edgespec.json");
    let source: Source = new CheckedFiles(given, parsed("edgespec.json", manifest));
    if (options.keep) source = new KeptFiles(source, parsed("edgespec.json", manifest));
    const native = await Native.load(await compiled(options), options.isa, options.threads);
    const onProgress = (done: number, total: number): void => {
      if (signal?.aborted) throw new EdgespecError("cancelled", "cancelled");
      options.onProgress?.(done, total);
    };
    let bundle = 0;
    try {
      if (options.isa !== undefined && native.isa !== options.isa)
        throw new EdgespecError(`isa ${options.isa}: this machine and module have ${native.isa}`);
      bundle = await place(native, source, manifest, "/bundle", onProgress);
      const text = options.ids ? null : await Text.load(source);
      if (text) {
        native.page.decode = (ids) => text.decode(ids);
        native.setCodec(bundle);
      }
      const context = Math.min(native.describe(bundle).context, options.context ?? DEFAULT_CONTEXT);
      const store = options.store === undefined ? "" : await placeStore(native, options.store, signal);
      const session = native.openSession(bundle, options.attention ?? "", context, options.maxBytes ?? 0, store);
      return new Engine(native, bundle, session, text, context);
    } catch (error) {
      if (bundle) native.closeBundle(bundle);
      native.end();
      throw error;
    }
  }

  get facts(): Facts {
    const { isa, version, bytes, threadCount } = this.opened();
    const exactness = isa === "simd128" ? "near-ties may differ" : "exact";
    const described = { ...this.native.describe(this.bundle), context: this.context };
    return { version, isa, exactness, threads: threadCount, memory: bytes, ...described };
  }

  /** Continues a text, or token ids, round by round; `cancel` ends it between passes. */
  async *generate(prompt: string | ArrayLike<number>, settings: Settings = {}): AsyncGenerator<Round, Counts, void> {
    const { mask, ...plain } = settings;
    const [native, ids] = [this.opened(), typeof prompt === "string" ? this.encode(prompt) : prompt];
    native.page.mask = typeof mask === "string" || mask instanceof URL ? await maskOf(mask) : (mask ?? null);
    this.cancelled = false;
    const turn = ++this.turn;
    await this.patiently(turn, () => native.begin(this.session, ids, { ...plain, masked: native.page.mask !== null }));
    for (;;) {
      this.goesOn(turn);
      const round = await this.patiently(turn, () => native.next(this.session));
      yield { ...round, ...this.guesses(round) };
      if (round.finish) return this.counts;
      await breath();
    }
  }
  /** Answers a conversation. */
  chat(messages: Message[], settings: Settings = {}, more: TemplateOptions = {}): AsyncGenerator<Round, Counts, void> {
    return this.generate(this.encode(messages, more), settings);
  }
  /** Token ids of a text, with those that the tokenizer puts before it, or of a conversation. */
  encode(text: string | Message[], more: TemplateOptions = {}): number[] {
    this.opened();
    if (!this.text) throw new EdgespecError("this bundle was opened for token ids");
    return typeof text === "string" ? this.text.encode(text) : this.text.chat(text, more);
  }

  /** Ends the text that is being decoded, with an error of code `cancelled`. */
  cancel(): void {
    this.cancelled = true;
  }
  get counts(): Counts {
    return this.opened().counts(this.session);
  }
  /** The text and the keys and values of the target, for `restore` in a later session of the same bundle. */
  save(): Uint8Array<ArrayBuffer> {
    const native = this.opened();
    native.save(this.session, "/session");
    const saved = native.read("/session")!;
    native.drop("/session");
    return saved;
  }
  /** Loads a text of `save` -> the number of tokens that need not be read again. */
  restore(saved: Uint8Array): number {
    const native = this.opened();
    native.file("/session", saved.length)(0, saved);
    ++this.turn; // a text that is being decoded is no longer there
    try {
      return native.restore(this.session, "/session");
    } finally {
      native.drop("/session");
    }
  }
  /** Gives memory and threads back. A text that is being decoded ends. */
  close(): void {
    if (this.closed) return;
    this.closed = true;
    this.native.closeSession(this.session);
    this.native.closeBundle(this.bundle);
    this.native.end();
  }

  private opened(): Native {
    if (this.closed) throw new EdgespecError("expected a bundle that is open: this one was closed");
    return this.native;
  }

  // The words of guesses.  A round's text may begin with words that were held back, and then come its tokens.
  private guesses(round: { tokens: number[]; rejected: number[]; accepted: number; text: string }) {
    if (!this.text) return { guessed: "", refused: "" };
    const guesses = this.text.decode(round.tokens.slice(0, round.accepted));
    const own = this.text.decode(round.tokens).length - guesses.length;
    const guessed = round.accepted ? round.text.slice(0, Math.max(0, round.text.length - own)) : "";
    return { guessed, refused: this.text.decode(round.rejected) };
  }

  // Runs a call that may read a prompt, in pieces: what was read before a cancelled call is not read again.
  private async patiently<T>(turn: number, call: () => T): Promise<T> {
    for (;;) {
      this.goesOn(turn);
      const begun = performance.now();
      let first = -1;
      this.opened().page.progress = (done, total) => {
        if (first < 0) first = done;
        return done > first && done < total && performance.now() - begun > this.patienceMs;
      };
      try {
        return call();
      } catch (error) {
        if (!(error instanceof EdgespecError) || error.code !== "cancelled") throw error;
      }
      await breath();
    }
  }
  private goesOn(turn: number): void {
    this.opened();
    if (turn !== this.turn)
      throw new EdgespecError("cancelled: another text was begun; open a second Engine for texts side by side", "cancelled");
    if (this.cancelled) throw new EdgespecError("cancelled", "cancelled");
  }
}

function sourceOf(folder: Folder, signal?: AbortSignal): Source {
  if (typeof folder === "string" || folder instanceof URL) return new FetchedFolder(folder, signal);
  return "pieces" in folder ? folder : new GivenFiles(folder);
}

async function placeStore(
  native: Native,
  from: string | URL | Uint8Array | Blob,
  signal?: AbortSignal,
): Promise<string> {
  const [source, name] =
    typeof from === "string" || from instanceof URL
      ? [new FetchedFolder(new URL(".", from), signal), decodeURIComponent(new URL(from).pathname.replace(/.*\//, ""))]
      : [new GivenFiles(new Map([["store", from]])), "store"];
  const bytes = await whole(source, name);
  native.file("/store", bytes.length)(0, bytes);
  return "/store";
}

async function maskOf(script: string | URL): Promise<NonNullable<Native["page"]["mask"]>> {
  let found: unknown;
  try {
    found = ((await import(String(script))) as { default?: unknown }).default;
  } catch (error) {
    throw new EdgespecError(`mask ${script}: ${(error as Error).message}`, "no file");
  }
  if (typeof found !== "function") throw new EdgespecError(`mask ${script}: expected a default export that is a function`);
  return found as NonNullable<Native["page"]["mask"]>;
}

async function compiled({ isa, modules, signal }: OpenOptions): Promise<WebAssembly.Module> {
  const folder = modules === undefined ? new URL(".", import.meta.url) : String(modules).replace(/\/*$/, "/");
  const address = new URL(moduleName(isa), folder);
  let bytes: BufferSource;
  if (address.protocol !== "file:") bytes = await (await fetched(address, signal)).arrayBuffer();
  else
    try {
      bytes = await (await import("node:fs/promises")).readFile(address);
    } catch (error) {
      throw new EdgespecError(`${address}: ${(error as Error).message}`, "no file");
    }
  try {
    return await WebAssembly.compile(bytes);
  } catch (error) {
    const why = "expected an engine with SIMD, threads and exceptions of WebAssembly, such as a browser of 2023 or later";
    throw new EdgespecError(`${address}: ${(error as Error).message}: ${why}`);
  }
}

// Lets messages of other threads arrive.
function breath(): Promise<void> {
  return new Promise((resolve) => {
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      channel.port1.close();
      resolve();
    };
    channel.port2.postMessage(0);
  });
}
