// A bundle in this thread: the worker runs it, and so does Node.
import { GivenFiles, FetchedFolder, KeptFiles, type Source, parsed, place, whole } from "./bundle.js";
import { Native, moduleName } from "./native.js";
import { type Counts, EdgespecError, type Facts, type OpenOptions, type Round, type Settings } from "./types.js";

export type Folder = string | URL | ReadonlyMap<string, Uint8Array | Blob> | Source;

const DEFAULT_CONTEXT = 4096; // keys and values of all of it are reserved

/** An open bundle with one text. All calls are of one thread, and each waits for the one before it. */
export class Engine {
  /** Milliseconds that a prompt is read before other messages are looked at. */
  patienceMs = 50;
  private cancelled = false;
  private constructor(
    private readonly native: Native,
    private readonly bundle: number,
    private readonly session: number,
    /** The other files of the bundle, such as its tokenizer. */
    readonly source: Source,
    private readonly context: number,
  ) {}

  /** Opens a folder: its address, its files by name, or another source. */
  static async open(folder: Folder, options: OpenOptions = {}): Promise<Engine> {
    const native = await Native.load(await compiled(options), options.isa);
    if (options.isa !== undefined && native.isa !== options.isa)
      throw new EdgespecError(`isa ${options.isa}: this machine and module have ${native.isa}`);
    let source = sourceOf(folder);
    const manifest = await whole(source, "edgespec.json");
    if (options.keep) source = new KeptFiles(source, parsed("edgespec.json", manifest));
    const bundle = await place(native, source, manifest, "/bundle", options.onProgress ?? (() => {}));
    try {
      const context = Math.min(native.describe(bundle).context, options.context ?? DEFAULT_CONTEXT);
      const session = native.openSession(bundle, options.attention ?? "", context, options.maxBytes ?? 0);
      return new Engine(native, bundle, session, source, context);
    } catch (error) {
      native.closeBundle(bundle);
      throw error;
    }
  }

  get facts(): Facts {
    const { isa, version, bytes } = this.native;
    const exactness = isa === "simd128" ? "near-ties may differ" : "exact";
    const described = { ...this.native.describe(this.bundle), context: this.context };
    return { version, isa, exactness, threads: 1, memory: bytes, ...described };
  }

  /** Decodes a text from token ids, round by round; `cancel` ends it between passes. */
  async *rounds(prompt: ArrayLike<number>, settings: Settings = {}): AsyncGenerator<Round, void, void> {
    this.cancelled = false;
    await this.patiently(() => this.native.begin(this.session, prompt, settings));
    for (;;) {
      if (this.cancelled) throw new EdgespecError("cancelled", "cancelled");
      const round = await this.patiently(() => this.native.next(this.session));
      yield round;
      if (round.finish) return;
      await breath();
    }
  }

  /** Ends the text that is being decoded, with an error of code `cancelled`. */
  cancel(): void {
    this.cancelled = true;
  }
  get counts(): Counts {
    return this.native.counts(this.session);
  }
  /** The text and the keys and values of the target, for `restore` in a later session of the same bundle. */
  save(): Uint8Array {
    this.native.save(this.session, "/session");
    const saved = this.native.read("/session")!;
    this.native.drop("/session");
    return saved;
  }
  /** Loads a text of `save` -> the number of tokens that need not be read again. */
  restore(saved: Uint8Array): number {
    this.native.file("/session", saved.length)(0, saved);
    try {
      return this.native.restore(this.session, "/session");
    } finally {
      this.native.drop("/session");
    }
  }
  close(): void {
    this.native.closeSession(this.session);
    this.native.closeBundle(this.bundle);
  }

  // Runs a call that may read a prompt, in pieces: what was read before a cancelled call is not read again.
  private async patiently<T>(call: () => T): Promise<T> {
    for (;;) {
      const begun = performance.now();
      let first = -1;
      this.native.progress = (done, total) => {
        if (first < 0) first = done;
        return done > first && done < total && performance.now() - begun > this.patienceMs;
      };
      try {
        return call();
      } catch (error) {
        if (!(error instanceof EdgespecError) || error.code !== "cancelled") throw error;
      }
      await breath();
      if (this.cancelled) throw new EdgespecError("cancelled", "cancelled");
    }
  }
}

function sourceOf(folder: Folder): Source {
  if (typeof folder === "string" || folder instanceof URL) return new FetchedFolder(folder);
  return "pieces" in folder ? folder : new GivenFiles(folder);
}

async function compiled(options: OpenOptions): Promise<WebAssembly.Module> {
  const address = new URL(moduleName(options.isa), options.modules ?? new URL(".", import.meta.url));
  if (address.protocol !== "file:") {
    const answer = await fetch(address);
    if (!answer.ok) throw new EdgespecError(`${address}: status ${answer.status}`, "no file");
    return WebAssembly.compile(await answer.arrayBuffer());
  }
  const { readFile } = await import("node:fs/promises");
  return WebAssembly.compile(await readFile(address));
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
