// What a node computes, as text: one step a line, "kind key=value ...".  The exporter writes it, Program::parse reads
// it.
//
//   floats id width            a float32 buffer [rows, width]
//   acts id width              quantized (or copied) activations [rows, width]
//   lent layer dim             a layer of another model, whose cache this one's passes are given, for shared=1
//   embed w kind n k out bias scale positions    rows of a matrix -> floats, times scale, plus the row's position's row
//                                          of positions [P, k]; bias: the rows' scales, for r8
//   load out k at              columns at to at + k of the input hidden_in -> floats
//   store x k at               floats -> columns at to at + k of the output hidden, as wide as the stores that are on
//   gate index other skip      if gate `index` is off, and gate `other` where one is named, leave out the next `skip`
//                              steps
//   quantize x norm beta center eps k kind out rows times first    (normed) floats -> what a matrix of that kind
//                                          multiplies
//   norm x norm beta center eps k out add rows scale n at    normed floats -> floats; n: columns at to at + k of a
//                                          buffer n wide, which may be a copy, without norm.  add=1: to what is there,
//                                          and the sum times scale.  center=1: less the mean first, which makes it a
//                                          layer norm, if need be without weights; beta: added at last
//   heads act w kind k bias dim heads kv rotary cos sin growth qnorm knorm vnorm late eps layer scale shared
//                                          q, k, v of a layer; keys are rotated and appended to the cache with the
//                                          values, queries wait for attend.  late=1: norms come after the rotation;
//                                          growth [P]: what a query at that position is multiplied by; shared=1:
//                                          queries alone, for keys and values that an earlier step has appended for
//                                          this layer
//   heads qx kx vx dim heads ...            the same from floats [heads * dim], [kv * dim], [kv * dim] that have been
//                                          multiplied already; act, w, kind, k and bias are not looked at
//   convolve x k length layer w bias out    x [rows, 3 k] = b, c, v: out [rows, k] = c * (bias + sum over j of w[j] *
//   (b * v
//                                          of the token length - 1 - j before)), a row's own tokens by its parents,
//                                          older ones from the cache's states; w [length, k], layer: which of those
//                                          with states
//   route x n k out add scale first fn bias    the best k - first of the softmax of x [rows, n - first], or fn=sigmoid,
//                                          times scale, add=1: over their sum; the last first ones always, by their
//                                          sigmoid -> [rows, 2 k], weights and then numbers.  bias [n - first]: added
//                                          to what they are chosen by, not to weights
//   experts act x gate up w kind n k times heads fn out add    of the experts that route chose (x, heads of times), w
//                                          (fn(gate) * up), by their weights; gate, up [times * n, k], w [times * k, n]
//   delta x k z a b length layer w bias rate norm eps heads kv dim n out scale    a gated delta rule: x [rows, k] = q,
//                                          k [kv, dim], v [heads, n] before the short convolution w [length, k] and
//                                          silu; a, b [rows, heads]: what decays and scale * betas are made of, with
//                                          bias and rate [heads]; out [rows, heads * n], each head normed and times
//                                          silu(z).
//                                          up [heads] makes it a state space: decay and step of a alone, up times v is
//                                          added, heads are not normed; upbias [k]: of the convolution
//   multiply x k fn out times               out [rows, k] *= fn(x [rows, k / times]), in place; each number of x
//                                          stands for so many
//   attend out layer heads kv dim window cap    -> floats [heads * dim]; window: a row at position p sees positions
//                                          p - window + 1 to p only, 0: all; cap: scores are cap * tanh(score / cap)
//   linear act w kind n k bias out add rows    -> floats; add=1: to what is there
//   glu act gate up bias upbias kind n k out fn            fn(gate) * up -> activations for a matrix of the same kind;
//                                          floats for c8, whose scale needs the whole row
//   activate x k fn w rows                  in place; w [3]: the numbers of xielu
//   silu x k                                activate fn=silu rows=1
//   blend x base w kind n k times first bias scale fn    in place: fn(x) * (base + scale * part `first` of the row of
//                                          w [n, times * k] of each token); bias: the parts' scales [n, times], for r8
//   split x base n times out                x [R, times * n] (+ base [R, n]) -> out [times * R, n], where row j * R + r
//                                          is part j of row r
//   logits act w kind n k times first bias scale cap    an LM head: rows first * R to (first + times) * R of the
//                                          output are (y + bias) * scale, as cap * tanh(that / cap) if there is a cap
//
// fn: silu, gelu (exact), gelu_tanh (its approximation by tanh), relu, relu2 (its square), sigmoid or, for activate,
// xielu.
// rows: 0 = all rows of the pass.  1 = the R rows that reach an LM head; quantize and norm pick them, linear has them
// already.  2, for quantize = times * R rows of a buffer that holds such rows, from row first * R on.
// w, bias, upbias, norm, beta, positions, cos, sin, growth, qnorm, knorm, vnorm, gate, up are indices of weight inputs,
// -1 for none.
#pragma once
#include <string>
#include <vector>

