/* Native bundles from C, and from any language that can call C: no Python, no ONNX Runtime.
 *
 * There are two levels.  A session over a bundle's folder decodes whole texts: token ids in, token ids out, with the
 * loop, the drafters and the sampling of Python, and its very tokens (examples/c/generate.c).  With a codec, which is
 * optional, it also takes conversations and gives text (examples/c/chat.c).
 *
 * Below it, a model is a graph file of native operators (model.native.onnx of a bundle, draft/model.native.onnx).  It
 * has one node, whose program this library runs on the mapped weights of the file next to it.  A cache holds keys,
 * values and states of some texts, its slots.  A pass runs rows after the texts of slots: a row continues its text or
 * an earlier row, so the rows of a slot are a chain or a tree.  Then `keep` commits rows, and the others are forgotten.
 * Lossless speculative decoding needs nothing else from a model; the caller provides drafters and tokenizers
 * (examples/c/greedy.c).
 *
 * Functions that can fail return an EDGESPEC_ status.  Nothing here writes to stdout or stderr, and no C++ exception
 * leaves the library.
 *
 * Threads: a cache is used by one thread at a time, different caches by different threads, also over one model.
 * Passes of one model wait for each other.  Ownership: results of a pass belong to its cache, and are valid until the
 * next pass of that cache or until it is closed.  A model is kept until it and all of its caches are closed, in any
 * order.  A call that is refused has changed nothing.
 *
 * Structures begin with their size, which the caller sets (EDGESPEC_INIT), and arrays of them come with their count:
 * later versions add fields and entries at the end.  EDGESPEC_C_VERSION is the version of the interface in this
 * header.
 */
#ifndef EDGESPEC_H
#define EDGESPEC_H

#include <stddef.h>
#include <stdint.h>

#define EDGESPEC_C_VERSION 6

#if defined(_WIN32) && defined(EDGESPEC_STATIC)
#define EDGESPEC_API
#elif defined(_WIN32) && defined(EDGESPEC_BUILDING)
#define EDGESPEC_API __declspec(dllexport)
#elif defined(_WIN32)
#define EDGESPEC_API __declspec(dllimport)
#else
#define EDGESPEC_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct edgespec_model edgespec_model;
typedef struct edgespec_cache edgespec_cache;
typedef struct edgespec_bundle edgespec_bundle;
typedef struct edgespec_session edgespec_session;

enum {
  EDGESPEC_OK = 0,
  EDGESPEC_REFUSED = 1,    /* a file or an argument; nothing has changed */
  EDGESPEC_NO_MEMORY = 2,  /* slots that the call was to change are empty */
  EDGESPEC_CANCELLED = 3,  /* the call may be repeated: what was done before is not lost */
  EDGESPEC_FULL = 4,       /* the prompt leaves no room in the context */
  EDGESPEC_NO_FILE = 5,    /* a file that is not there, or a bundle without graphs of native operators */
  EDGESPEC_BROKEN = 6,     /* the model gives NaN or infinity */
  EDGESPEC_HOST_FAILED = 7 /* a pass that the caller runs (edgespec_host) */
};

/* How keys and values are kept.  Formats with tables (int4, nomad) are not offered here. */
enum {
  EDGESPEC_ATTENTION_EXACT = 0, /* float32 for a float32 model, else float16 */
  EDGESPEC_ATTENTION_F32 = 1,
  EDGESPEC_ATTENTION_F16 = 2,
  EDGESPEC_ATTENTION_INT8 = 3
};

/* Rows that reach the LM head. */
enum { EDGESPEC_NO_ROWS = 0, EDGESPEC_ALL_ROWS = 1, EDGESPEC_LAST_ROWS = 2 /* the last one of each slot */ };

/* Hidden states that a pass gives. */
enum {
  EDGESPEC_HIDDEN = 1,    /* the residual stream after the last layer */
  EDGESPEC_AUXILIARY = 2, /* the same after the layers that a drafter taps, in the columns after it */
};

