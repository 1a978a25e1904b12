// The module of WebAssembly: its imports, its memory, and the functions of edgespec.h and web.cpp.
import { type Attention, type Counts, EdgespecError, type Mask, type Round, type Settings } from "./types.js";

const CODES = ["refused", "refused", "no memory", "cancelled", "full", "no file", "broken", "broken"] as const;
const FINISH = [null, "stop", "length", "context", "stop text"] as const;
const NO_SYSTEM_CALL = 52; // ENOSYS of WASI
const [FIRST_PAGES, MOST_PAGES] = [128, 65535]; // of 64 KiB, as tools/build_web.py says
const MOST_THREADS = 8; // unless more are asked for

// A function of the newest instructions, which an engine without relaxed SIMD refuses.
const RELAXED = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 15, 1, 13, 0, 65, 1, 253, 15, 65, 2, 253, 15,
  253, 128, 2, 11,
]);

/** The name of the best module that this engine compiles. */
export function moduleName(isa?: string): string {
  const relaxed = isa === undefined ? WebAssembly.validate(RELAXED) : isa === "relaxed";
  return relaxed ? "edgespec-relaxed.wasm" : "edgespec.wasm";
}

type Call = (...words: number[]) => number;

/** The first message to a thread (thread.ts). */
export interface Start {
  module: WebAssembly.Module;
  memory: WebAssembly.Memory;
  block: number;
}

/** Functions of the page that the module calls. */
export interface Callbacks {
  /** Asked while a prompt is read; true ends the call with `cancelled`. */
  progress(done: number, total: number): boolean;
  decode(ids: number[]): string;
  mask: Mask | null;
}

export class Native {
  readonly page: Callbacks = { progress: () => false, decode: () => "", mask: null };
  private readonly exports: Record<string, Call>;
  private threads: Thread[] = [];
  private failure: unknown = null; // of a function of the page
  private prompt = 0; // tokens of the text's

  private constructor(
    private readonly module: WebAssembly.Module,
    private readonly memory: WebAssembly.Memory,
    environment: string[],
  ) {
    const page = {
      progress: (done: number, total: number) => this.answer(() => Number(this.page.progress(done, total))),
      mask: (...words: [number, number, number, number, number, number, number]) => this.answer(() => this.mask(...words)),
      decode: (ids: number, count: number, text: number, room: number, size: number) =>
        this.answer(() => {
          const bytes = new TextEncoder().encode(this.page.decode(this.ids(ids, count)));
          if (bytes.length <= room) new Uint8Array(memory.buffer, text, room).set(bytes);
          this.view().setUint32(size, bytes.length, true);
          return 0;
        }),
    };
    this.exports = instantiated(module, memory, environment, page);
    this.exports._initialize?.();
  }

  /** Loads a module with a number of threads; without it, as many as this page may have. */
  static async load(module: WebAssembly.Module, isa?: string, threads?: number): Promise<Native> {
    const native = new Native(module, reserved(), isa === undefined ? [] : [`EDGESPEC_ISA=${isa}`]);
    try {
      const most = mostThreads(threads);
      while (native.threadCount < most) native.threads.push(await native.thread());
      return native;
    } catch (error) {
      native.end();
      throw error;
    }
  }
  /** Ends the threads; nothing else may be called after it. */
  end(): void {
    for (const thread of this.threads) thread.end();
    this.threads = [];
  }

  get threadCount(): number {
    return 1 + this.threads.length;
  }
  get bytes(): number {
    return this.memory.buffer.byteLength;
  }
  get version(): string {
    return this.text(this.call("version"));
  }
  get isa(): string {
    return this.text(this.call("isa"));
  }

  /** Makes a file of the module, to be filled: give pieces to what is returned, at most `size` bytes of them. */
  file(path: string, size: number): (at: number, piece: Uint8Array) => void {
    const name = this.words(path);
    const start = this.call("web_file", name, size) >>> 0;
    this.free(name);
    if (!start) throw new EdgespecError(`${path}: no memory for ${size} bytes`, "no memory");
    return (at, piece) => {
      if (at + piece.length > size) throw new EdgespecError(`${path}: expected ${size} bytes, and more came`);
      new Uint8Array(this.memory.buffer, start + at, piece.length).set(piece);
    };
  }
  /** Forgets a file's name; a bundle that is open keeps what it needs. */
  drop(path: string): void {
    const name = this.words(path);
    this.call("web_drop", name);
    this.free(name);
  }
  /** A copy of a file, such as a saved session; null: there is none. */
  read(path: string): Uint8Array<ArrayBuffer> | null {
    const name = this.words(path);
    const at = this.allocate(4);
    const start = this.call("web_find", name, at) >>> 0;
    const size = this.view().getUint32(at, true);
    this.free(name, at);
    return start ? new Uint8Array(this.memory.buffer, start, size).slice() : null;
  }