#include "layout.h"

namespace edgespec {

constexpr int kBuffers = 64;  // of each kind that a program may declare

enum class Op {
  kEmbed,
  kLoad,
  kStore,
  kGate,
  kQuantize,
  kNorm,
  kHeads,
  kAttend,
  kConvolve,
  kDelta,
  kMultiply,
  kLinear,
  kGlu,
  kActivate,
  kSplit,
  kBlend,
  kRoute,
  kExperts,
  kLogits
};

struct Step {
  Op op = Op::kEmbed;
  Kind kind = kQ4;
  Fn fn = kSilu;
  int w = -1, bias = -1, norm = -1, cos = -1, sin = -1, qnorm = -1, knorm = -1, vnorm = -1, gate = -1, up = -1,
      upbias = -1;
  int beta = -1, positions = -1, growth = -1, rate = -1;
  int n = 0, k = 0, x = -1, base = -1, act = -1, out = -1, add = 0, rows = 0, times = 1, first = 0;
  int qx = -1, kx = -1, vx = -1, z = -1, a = -1, b = -1, center = 0, late = 0;
  int heads = 0, kv = 0, dim = 0, rotary = 0, layer = 0, window = 0;
  int index = 0, other = -1, skip = 0, length = 0, shared = 0, at = 0;
  float eps = 0, scale = 1, cap = 0;

  bool spaces() const { return up >= 0; }  // of delta: a state space
  bool norms() const { return norm >= 0 || center; }
  bool open(const bool* gates) const { return gates[index] || (other >= 0 && gates[other]); }  // of a gate
  bool finishes() const { return bias >= 0 || scale != 1 || cap > 0; }                         // of logits
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
  int gates = 0, layers = 0, kv_heads = 0, head_dim = 0;  // head_dim: of the largest
  std::vector<int> dims;                                  // sizes of heads, by layer
  // Layers without attention: how many, numbers of a token's row, tokens that a convolution sees, numbers of matrices.
  int states = 0, state_width = 0, state_length = 0, state_matrix = 0;
  int hidden = 0;   // width of what stands first in hidden
  int given = 0;    // width of the input hidden_in
  int vocab = 0;    // columns of the first LM head, the model's own
  int weights = 0;  // inputs that the steps name

  // Throws std::invalid_argument with the line that cannot be read.
  static Program parse(const std::string& text);

  // What a cache of this model is like, formats apart.
  void describe(KvLayout& layout) const;

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

constexpr int kMaxWidth = 1 << 24;  // of a buffer or a matrix
constexpr int kMaxCount = 1 << 12;  // layers times KV heads times what a cache keeps of each stays far below 2^64

// Throws std::invalid_argument: why this line is not understood.
[[noreturn]] void fail(const std::string& line, const std::string& why);

// Throws std::invalid_argument if a step, as it was read from `line`, lacks something, contradicts itself, or names
// buffers that are not declared or too narrow.
void check(const std::string& line, const Program& program, const Step& step);

}  // namespace program_text
}  // namespace edgespec