/* Sets the size, and all other fields to zero:  edgespec_request request = EDGESPEC_INIT(edgespec_request); */
#ifdef __cplusplus /* C++ before C++20 has no designated initializers */
#define EDGESPEC_INIT(type)            \
  [] {                                 \
    type made = type();                \
    made.size = uint32_t(sizeof made); \
    return made;                       \
  }()
#else
#define EDGESPEC_INIT(type) {.size = sizeof(type)}
#endif

typedef struct edgespec_facts {
  uint32_t size;
  int32_t layers;
  int32_t vocab;       /* columns of the model's LM head: tokens, or those of its cut vocabulary */
  int32_t hidden;      /* width of the residual stream */
  int32_t input_width; /* of rows that are given instead of tokens */
  int32_t groups;      /* of trained heads */
  int32_t gates;       /* see `gates` of a request */
  int32_t auxiliary;   /* 1: auxiliary hidden states can be had */
  int32_t stateful;    /* 1: some layers keep states, which cannot be cut back but to a checkpoint */
  int32_t exact;       /* what EDGESPEC_ATTENTION_EXACT means */
  uint64_t weight_bytes;
} edgespec_facts;

typedef struct edgespec_request {
  uint32_t size;
  int32_t rows;
  const int64_t* tokens; /* [rows]; may be null with inputs, for a model that needs none of them */
  const float* inputs;   /* [rows, input_width] to begin with instead of tokens; null: none */
  /* [rows]: the earlier row of the pass that a row continues, -1: its slot's text; null: each the one before it */
  const int32_t* parents;
  const int32_t* slots; /* [rows], ascending; null: all of slot 0 */
  /* [gates], 1: computed.  The attention of layer i is 2 i, its MLP 2 i + 1.  After those of the layers: look tokens
   * up, begin with inputs, give hidden states, the model's LM head, each group of heads, auxiliary hidden states (if
   * there are), low planes of int8 matrices by sub-layer.  null: the whole model, and the next fields' choices. */
  const uint8_t* gates;
  int32_t logits; /* which rows' */
  int32_t top;    /* 0: all logits; else only this many best tokens of each row and their logits, at most 1024 */
  int32_t hidden; /* EDGESPEC_HIDDEN + EDGESPEC_AUXILIARY; every row's */
} edgespec_request;

typedef struct edgespec_result {
  uint32_t size;
  int32_t rows;           /* of logits, or of ids and values */
  int32_t columns;        /* of logits */
  int32_t top;            /* columns of ids and values */
  int32_t hidden_columns; /* of hidden, 0: there is none */
  const float* logits;    /* [rows, columns]; null with top */
  const int64_t* ids;     /* [rows, top], best first; the lowest wins a tie */
  const float* values;    /* [rows, top] */
  const float* hidden;    /* [rows of the pass, hidden_columns] */
} edgespec_result;

EDGESPEC_API uint32_t edgespec_c_version(void); /* EDGESPEC_C_VERSION of the library */
EDGESPEC_API const char* edgespec_version(void);
EDGESPEC_API const char* edgespec_isa(void);   /* instruction set of the kernels: avx512, avxvnni, avx2, i8mm, ... */
EDGESPEC_API const char* edgespec_error(void); /* why the last call of this thread that failed did; UTF-8 */

/* Opens a graph file (a path in UTF-8).  Hashes are not checked: `edgespec info --verify` does.  threads, the caller's
 * included: of passes; 0: as many as there are processors. */
EDGESPEC_API int edgespec_open(const char* graph, int32_t threads, edgespec_model** model);
/* Before or after its caches; null is fine. */
EDGESPEC_API void edgespec_close(edgespec_model* model);
EDGESPEC_API int edgespec_describe(const edgespec_model* model, edgespec_facts* facts);

/* Makes empty slots of `tokens` tokens, including the rows of their longest pass.  Memory that no token has reached is
 * not touched. */
