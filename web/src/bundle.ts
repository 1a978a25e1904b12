// Where a bundle's files come from, and how they reach the module: each piece is written to its memory as it comes, so
// that memory has weights once.  The origin's private file system can keep them.
import { sha256 } from "@noble/hashes/sha2.js";

import type { Native } from "./native.js";
import { EdgespecError } from "./types.js";

/** A folder: its files, whole or in pieces. */
export interface Source {
  /** The pieces of a file.  Throws EdgespecError: there is none. */
  pieces(name: string): AsyncIterable<Uint8Array>;
}

export interface Manifest {
  target: Part;
  draft?: Part | null;
  drafter?: Part | null;
  translation?: unknown;
  files: Record<string, { size?: number; sha256?: string }>;
}
interface Part {
  graphs?: { native?: { file: string } };
  weights?: string;
  head_vocab?: { file: string } | null;
}

// Only workers have it, and TypeScript's types of pages do not.
interface KeptFile {
  getSize(): number;
  read(into: Uint8Array, options: { at: number }): number;
  write(from: Uint8Array, options: { at: number }): number;
  truncate(size: number): void;
  flush(): void;
  close(): void;
}

/** A folder by its address: of a server, or file: in Node. */
export class FetchedFolder implements Source {
  private readonly base: string;
  constructor(
    url: string | URL,
    private readonly signal?: AbortSignal,
  ) {
    this.base = String(url).replace(/\/*$/, "/");
  }
  async *pieces(name: string): AsyncIterable<Uint8Array> {
    const address = this.base + name.split("/").map(encodeURIComponent).join("/");
    if (address.startsWith("file:")) return yield* local(address, name); // fetch does not read those
    const answer = await fetched(address, this.signal);
    const reader = answer.body!.getReader();
    const size = answer.headers.has("content-encoding") ? 0 : Number(answer.headers.get("content-length"));
    let at = 0;
    try {
      for (;;) {
        const { done, value } = await reader.read().catch((error) => unreachable(address, error));
        if (done && at < size) throw new EdgespecError(`${address}: broke off after ${at} of ${size} bytes`, "network");
        if (done) return;
        at += value.length;
        yield value;
      }
    } finally {
      void reader.cancel().catch(() => {}); // of a download that was given up
    }
  }
}

/** Asks a server for a file.  Throws EdgespecError: there is none, or the server cannot be reached. */
export async function fetched(address: string | URL, signal?: AbortSignal): Promise<Response> {
  const answer = await fetch(address, signal ? { signal } : {}).catch((error) => unreachable(address, error));
  if (!answer.ok) throw new EdgespecError(`${address}: status ${answer.status}`, "no file");
  // servers of single-page applications answer so where there is no such file
  if (answer.headers.get("content-type")?.startsWith("text/html"))
    throw new EdgespecError(`${address}: the server answers with a page: there is no such file`, "no file");
  return answer;
}

function unreachable(address: string | URL, error: unknown): never {
  const { name, message } = error as Error;
  if (name === "AbortError") throw new EdgespecError("cancelled", "cancelled");
  const why = "expected a server that can be reached, and of another origin one that sends Access-Control-Allow-Origin";
  throw new EdgespecError(`${address}: ${message}: ${why}`, "network");
}

async function* local(address: string, name: string): AsyncIterable<Uint8Array> {
  const { createReadStream } = await import("node:fs");
  try {
    yield* createReadStream(new URL(address), { highWaterMark: 1 << 20 });
  } catch (error) {
    throw new EdgespecError(`${name}: ${(error as Error).message}`, "no file");
  }
}

/** Files that the page already has: bytes, or files that a user chose. */
export class GivenFiles implements Source {
  constructor(private readonly files: ReadonlyMap<string, Uint8Array | Blob>) {}
  async *pieces(name: string): AsyncIterable<Uint8Array> {
    const file = this.files.get(name);
    if (!file) throw new EdgespecError(`${name}: not among the files that were given`, "no file");
    if (file instanceof Uint8Array) return yield file;
    for (let at = 0; at < file.size; at += 1 << 22)
      yield new Uint8Array(await file.slice(at, at + (1 << 22)).arrayBuffer());
  }
}

/** Another source, of which each file must have the size and the digest that the manifest says. */
export class CheckedFiles implements Source {
  constructor(
    private readonly from: Source,
    private readonly manifest: Manifest,
  ) {}
  async *pieces(name: string): AsyncIterable<Uint8Array> {
    const entry = this.manifest?.files?.[name];
    if (!entry) return yield* this.from.pieces(name);
    const digest = entry.sha256 === undefined ? null : sha256.create();
    let size = 0;
    for await (const piece of this.from.pieces(name)) {
      digest?.update(piece);
      size += piece.length;
      yield piece;
    }
    if (entry.size !== undefined && size !== entry.size)
      throw new EdgespecError(`${name}: expected ${entry.size} bytes, and ${size} came`);
    const found = digest && Array.from(digest.digest(), (byte) => byte.toString(16).padStart(2, "0")).join("");
    if (found !== null && found !== entry.sha256)
      throw new EdgespecError(`${name}: damaged: its SHA-256 is ${found}, and edgespec.json says ${entry.sha256}`);
  }
}

/** The origin's private file system, by the digest of each file, in front of another source; in a worker only. */
export class KeptFiles implements Source {
  constructor(
    private readonly from: Source,
    private readonly manifest: Manifest,
  ) {}
  async *pieces(name: string): AsyncIterable<Uint8Array> {
    const entry = this.manifest.files[name];
    const size = entry?.size;
    if (!entry?.sha256 || size === undefined || !("FileSystemSyncAccessHandle" in globalThis)) {
      yield* this.from.pieces(name);
      return;
    }
    const file = await keptFile(entry.sha256);
    if (!file) return yield* this.from.pieces(name); // another tab has it open, or there is no such file system
    let whole = file.getSize() === size;
    try {
      if (whole) {
        const piece = new Uint8Array(1 << 22);
        for (let at = 0; at < size; ) {
          const read = file.read(piece, { at });
          if (!read) throw new EdgespecError(`${name}: kept, but cannot be read`, "no file");
          yield piece.subarray(0, read);
          at += read;
        }
        return;
      }
      file.truncate(0); // of a download that was cut off
      let room = true;
      let at = 0;
      for await (const piece of this.from.pieces(name)) {
        room = room && written(file, piece, at);
        at += piece.length;
        yield piece;
      }
      whole = room;
    } finally {
      closed(file, whole);
    }
  }
}

async function keptFile(name: string): Promise<KeptFile | null> {
  try {
    const root = await navigator.storage.getDirectory();
    const folder = await root.getDirectoryHandle("edgespec", { create: true });
    const handle = await folder.getFileHandle(name, { create: true });
    return await (handle as unknown as { createSyncAccessHandle(): Promise<KeptFile> }).createSyncAccessHandle();
  } catch {
    return null;
  }
}

// A file that cannot be kept, such as for want of room, is read from the other source the next time.
function closed(file: KeptFile, whole: boolean): void {
  try {
    file.flush();
  } catch {
    whole = false;
  }
  if (!whole) file.truncate(0);
  file.close();
}

// false: there is no room
function written(file: KeptFile, piece: Uint8Array, at: number): boolean {
  try {
    return file.write(piece, { at }) === piece.length;
  } catch {
    return false;
  }
}

/** A file of a source, whole. */
export async function whole(source: Source, name: string): Promise<Uint8Array> {
  const all: Uint8Array[] = [];
  for await (const piece of source.pieces(name)) all.push(piece.slice());
  const made = new Uint8Array(all.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of all) {
    made.set(piece, at);
    at += piece.length;
  }
  return made;
}

/** Reads a JSON file of a bundle. */
export function parsed(name: string, bytes: Uint8Array): any {
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    throw new EdgespecError(`${name}: expected JSON, as edgespec export writes it; perhaps it was cut off`);
  }
}

// Files that the module opens: graphs of native operators, their weights, and tokens of cut LM heads.
function needed(manifest: Manifest): string[] {
  const names: string[] = [];
  for (const part of [manifest?.target, manifest?.translation ? null : manifest?.draft, manifest?.drafter]) {
    if (!part?.graphs?.native) continue;
    for (const name of [part.graphs.native.file, part.weights, part.head_vocab?.file])
      if (name !== undefined && !names.includes(name)) names.push(name);
  }
  return names;
}

/** Puts a bundle's manifest and files into the module under `folder`, and opens it there -> the bundle. */
export async function place(
  native: Native,
  source: Source,
  text: Uint8Array,
  folder: string,
  onProgress: (done: number, total: number) => void,
): Promise<number> {
  const manifest = parsed("edgespec.json", text) as Manifest;
  const names = needed(manifest);
  const sizes = names.map((name) => {
    const size = manifest.files?.[name]?.size;
    if (size === undefined) throw new EdgespecError(`edgespec.json: says no size of ${name}: export the bundle again`);
    return size;
  });
  const total = sizes.reduce((sum, size) => sum + size, 0);
  const made: string[] = [];
  try {
    const put = (name: string, size: number): ((at: number, piece: Uint8Array) => void) => {
      const write = native.file(`${folder}/${name}`, size);
      made.push(`${folder}/${name}`);
      return write;
    };
    put("edgespec.json", text.length)(0, text);
    let done = 0;
    for (const [i, name] of names.entries()) {
      const write = put(name, sizes[i]!);
      let at = 0;
      for await (const piece of source.pieces(name)) {
        write(at, piece);
        at += piece.length;
        onProgress(done + at, total);
      }
      done += at;
    }
    return native.openBundle(folder);
  } finally {
    for (const path of made) native.drop(path);
  }
}
