// What a node computes, as text: one step a line, "kind key=value ...".  The exporter writes it, Program::parse reads
// it.
//
//   floats id width            a float32 buffer [rows, width]
//   acts id width              quantized (or copied) activations [rows, width]
//   embed w kind n k out bias  rows of a matrix -> floats; bias: the rows' scales, for r8
//   load out k                 rows of the input hidden_in -> floats
//   store x k                  floats -> the output hidden
//   gate index skip            if gate `index` is off, leave out the next `skip` steps
//   quantize x norm eps k kind out rows times first    (normed) floats -> what a matrix of that kind multiplies
//   norm x norm eps k out rows              normed floats -> floats
//   heads act w kind k bias dim heads kv rotary cos sin qnorm knorm eps layer scale out    q, k, v of a layer; keys are
//                                          rotated and appended to the cache with the values, queries go to `out`
//   attend out layer heads kv dim window    -> floats [heads * dim]
//   linear act w kind n k bias out add rows    -> floats; add=1: to what is there
//   glu act gate up bias upbias kind n k out            silu(gate) * up -> activations for a matrix of the same kind;
//                                          floats for c8, whose scale needs the whole row
//   silu x k                                in place, of R rows
//   split x base n times out                x [R, times * n] (+ base [R, n]) -> out [times * R, n], where row j * R + r
//                                          is part j of row r
//   logits act w kind n k times first       an LM head: rows first * R to (first + times) * R of the output
//
// rows: 0 = all rows of the pass.  1 = the R rows that reach an LM head; quantize and norm pick them, linear has them
// already.  2, for quantize = times * R rows of a buffer that holds such rows, from row first * R on.
// w, bias, upbias, norm, cos, sin, qnorm, knorm, gate, up are indices of weight inputs, -1 for none.
#pragma once
#include <string>
#include <vector>

#include "layout.h"

namespace edgespec {

enum class Op {
  kEmbed,
  kLoad,
  kStore,
  kGate,
  kQuantize,
  kNorm,
  kHeads,
  kAttend,
  kLinear,
  kGlu,
  kSilu,
  kSplit,
  kLogits
};

struct Step {
  Op op = Op::kEmbed;
  Kind kind = kQ4;
  int w = -1, bias = -1, norm = -1, cos = -1, sin = -1, qnorm = -1, knorm = -1, gate = -1, up = -1, upbias = -1;
  int n = 0, k = 0, x = -1, base = -1, act = -1, out = -1, add = 0, rows = 0, times = 1, first = 0;
  int heads = 0, kv = 0, dim = 0, rotary = 0, layer = 0, window = 0;
  int index = 0, skip = 0;
  float eps = 0, scale = 1;
};

// What a pass with certain gates does.
struct Active {
  bool embeds = false, loads = false, attends = false;
  int hidden = 0;   // width of the hidden states it gives, 0: none
  int logits = 0;   // rows of logits for each row that reaches an LM head
  int columns = 0;  // of the logits
  int times = 1;    // most rows of a buffer for each row that reaches an LM head
};

struct Program {
  std::vector<int> floats, acts;  // widths of the buffers
  std::vector<Step> steps;
  int gates = 0, layers = 0, kv_heads = 0, head_dim = 0;
  int hidden = 0;   // width of hidden states
  int vocab = 0;    // columns of the first LM head, the model's own
  int weights = 0;  // inputs that the steps name

  // Throws std::invalid_argument with the line that cannot be read.
  static Program parse(const std::string& text);

  // Throws std::invalid_argument: too few gates, or LM heads that do not fit together.
  Active active(const bool* gates, int count) const;

  // Calls visit(step) for every step but gates that these gates leave in.
  template <class Visit>
  void each(const bool* gates, Visit visit) const {
    for (size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].op != Op::kGate)
        visit(steps[i]);
      else if (!gates[steps[i].index])
        i += steps[i].skip;
    }
  }
};

}  // namespace edgespec