EDGESPEC_API int edgespec_cache_open(edgespec_model* model, int32_t slots, int64_t tokens, int32_t attention,
                                     edgespec_cache** cache);
EDGESPEC_API void edgespec_cache_close(edgespec_cache* cache);
EDGESPEC_API uint64_t edgespec_cache_bytes(const edgespec_cache* cache);               /* checkpoints included */
EDGESPEC_API int64_t edgespec_cache_length(const edgespec_cache* cache, int32_t slot); /* tokens; -1: no such slot */

/* Reads a text to the end of a slot's, without the LM head: all of it, or none where it is refused. */
EDGESPEC_API int edgespec_prefill(edgespec_cache* cache, int32_t slot, const int64_t* tokens, int64_t count);
/* Runs rows.  result may be null. */
EDGESPEC_API int edgespec_pass(edgespec_cache* cache, const edgespec_request* request, edgespec_result* result);
/* Commits rows of the last pass (by their numbers in it) to a slot's text: a path from the text on, ascending. */
EDGESPEC_API int edgespec_keep(edgespec_cache* cache, int32_t slot, const int32_t* rows, int32_t count);
/* Forgets tokens after the first `length`.  left: the remaining number, `length` or, if states hold more than that,
 * the number at the last checkpoint before it (0: none); may be null. */
EDGESPEC_API int edgespec_crop(edgespec_cache* cache, int32_t slot, int64_t length, int64_t* left);
/* Saves the states of the current text as a checkpoint for a later crop; the oldest checkpoint except the first is
 * dropped.  Does nothing in models without states. */
EDGESPEC_API int edgespec_checkpoint(edgespec_cache* cache, int32_t slot);
/* Runs a group of trained heads on rows [rows, hidden] of hidden states: logits or best of head 0 for all rows, then of
 * head 1, ...  Rows of a pass may still be kept. */
EDGESPEC_API int edgespec_heads(edgespec_cache* cache, int32_t group, const float* hidden, int32_t rows, int32_t top,
                                edgespec_result* result);

/* Passes of the node itself, for callers that keep the books of texts as edgespec's Python and Kotlin do.  Any native
 * graph has them: encoders, decoders over them, drafters that read their target's keys (since version 2).  Inputs and
 * outputs, their types and what they mean: edgespec/runtimes/native/node.h. */
enum {
  EDGESPEC_NODE_PLAN,
  EDGESPEC_NODE_ROWS,
  EDGESPEC_NODE_GATES,
  EDGESPEC_NODE_MOVES,
  EDGESPEC_NODE_KV,
  EDGESPEC_NODE_CONTROL,
  EDGESPEC_NODE_TABLES,
  EDGESPEC_NODE_HIDDEN_IN,
  EDGESPEC_NODE_MEMORY, /* of a model that attends over what an encoder gave, as the next one */
  EDGESPEC_NODE_SOURCES,
  EDGESPEC_NODE_INSERTED, /* of a model that reads more than tokens */
  EDGESPEC_NODE_AXES,     /* of one whose rows have three positions */
  EDGESPEC_NODE_INPUTS
};
enum { EDGESPEC_NODE_OUTPUTS = 4 };

typedef struct edgespec_array {
  void* data;
  int64_t rows, columns; /* an array of one dimension has 1 row */
} edgespec_array;

/* inputs [input_count]: those that the model has not are not looked at, and may be missing at the end.  outputs
 * [output_count], at least EDGESPEC_NODE_OUTPUTS: logits float, ids int64, values float, hidden float; data, rows and
 * columns say what room there is, and then rows and columns what was written. Too little room is refused. */
EDGESPEC_API int edgespec_run(edgespec_model* model, const edgespec_array* inputs, int32_t input_count,
                              edgespec_array* outputs, int32_t output_count);

/* ---- sessions (since version 4) ----------------------------------------------------------------------------------
 *
 * A session has one text and the memory of its models' caches.  It is used by one thread at a time, except for
 * edgespec_cancel; sessions of one bundle may run in different threads, and their passes take turns.  A bundle is kept
 * until it and all of its sessions are closed, in any order. */

