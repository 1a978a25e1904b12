// The computation of a node, as text: one step per line, "kind key=value ...".  The exporter writes it, Program::parse
// reads it.  steps.inl is the table of steps; before them buffers are declared, ids from 0 on:
//
//   floats id width            a float32 buffer [rows, width] acts id width              quantized (or copied)
//   activations [rows, width] lent layer dim             a layer of another model, whose cache this one's passes are
//   given, for shared=1 silu x k                   as a step: activate fn=silu rows=1
#pragma once
#include <cfloat>
#include <string>
#include <vector>

#include "layout.h"

namespace edgespec {

constexpr int kBuffers = 64;        // of each kind that a program may declare
constexpr int kMaxWidth = 1 << 24;  // of a buffer or a matrix
constexpr int kMaxCount = 1 << 12;  // layers times KV heads times what a cache keeps of each stays far below 2^64
constexpr int kMaxGates = 1 << 16, kMaxTimes = 1 << 10, kMaxSkip = 1 << 30;

enum class Op {
#define STEP(name, Name, cut, fields, ...) k##Name,
#include "steps.inl"
};

// Fields of a step; the table lists those that each kind of step needs, and others keep the defaults here.
struct Step {
  Op op = Op::kEmbed;
  Kind kind = kQ4;
  Kind downkind = kQ4;  // of the last matrix of experts
  Fn fn = kSilu;
#define WEIGHT(key) int key = -1;
#define BUFFER(key) int key = -1;
#define NUMBER(key, without, least, most) int key = without;
#define REAL(key, without, least) float key = without;
#include "steps.inl"

  bool fills() const { return memory && !shared; }  // of heads: keys and values of a memory, without queries
  int made() const { return (fills() ? 0 : heads) + (shared ? 0 : 2 * kv); }  // of heads: whose rows it makes
  bool spaces() const { return up >= 0; }                                     // of delta: a state space
  bool norms() const { return norm >= 0 || center; }
  bool open(const bool* gates) const { return gates[index] || (other >= 0 && gates[other]); }  // of a gate
  // Whether only the high plane of a matrix in two planes is read.
  bool high_alone(const bool* gates) const { return high_alone(gates, kind); }
  bool high_alone(const bool* gates, Kind of) const { return of == kP8 && plane >= 0 && !gates[plane]; }
  bool finishes() const { return bias >= 0 || scale != 1 || cap > 0; }  // of logits
};

// A weight input as a step reads it.
struct Weight {
  int id;
  Kind kind;
  int n, k;      // of a matrix; k = 0: a vector of n numbers
  bool by_seen;  // a vector with a number for each position up to the last
  bool low;      // the low plane of a matrix

  size_t bytes() const { return low ? tiles_of(n) * low_bytes(k) : packed_bytes(kind, n, k); }  // of a matrix
};

// Work of a pass with certain gates.
struct Active {
  bool embeds = false, loads = false, attends = false;
  bool sees_memory = false, fills_memory = false;
  int hidden = 0;   // width of the hidden states it gives, 0: none
  int logits = 0;   // rows of logits for each row that reaches an LM head
  int columns = 0;  // of the logits
  int times = 1;    // maximum rows of a buffer for each row that reaches an LM head
};

// The layers whose keys and values a cache holds.
struct KvLayers {
  int count = 0, heads = 0, dim = 0;  // dim: of the largest head
  std::vector<int> dims;              // sizes of heads, by layer

  // One more layer, of which a step says this.  Why it does not fit those before it, or null.
  const char* add(int layer, int kv, int head_dim);
  void describe(KvLayout& layout) const;  // only sizes
};

struct Program {
  std::vector<int> floats, acts;  // widths of the buffers
  std::vector<Step> steps;
  int gates = 0;
  KvLayers kept, memory;  // the layers of a sequence's own cache, and of a memory
  // Layers without attention: how many, numbers of a token's row, tokens that a convolution sees, numbers of matrices.
  int states = 0, state_width = 0, state_length = 0, state_matrix = 0;
  int hidden = 0;     // width of the first columns of hidden
  int given = 0;      // width of the input hidden_in
  int inserted = 0;   // width of the input inserted, 0: there is none
  bool axes = false;  // whether rows have three positions
  int vocab = 0;      // columns of the first LM head, the model's own
  int mixtures = 0;   // steps of experts, which are numbered by `layer`
  int weights = 0;    // inputs that the steps name
  std::vector<Weight> sizes;
  int most_heads = 0;

  // Throws std::invalid_argument with the line that cannot be read.
  static Program parse(const std::string& text);

  // Layout of a cache of this model, without formats.
  void describe(KvLayout& layout) const;
  // Layout of a cross-attention cache, given that of the cache: without states, and never with codes of keys.
  KvLayout memory_layout(const KvLayout& own) const;

  // Throws std::invalid_argument: too few gates, or LM heads that do not fit together.
  Active active(const bool* gates, int count) const;

  // Calls visit(step) for every step but gates that these gates leave in.
  template <class Visit>
  void each(const bool* gates, Visit visit) const {
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].op != Op::kGate)
        visit(steps[i]);
      else if (!steps[i].open(gates))
        i += steps[i].skip;
    }
  }
};

namespace program_text {

// Throws std::invalid_argument: why this line is not understood.
[[noreturn]] void fail(const std::string& line, const std::string& why);

// Reads a step as its row of the table says, and adds its weights to those of the program.  Throws
// std::invalid_argument if it lacks something, contradicts itself, or names buffers that are not declared or too
// narrow.
Step read_step(const std::string& line, Program& program);

// A whole number of at most 2^30, -1 for none.
int integer(const std::string& line, const std::string& value);

}  // namespace program_text
}  // namespace edgespec
