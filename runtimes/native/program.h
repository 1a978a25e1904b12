// What a node computes, as text: one step a line, "kind key=value ...".  The exporter writes it, Program::parse reads
// it.
//
//   floats id width            a float32 buffer [rows, width]
//   acts id width              quantized (or copied) activations [rows, width]
//   embed w kind n k out bias  rows of a matrix -> floats; bias: the rows' scales, for r8
//   gate index skip            if gate `index` is off, leave out the next `skip` steps
//   quantize x norm eps k kind out rows    (normed) floats -> what a matrix of that kind multiplies; rows=1: only the
//                                          rows that reach the LM head
//   heads act w kind k bias dim heads kv rotary cos sin qnorm knorm eps layer scale out    q, k, v of a layer; keys are
//                                          rotated and appended to the cache with the values, queries go to `out`
//   attend out layer heads kv dim window    -> floats [heads * dim]
//   linear act w kind n k bias out add      -> floats; add=1: to what is there
//   glu act gate up bias upbias kind n k out            silu(gate) * up -> activations for a matrix of the same kind;
//   floats
//                                          for c8, whose scale needs the whole row
//   logits act w kind n k                   the LM head
//
// w, bias, upbias, norm, cos, sin, qnorm, knorm, gate, up are indices of weight inputs, -1 for none.
#pragma once
#include <string>
#include <vector>

#include "layout.h"

namespace edgespec {

enum class Op { kEmbed, kGate, kQuantize, kHeads, kAttend, kLinear, kGlu, kLogits };

struct Step {
  Op op = Op::kEmbed;
  Kind kind = kQ4;
  int w = -1, bias = -1, norm = -1, cos = -1, sin = -1, qnorm = -1, knorm = -1, gate = -1, up = -1, upbias = -1;
  int n = 0, k = 0, x = -1, act = -1, out = -1, add = 0, rows = 0;
  int heads = 0, kv = 0, dim = 0, rotary = 0, layer = 0, window = 0;
  int index = 0, skip = 0;
  float eps = 0, scale = 1;
};

struct Program {
  std::vector<int> floats, acts;  // widths of the buffers
  std::vector<Step> steps;
  int gates = 0, layers = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  int weights = 0;  // inputs that the steps name

  // Throws std::invalid_argument with the line that cannot be read.
  static Program parse(const std::string& text);
};

}  // namespace edgespec