/* Opens a bundle's folder (a path in UTF-8) with its target and its draft model.  threads: as of edgespec_open. */
EDGESPEC_API int edgespec_bundle_open(const char* folder, int32_t threads, edgespec_bundle** bundle);
/* The same for a target that is larger than the memory: its experts, or its layers where it has none, stay in the file
 * until a pass needs them, and `cache` bytes hold some.  The text is the same.  A pass that reads other bytes than the
 * first one did fails.  Refused: a cache too small for two experts or three layers, and systems without such reads. */
EDGESPEC_API int edgespec_bundle_open_streamed(const char* folder, int32_t threads, uint64_t cache,
                                               edgespec_bundle** bundle);
/* The same without models, whose passes the caller runs (edgespec_host): of a bundle for other operators, or of any
 * folder with an edgespec.json that has "schema_version": 6, the context and vocabulary of the "target" ("facts"), and
 * the end tokens of the "tokenizer" ("eos"); of a "draft" likewise (since version 6). */
EDGESPEC_API int edgespec_bundle_open_hosted(const char* folder, edgespec_bundle** bundle);
EDGESPEC_API void edgespec_bundle_close(edgespec_bundle* bundle); /* null is fine */
/* Limits the threads of later passes, the caller's included, such as on a hot device.  From any thread; no result
 * changes (since version 6). */
EDGESPEC_API int edgespec_bundle_limit(edgespec_bundle* bundle, int32_t threads);

/* Adds a LoRA adapter, a folder that PEFT saved for the model of the target, before sessions are opened -> its number,
 * for `adapter` of settings.  An adapter with more than products of two matrices is refused: it can be merged at export
 * (since version 6). */
EDGESPEC_API int edgespec_bundle_add_adapter(edgespec_bundle* bundle, const char* folder, int32_t* adapter);

typedef struct edgespec_bundle_facts {
  uint32_t size;
  int32_t has_draft;
  int64_t context; /* maximum tokens of a text, prompt included */
  int64_t vocab;
  const int64_t* stops; /* [stop_count] tokens that end a text; the bundle's */
  int32_t stop_count;
} edgespec_bundle_facts;
EDGESPEC_API int edgespec_bundle_describe(const edgespec_bundle* bundle, edgespec_bundle_facts* facts);

/* ---- text (since version 5) ----
 *
 * A codec turns text into tokens and back.  It is the tokenizer's library (edgespec_tokenizer.h), which is loaded when
 * it is asked for, or functions of the caller.  Token ids need none. */
typedef struct edgespec_codec {
  uint32_t size;
  int32_t reserved;
  void* user; /* first argument of the functions, which several threads may call at once */
  /* Each writes at most `room` ids or bytes, and says how many there are, so that it may be called again with more
   * room; not 0: it failed.  Texts are UTF-8 with their sizes in bytes. */
  int (*encode)(void* user, const char* text, size_t size, int32_t special, int64_t* ids, size_t room, size_t* count);
  int (*decode)(void* user, const int64_t* ids, size_t count, char* text, size_t room, size_t* size);
  /* conversation: JSON, as edgespec_tokenizer_encode_chat takes it */
  int (*encode_chat)(void* user, const char* conversation, size_t size, int64_t* ids, size_t room, size_t* count);
  const char* (*error)(void); /* why the last call of this thread failed; may be null */
  void (*close)(void* user);  /* called when the bundle is freed; may be null */
} edgespec_codec;

typedef struct edgespec_message {
  const char* role;    /* system, user, assistant, tool; null: content is the whole message, a JSON object */
  const char* content; /* UTF-8 */
} edgespec_message;

/* Gives a bundle its codec, once, before its sessions are opened.  Rounds then have text, and stop texts are possible.
 * The second one opens the bundle's tokenizer by the library at `path`; null: libedgespec_tokenizer.so,
 * libedgespec_tokenizer.dylib or edgespec_tokenizer.dll, where the system finds it. */