  openBundle(folder: string): number {
    const name = this.words(folder);
    try {
      return this.made((out) => this.call("bundle_open", name, this.threadCount, out));
    } finally {
      this.free(name);
    }
  }
  closeBundle(bundle: number): void {
    this.call("bundle_close", bundle);
  }
  describe(bundle: number): { hasDraft: boolean; context: number; vocab: number; stops: number[] } {
    const size = 32;
    const at = this.sized(size);
    try {
      this.check(this.call("bundle_describe", bundle, at));
      const view = this.view();
      return {
        hasDraft: view.getInt32(at + 4, true) !== 0,
        context: Number(view.getBigInt64(at + 8, true)),
        vocab: Number(view.getBigInt64(at + 16, true)),
        stops: this.ids(view.getUint32(at + 24, true), view.getInt32(at + 28, true)),
      };
    } finally {
      this.free(at);
    }
  }

  /** Gives a bundle the tokenizer of `page`. */
  setCodec(bundle: number): void {
    this.check(this.call("web_codec", bundle));
  }
  openSession(bundle: number, attention: Attention | "", context: number, maxBytes: number, store: string): number {
    const [name, path] = [this.words(attention), store ? this.words(store) : 0];
    try {
      return this.made((out) => this.call("web_session", bundle, name, context, maxBytes, path, out));
    } finally {
      this.free(name, path);
    }
  }
  closeSession(session: number): void {
    this.call("session_close", session);
  }
  save(session: number, path: string): void {
    const name = this.words(path);
    try {
      this.check(this.call("session_save", session, name));
    } finally {
      this.free(name);
    }
  }
  restore(session: number, path: string): number {
    const name = this.words(path);
    const out = this.allocate(8);
    try {
      this.check(this.call("session_restore", session, name, out));
      return Number(this.view().getBigInt64(out, true));
    } finally {
      this.free(name, out);
    }
  }

  begin(session: number, prompt: ArrayLike<number>, settings: Settings & { masked: boolean }): void {
    const ids = this.allocate(8 * Math.max(prompt.length, 1));
    const text = new TextEncoder().encode(JSON.stringify(settings, numbers));
    const json = this.allocate(text.length);
    try {
      const view = this.view();
      for (let i = 0; i < prompt.length; ++i) {
        if (!Number.isInteger(prompt[i])) throw new EdgespecError(`token ${prompt[i]}: expected a whole number`);
        view.setBigInt64(ids + 8 * i, BigInt(prompt[i]!), true);
      }
      new Uint8Array(this.memory.buffer, json, text.length).set(text);
      this.prompt = prompt.length;
      this.check(this.call("web_begin", session, ids, prompt.length, json, text.length));
    } finally {
      this.free(ids, json);
    }
  }
  next(session: number): Omit<Round, "guessed" | "refused"> {
    const at = this.sized(68);
    try {
      this.check(this.call("next", session, at));
      const view = this.view();
      const [tokens, drafted, rejected] = [8, 12, 16].map((where) =>
        this.ids(view.getUint32(at + where, true), view.getInt32(at + where + 12, true)),
      ) as [number[], number[], number[]];
      const logprobs = view.getUint32(at + 40, true);
      return {
        tokens,
        drafted,
        rejected,
        accepted: view.getInt32(at + 32, true),
        finish: FINISH[view.getInt32(at + 4, true)] ?? null,
        drafter: this.text(view.getUint32(at + 36, true)),
        logprobs: logprobs ? [...tokens.keys()].map((i) => view.getFloat64(logprobs + 8 * i, true)) : null,
        top: this.top(at, tokens.length),
        text: this.text(view.getUint32(at + 44, true), view.getUint32(at + 48, true)),
      };
    } finally {
      this.free(at);
    }
  }
  counts(session: number): Counts {
    const at = this.sized(88);
    try {
      this.check(this.call("session_counts", session, at));
      const view = this.view();
      const whole = (where: number): number => Number(view.getBigInt64(at + where, true));
      return {
        promptTokens: whole(8),
        reusedTokens: whole(16),
        rounds: whole(24),
        tokens: whole(32),
        drafted: whole(40),
        accepted: whole(48),
        promptMs: whole(56) / 1e6,
        roundMs: whole(64) / 1e6,
        passMs: whole(72) / 1e6,
        dropped: this.text(view.getUint32(at + 80, true)),
      };
    } finally {
      this.free(at);
    }
  }

  private async thread(): Promise<Thread> {
    const block = this.call("web_worker") >>> 0;
    if (!block) throw new EdgespecError("no memory for a thread", "no memory");
    return started({ module: this.module, memory: this.memory, block });
  }

