/** Which form of keys and values a session keeps. */
export type Attention = "f32" | "f16" | "int8";

/** Settings of a text; those of Python, whose names they have in camel case. Anything left out is off or the default. */
export interface Settings {
  /**
   * plain, ngram, speculative, self-spec, medusa, blockwise, eagle, mtp, dflash, or several with commas between, which
   * are asked in turn.  Without it, those of the bundle that are fastest, one at a time, by what is measured.
   */
  method?: string;
  /** Maximum guesses of a round, 0 to 64. */
  guesses?: number;
  /** Maximum new tokens; without it, to the end of the context. */
  maxNewTokens?: number;
  /** Token ids that end the text, besides the bundle's. */
  stops?: number[];
  ignoreEos?: boolean;
  /** 0: greedy. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repetitionPenalty?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  /** By token id; null forbids a token. */
  logitBias?: Record<number, number | null>;
  seed?: number;
  /** Sampled texts are plain decoding's; without it more guesses are accepted, by rejection sampling. */
  coupled?: boolean;
  /** Rejection judges a chain of guesses as a whole. */
  block?: boolean;
  /** Children of each guess of a tree, by depth. */
  branch?: number[];
  logprobs?: boolean;
  /** Every round has `guesses` guesses, where there are any. */
  fixed?: boolean;
  /** Token ids of a text that is expected, such as a file before an edit. */
  prediction?: number[];
  /** Texts that end the text, of which they are no part. */
  stopTexts?: string[];
  /** Rounds say the log-probabilities of this many of the likeliest tokens, at most 20. */
  topLogprobs?: number;
  /** medusa: guesses of its tree; without it, as many as are predicted to be fastest. */
  nodes?: number;
  /** blockwise: passes that refine a block before it is verified. */
  cycles?: number;
  /** Which tokens may come next. `Model` takes the address of a script that exports a Mask as its default. */
  mask?: Mask | string | URL;
}

/**
 * Forbids tokens, such as those that a grammar does not allow: sets some of `allowed`, which are all 1, to 0.  It is
 * asked for any prefix of prompt, text and guesses, in any order, and must answer by the prefix alone.
 */
export type Mask = (prefix: number[], allowed: Uint8Array, more: MaskFacts) => void;
export interface MaskFacts {
  /** How many tokens of the prefix are the prompt. */
  prompt: number;
  /** Logits of the place, after bias and penalties. */
  logits: Float32Array;
  /** The words of tokens; "" where the bundle was opened for token ids. */
  decode(ids: number[]): string;
}

/** One pass of the model, and what came of it. */
export interface Round {
  /** New token ids, at least one. */
  tokens: number[];
  /** All guesses of the round. */
  drafted: number[];
  /** Guesses that would have followed the accepted ones. */
  rejected: number[];
  /** How many of `tokens` were guesses, the first ones. */
  accepted: number;
  /** Why this round is the last; null: it is not. */
  finish: "stop" | "length" | "context" | "stop text" | null;
  /** The drafter that guessed; "" without guesses. */
  drafter: string;
  /** Log-probabilities of the tokens, where settings ask for them. */
  logprobs: number[] | null;
  /** The likeliest tokens in the place of each token, the likeliest first, where settings ask for them. */
  top: { id: number; logprob: number }[][] | null;
  /** The new part of the text, in whole characters; "" where the bundle was opened for token ids. */
  text: string;
  /** The part of it that was guessed. */
  guessed: string;
  /** The words of `rejected`. */
  refused: string;
}

/** Sums of a text. */
export interface Counts {
  promptTokens: number;
  /** Tokens of the prompt that were not read again. */
  reusedTokens: number;
  rounds: number;
  tokens: number;
  drafted: number;
  accepted: number;
  promptMs: number;
  roundMs: number;
  /** Milliseconds of passes in rounds. */
  passMs: number;
  /** Drafters that failed, and why, a line each. */
  dropped: string;
}

/** The open bundle, and how exact it is here. */
export interface Facts {
  version: string;
  /** Instruction set of the kernels: relaxed, simd128 or scalar. */
  isa: string;
  /**
   * "exact": every row has the bits of native kernels, so the text is that of Python and C.  "near-ties may differ":
   * rows are exact among themselves, so that drafts never change a text of this machine, but multiply-adds are rounded
   * twice, and a token may differ from native ones where two logits nearly tie.
   */
  exactness: "exact" | "near-ties may differ";
  /** Threads of a pass, the calling one included. The text does not depend on them. */
  threads: number;
  context: number;
  vocab: number;
  /** Token ids that end a text. */
  stops: number[];
  hasDraft: boolean;
  /** Bytes of the module's memory now. */
  memory: number;
}

export interface OpenOptions {
  /** Maximum tokens of a text; without it the bundle's, and at most 4096. */
  context?: number;
  attention?: Attention;
  /** Maximum bytes of caches. */
  maxBytes?: number;
  /** Without it one for each processor, at most 8, where the page is cross-origin isolated, and in Node; else one. */
  threads?: number | undefined;
  /** Only token ids: no tokenizer is read. */
  ids?: boolean;
  /** A file of `edgespec ngram build`, for the method ngram: its address, or the file. */
  store?: string | URL | Uint8Array | Blob;
  /** Where the modules are; without it, next to this file. */
  modules?: string | URL;
  /** Kernels instead of this machine's best: relaxed, simd128 or scalar. */
  isa?: string;
  /** Keep weights in the origin's private file system, and read them from there next time. */
  keep?: boolean;
  /** Called while weights are read: bytes done, of how many. */
  onProgress?: (done: number, total: number) => void;
  /** Ends the opening, also a download, with an error of code `cancelled`. */
  signal?: AbortSignal;
}

/** A call failed: what was expected, and what came. `network`: a server could not be reached, so try again. */
export class EdgespecError extends Error {
  override name = "EdgespecError";
  constructor(
    message: string,
    readonly code: "refused" | "no memory" | "cancelled" | "full" | "no file" | "network" | "broken" = "refused",
  ) {
    super(message);
  }
}