EDGESPEC_API int edgespec_bundle_set_codec(edgespec_bundle* bundle, const edgespec_codec* codec);
EDGESPEC_API int edgespec_bundle_load_codec(edgespec_bundle* bundle, const char* path);

/* Write at most `room` ids or bytes, and to count or size how many there are.  special: with what the tokenizer puts
 * around a text.  more: a JSON object with `tools`, `options` of the template, `generation_prompt`, and
 * `continue_final`: the answer continues the last message; null: none. */
EDGESPEC_API int edgespec_encode(const edgespec_bundle* bundle, const char* text, size_t size, int32_t special,
                                 int64_t* ids, size_t room, size_t* count);
EDGESPEC_API int edgespec_decode(const edgespec_bundle* bundle, const int64_t* ids, size_t count, char* text,
                                 size_t room, size_t* size);
EDGESPEC_API int edgespec_encode_chat(const edgespec_bundle* bundle, const edgespec_message* messages,
                                      int32_t message_count, const char* more, int64_t* ids, size_t room,
                                      size_t* count);

/* ---- passes of the caller (since version 6) ----
 *
 * A model of another runtime, such as ONNX Runtime, decodes by the same loop: the caller runs its passes, and has its
 * cache.  Place i of the cache holds the keys and values of token i of the text; a pass writes those of its rows to the
 * places after the first `kept`, one after the other, and whatever was there is not needed any more.  Keys and values
 * of a place depend on the tokens before it in its path, and on nothing else.  The cache has room for the session's
 * context and the rows of a pass, 64 at most where the manifest does not say `extra_rows`. */
typedef struct edgespec_host_pass {
  uint32_t size;
  int32_t rows;
  const int64_t* tokens;    /* [rows] */
  const int64_t* positions; /* [rows] of the tokens in their paths: those before each, ascending in a chain */
  /* [rows]: the earlier row of the pass that a row continues, -1: the kept text; null: each the one before it.  A row
   * attends to the kept text, to the rows of its path, and to itself. */
  const int32_t* parents;
  int64_t kept; /* places that stay; it may be less than after the last pass, which is then cut back */
  /* [move_count][2] to be done first, in this order: what is at one place is copied to another, which is lower; where a
   * path of a tree was kept */
  const int64_t* moves;
  int32_t move_count;
  int32_t scored;  /* rows whose logits are wanted, the last ones; 0: a part of a prompt */
  int64_t columns; /* of logits: the vocabulary, or that of a draft's cut LM head */
  float* logits;   /* [scored, columns] to be written */
} edgespec_host_pass;

typedef struct edgespec_host {
  uint32_t size;
  int32_t trees; /* 1: run knows `parents` and `moves`; 0: it gets chains alone */
  void* user;    /* first argument of the functions */
  /* Runs a pass, in the thread of the session's call; it may use nothing of the session except edgespec_cancel.  not 0:
   * it failed, and the call with EDGESPEC_HOST_FAILED; its rows are forgotten, and it may be run again.  A draft that
   * fails is dropped from the text, which continues (edgespec_counts). */
  int (*run)(void* user, const edgespec_host_pass* pass);
  const char* (*error)(void* user); /* why the last run failed, in UTF-8; may be null, and return null */
} edgespec_host;

typedef struct edgespec_session_options {
  uint32_t size;
  int32_t attention; /* 0: the bundle's, else F32, F16 or INT8 of EDGESPEC_ATTENTION_ */
  int64_t context;   /* maximum tokens of its text; 0: the bundle's.  Memory that no token has reached is not touched */
  const char* ngram_store; /* a file of `edgespec ngram build`, for the method ngram; null: none */
  /* maximum bytes of the caches of the target and the draft: they shorten the context, and a session that has no room
   * for a block of 128 tokens is refused; 0: no limit.  Checkpoints of states are not counted. */
  uint64_t max_bytes;
  /* since version 6: passes of a session over edgespec_bundle_open_hosted, which has no other ones, no saved texts, and
   * the methods plain, ngram and, with a draft, speculative.  They are copied; what they use is the caller's. */
  const edgespec_host* target;
  const edgespec_host* draft; /* null: none */
} edgespec_session_options;
/* options: null is fine. */
EDGESPEC_API int edgespec_session_open(edgespec_bundle* bundle, const edgespec_session_options* options,
                                       edgespec_session** session);
