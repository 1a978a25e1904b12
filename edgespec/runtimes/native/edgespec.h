/* Native bundles from C, and from any language that can call C: no Python, no ONNX Runtime.
 *
 * A model is a graph file of native operators (model.native.onnx of a bundle, draft/model.native.onnx).  It has one
 * node, whose program this library runs on the mapped weights of the file next to it.  A cache holds keys, values and
 * states of some texts, its slots.  A pass runs rows after the texts of slots: a row continues its text or an earlier
 * row, so the rows of a slot are a chain or a tree.  Then `keep` commits rows, and the others are forgotten.  Lossless
 * speculative decoding needs nothing else from a model; the caller provides drafters and tokenizers
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

#define EDGESPEC_C_VERSION 3

#if defined(_WIN32) && defined(EDGESPEC_BUILDING)
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

enum {
  EDGESPEC_OK = 0,
  EDGESPEC_REFUSED = 1,  /* a file or an argument; nothing has changed */
  EDGESPEC_NO_MEMORY = 2 /* slots that the call was to change are empty */
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

#ifdef __cplusplus
}
#endif
#endif
