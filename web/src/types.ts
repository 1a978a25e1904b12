/** Which form of keys and values a session keeps. */
export type Attention = "f32" | "f16" | "int8";

/** Settings of a text; those of Python, whose names they have in camel case. Anything left out is off or the default. */
export interface Settings {
  /** plain, ngram, speculative, self-spec, or several with commas between; without it, the bundle's fastest. */
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
  finish: "stop" | "length" | "context" | null;
  /** The drafter that guessed; "" without guesses. */
  drafter: string;
  /** Log-probabilities of the tokens, where settings ask for them. */
  logprobs: number[] | null;
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
  /** Where the modules are; without it, next to this file. */
  modules?: string | URL;
  /** Kernels instead of this machine's best: relaxed, simd128 or scalar. */
  isa?: string;
  /** Keep weights in the origin's private file system, and read them from there next time. */
  keep?: boolean;
  /** Called while weights are read: bytes done, of how many. */
  onProgress?: (done: number, total: number) => void;
}

/** A call failed: what was expected, and what came. */
export class EdgespecError extends Error {
  override name = "EdgespecError";
  constructor(
    message: string,
    readonly code: "refused" | "no memory" | "cancelled" | "full" | "no file" | "broken" = "refused",
  ) {
    super(message);
  }
}