EDGESPEC_API void edgespec_session_close(edgespec_session* session);           /* null is fine */
EDGESPEC_API uint64_t edgespec_session_bytes(const edgespec_session* session); /* of its caches */

/* Writes the session's text and the keys and values of its target to a file that only its owner can read, such as a
 * long prompt that later processes begin with.  Restoring needs the same weights and format of keys; draft models read
 * the tokens again.  A damaged file is refused; one that was made to deceive can change texts. */
EDGESPEC_API int edgespec_session_save(edgespec_session* session, const char* path);
EDGESPEC_API int edgespec_session_restore(edgespec_session* session, const char* path, int64_t* tokens);

/* The settings of a text are Python's (docs/reference/settings.md).  Zero is off, or the default. */
typedef struct edgespec_settings {
  uint32_t size;
  int32_t guesses;        /* maximum guesses of a round; 0: the method's */
  int64_t max_new_tokens; /* 0: to the end of the context */
  /* plain, ngram, speculative, self-spec, medusa, blockwise, eagle, mtp, dflash, or several of these with commas
   * between, which are asked in turn.  auto and null: those of this bundle that are predicted to be fastest, one at a
   * time, by what is measured, and plain decoding where none gains */
  const char* method;
  const int64_t* stops; /* [stop_count] tokens that end the text, besides the bundle's */
  int32_t stop_count;
  int32_t ignore_eos; /* 1: only `stops` end it */
  double temperature; /* 0: greedy */
  int64_t top_k;
  double top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  const int64_t* bias_tokens; /* [bias_count] tokens, and what is added to their logits; -infinity forbids one */
  const double* biases;
  int32_t bias_count;
  int32_t seeded; /* 1: `seed` decides the text; 0: the system's random numbers do */
  int64_t seed;
  int32_t coupled;       /* 1: sampled texts are plain decoding's; 0: more guesses are accepted, by rejection */
  int32_t block;         /* 1: rejection judges a chain of guesses as a whole */
  const int32_t* branch; /* [branch_count] speculative: children of each guess, by depth; null: the bundle's */
  int32_t branch_count;
  int32_t logprobs; /* 1: rounds say the log-probability of each token, of the unadjusted model */
  int32_t fixed;    /* 1: every round has `guesses`, if there are any; 0: as many as is fastest, by what is measured */
  const int64_t* prediction; /* [prediction_count] tokens of a text that is expected, such as a file before an edit */
  int64_t prediction_count;
  /* While a prompt is read: tokens done, of how many; not 0: the call is cancelled.  null: none. */
  int (*progress)(void* user, int64_t done, int64_t total);
  /* Which tokens may follow a text [count] and a path of guesses [path_count] after it, such as a grammar's: sets some
   * of allowed [columns], which are all 1, to 0.  logits [columns]: after bias and penalties.  It is asked for any
   * prefix, in any order, and must answer by the prefix alone.  not 0: the call is cancelled.  null: any token may. */
  int (*mask)(void* user, const int64_t* text, int64_t count, const int64_t* path, int32_t path_count,
              const float* logits, int64_t columns, uint8_t* allowed);
  void* user;
  /* since version 5: [stop_text_count] texts in UTF-8 that end the text, of which they are no part.  They need a codec
   */
  const char* const* stop_texts;
  int32_t stop_text_count;
  int32_t nodes;        /* medusa: guesses of its tree; 0: as many as are predicted to be fastest */
  int32_t cycles;       /* blockwise: passes that refine a block before it is verified; 0: none */
  int32_t top_logprobs; /* rounds say the log-probabilities of this many of the likeliest tokens, at most 20 */
  /* since version 6: an adapter of the target (edgespec_bundle_add_adapter), 0: none; a text that was read with another
   * one is read again */
  int32_t adapter;
  int32_t reserved;
} edgespec_settings;