  // The round's likeliest tokens in the place of each of `count` tokens.
  private top(round: number, count: number): Round["top"] {
    const view = this.view();
    const [ids, values] = [view.getUint32(round + 52, true), view.getUint32(round + 56, true)];
    const width = view.getInt32(round + 60, true);
    if (!ids) return null;
    return Array.from({ length: count }, (_, row) =>
      Array.from({ length: width }, (_, i) => ({
        id: Number(view.getBigInt64(ids + 8 * (row * width + i), true)),
        logprob: view.getFloat64(values + 8 * (row * width + i), true),
      })).filter(({ id }) => id >= 0),
    );
  }

  // A function of the page may throw: the module ends its call, which then throws the same.
  private answer(work: () => number): number {
    try {
      return work();
    } catch (error) {
      this.failure ??= error;
      return 1;
    }
  }
  private mask(
    text: number,
    count: number,
    path: number,
    pathCount: number,
    logits: number,
    columns: number,
    allowed: number,
  ): number {
    const buffer = this.memory.buffer;
    this.page.mask!(
      [...this.ids(text, count), ...this.ids(path, pathCount)],
      new Uint8Array(buffer, allowed, columns),
      { prompt: this.prompt, logits: new Float32Array(buffer, logits, columns), decode: this.page.decode },
    );
    return 0;
  }

  private call(name: string, ...words: number[]): number {
    try {
      return this.exports[`edgespec_${name}`]!(...words);
    } catch (error) {
      if (error instanceof EdgespecError) throw error;
      throw new EdgespecError(`the module failed in ${name}: ${(error as Error).message}`, "broken");
    }
  }
  private check(status: number): void {
    const failure = this.failure;
    this.failure = null;
    if (status && failure !== null) throw failure;
    if (status) throw new EdgespecError(this.text(this.call("error")).replace(/^edgespec: /, ""), CODES[status]);
  }
  private made(make: (out: number) => number): number {
    const out = this.allocate(4);
    try {
      this.check(make(out));
      return this.view().getUint32(out, true);
    } finally {
      this.free(out);
    }
  }
  private view(): DataView {
    return new DataView(this.memory.buffer); // it moves when memory grows
  }
  private allocate(size: number): number {
    const at = this.call("web_alloc", size) >>> 0;
    if (!at) throw new EdgespecError(`no memory for ${size} bytes`, "no memory");
    return at;
  }
  private sized(size: number): number {
    const at = this.allocate(size);
    new Uint8Array(this.memory.buffer, at, size).fill(0);
    this.view().setUint32(at, size, true);
    return at;
  }
  private free(...all: number[]): void {
    for (const at of all) this.call("web_free", at);
  }
  private words(text: string): number {
    const bytes = new TextEncoder().encode(`${text}\0`);
    const at = this.allocate(bytes.length);
    new Uint8Array(this.memory.buffer, at, bytes.length).set(bytes);
    return at;
  }
  // A text that ends with a zero, or of a size.
  private text(at: number, size?: number): string {
    const bytes = new Uint8Array(this.memory.buffer);
    return at ? new TextDecoder().decode(bytes.slice(at, size === undefined ? bytes.indexOf(0, at) : at + size)) : "";
  }
  private ids(at: number, count: number): number[] {
    const view = this.view();
    return Array.from({ length: count }, (_, i) => Number(view.getBigInt64(at + 8 * i, true)));
  }
}

interface Thread {
  end(): void;
}

/** Instantiates a module over its memory, which threads may share -> its functions. */
export function instantiated(
  module: WebAssembly.Module,
  memory: WebAssembly.Memory,
  environment: string[] = [],
  page: Record<string, (...words: never[]) => number> = {},
): Record<string, Call> {
  const calls = wasi(() => new DataView(memory.buffer), environment);
  const imports: Record<string, Record<string, unknown>> = { env: { memory }, edgespec: {}, wasi_snapshot_preview1: {} };
  for (const { module: from, name } of WebAssembly.Module.imports(module)) {
    if (from === "wasi_snapshot_preview1") imports[from]![name] = calls[name] ?? (() => NO_SYSTEM_CALL);
    if (from === "edgespec") imports[from]![name] = page[name] ?? (() => 1);
  }
  return new WebAssembly.Instance(module, imports as WebAssembly.Imports).exports as unknown as Record<string, Call>;
}

// As much memory as this engine lets a module grow to.
function reserved(): WebAssembly.Memory {
  for (let maximum = MOST_PAGES; ; maximum >>= 1)
    try {
      return new WebAssembly.Memory({ initial: FIRST_PAGES, maximum, shared: true });
    } catch (error) {
      if (maximum < 4 * FIRST_PAGES) throw new EdgespecError(`no memory: ${(error as Error).message}`, "no memory");
    }
}