enum {
  EDGESPEC_GOES_ON = 0,
  EDGESPEC_STOPPED = 1,  /* by a token that ends the text, which is its last one */
  EDGESPEC_LENGTH = 2,   /* max_new_tokens are there */
  EDGESPEC_CONTEXT = 3,  /* the context is full */
  EDGESPEC_STOP_TEXT = 4 /* by a stop text, which the last token completes */
};

/* One pass of the target, and what came of it.  Its arrays are the session's until its next call. */
typedef struct edgespec_round {
  uint32_t size;
  int32_t finish;         /* EDGESPEC_GOES_ON, or why this round is the last */
  const int64_t* tokens;  /* [count] the new ones, at least one */
  const int64_t* drafted; /* [drafted_count] all guesses of the round */
  /* [rejected_count] guesses that would have followed the accepted ones; in a tree the drafter's first choices */
  const int64_t* rejected;
  int32_t count, drafted_count, rejected_count;
  int32_t accepted;       /* how many of `tokens` were guesses, the first ones */
  const char* drafter;    /* the drafter that guessed; "" where none did */
  const double* logprobs; /* [count]; null: not asked for */
  /* since version 5: [text_size] what the tokens add to the text, in whole characters and UTF-8, with a zero after it;
   * null: there is no codec.  What may begin a stop text is held back, and so is a token that ends the text. */
  const char* text;
  size_t text_size;
  /* [count, top_count] the likeliest tokens in the place of each, the likeliest first, by the unadjusted model; -1 and
   * -infinity where there are no more; null: not asked for */
  const int64_t* top_ids;
  const double* top_logprobs;
  int32_t top_count, reserved;
} edgespec_round;

/* Begins a text: reads the prompt [count], of which the session may know the beginning from its text before.  Where it
 * is cancelled, the part that was read is not read again. */
EDGESPEC_API int edgespec_begin(edgespec_session* session, const int64_t* prompt, int64_t count,
                                const edgespec_settings* settings);
/* Runs a round of the text; refused after the last one. */
EDGESPEC_API int edgespec_next(edgespec_session* session, edgespec_round* round);
/* Both, to the end of the text.  on_round is called after each round; not 0: the call is cancelled. */
EDGESPEC_API int edgespec_generate(edgespec_session* session, const int64_t* prompt, int64_t count,
                                   const edgespec_settings* settings,
                                   int (*on_round)(void* user, const edgespec_round* round), void* user);
/* The same after a conversation; more: as of edgespec_encode_chat. */
EDGESPEC_API int edgespec_chat(edgespec_session* session, const edgespec_message* messages, int32_t message_count,
                               const char* more, const edgespec_settings* settings,
                               int (*on_round)(void* user, const edgespec_round* round), void* user);
/* Ends the session's call that is running now with EDGESPEC_CANCELLED, at the end of its pass, or else its next one.
 * From any thread. */
EDGESPEC_API void edgespec_cancel(edgespec_session* session);

typedef struct edgespec_counts { /* of the session's text */
  uint32_t size;
  int32_t reserved;
  int64_t prompt_tokens, reused_tokens; /* the latter were not read again */
  int64_t rounds, tokens, drafted, accepted;
  uint64_t prompt_ns, round_ns, pass_ns; /* of reading the prompt, of rounds, and of passes in rounds */
  const char* dropped; /* drafters that failed, and why, a line each; the session's until its next call */
} edgespec_counts;
EDGESPEC_API int edgespec_session_counts(const edgespec_session* session, edgespec_counts* counts);

#ifdef __cplusplus
}
#endif
#endif