const IN_NODE = typeof process === "object" && !!process.versions?.node;

// The number of threads, the calling one included.
function mostThreads(asked?: number): number {
  const page = globalThis as unknown as { crossOriginIsolated?: boolean; document?: unknown };
  const may = IN_NODE || (page.crossOriginIsolated === true && page.document === undefined); // a page's own never waits
  if (asked === undefined) return may ? Math.min(globalThis.navigator?.hardwareConcurrency ?? 1, MOST_THREADS) : 1;
  if (!Number.isInteger(asked) || asked < 1 || asked > 64)
    throw new EdgespecError(`threads ${asked}: expected a whole number from 1 to 64`);
  if (asked > 1 && !may)
    throw new EdgespecError(`threads ${asked}: expected 1 outside of workers of a page that is cross-origin isolated`);
  return asked;
}

/** The script of a worker where its own is of another origin, which a page may import, but not start; else null. */
export function scriptOf(script: URL): string | null {
  if (script.origin === globalThis.location?.origin || !/^https?:$/.test(script.protocol)) return null;
  return URL.createObjectURL(new Blob([`import ${JSON.stringify(script.href)};`], { type: "text/javascript" }));
}

async function started(start: Start): Promise<Thread> {
  if (IN_NODE) {
    const { Worker } = await import("node:worker_threads");
    const worker = new Worker(new URL("./thread.js", import.meta.url));
    return new Promise((resolve, reject) => {
      worker.once("message", () => resolve({ end: () => void worker.terminate() }));
      worker.once("error", (error) => reject(new EdgespecError(`a thread: ${error.message}`, "broken")));
      worker.ref();
      worker.postMessage(start);
    }).finally(() => worker.unref()) as Promise<Thread>;
  }
  const other = scriptOf(new URL("./thread.js", import.meta.url));
  const worker = other
    ? new Worker(other, { type: "module" })
    : new Worker(new URL("./thread.js", import.meta.url), { type: "module" });
  return new Promise((resolve, reject) => {
    worker.onmessage = () => resolve({ end: () => worker.terminate() });
    worker.onerror = (event) => reject(new EdgespecError(`a thread: ${event.message || "no script"}`, "broken"));
    worker.postMessage(start);
  });
}

// JSON has no infinity and no NaN, and would write null, which is the default.
function numbers(name: string, value: unknown): unknown {
  if (value === -Infinity && /^\d+$/.test(name)) return null; // a token that is forbidden
  if (typeof value === "number" && !Number.isFinite(value)) throw new EdgespecError(`${name}: expected a finite number`);
  return value;
}

// Calls of the C library to the system, as far as this one makes them: time, random numbers, its environment, and messages.
function wasi(view: () => DataView, environment: string[]): Record<string, (...words: never[]) => number> {
  const bytes = environment.map((line) => new TextEncoder().encode(`${line}\0`));
  const calls = {
    clock_time_get(clock: number, _precision: bigint, out: number): number {
      const ms = clock === 0 ? Date.now() : performance.now();
      view().setBigUint64(out, BigInt(Math.round(ms * 1e6)), true);
      return 0;
    },
    random_get(at: number, size: number): number {
      const random = new Uint8Array(size);
      for (let i = 0; i < size; i += 65536) crypto.getRandomValues(random.subarray(i, i + 65536));
      new Uint8Array(view().buffer, at, size).set(random);
      return 0;
    },
    environ_sizes_get(count: number, size: number): number {
      view().setUint32(count, bytes.length, true);
      view().setUint32(size, bytes.reduce((sum, line) => sum + line.length, 0), true);
      return 0;
    },
    environ_get(places: number, at: number): number {
      bytes.forEach((line, i) => {
        view().setUint32(places + 4 * i, at, true);
        new Uint8Array(view().buffer, at, line.length).set(line);
        at += line.length;
      });
      return 0;
    },
    fd_write(_file: number, pieces: number, count: number, out: number): number {
      let size = 0;
      let text = "";
      for (let i = 0; i < count; ++i) {
        const at = view().getUint32(pieces + 8 * i, true);
        const length = view().getUint32(pieces + 8 * i + 4, true);
        text += new TextDecoder().decode(new Uint8Array(view().buffer, at, length).slice());
        size += length;
      }
      console.error(text);
      view().setUint32(out, size, true);
      return 0;
    },
    sched_yield: (): number => 0,
    proc_exit(code: number): number {
      throw new EdgespecError(`the module ended itself with code ${code}`, "broken");
    },
  };
  return calls as unknown as Record<string, (...words: never[]) => number>;
}
