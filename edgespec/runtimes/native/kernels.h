// The kernels every instruction set provides.  isa_scalar.cpp is the specification: integer sums are equal bit for bit
// everywhere, and so are floats, because every file does the same operations on 16 lanes in the same order.
#pragma once
#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace edgespec {

constexpr int kMaxQueries = 8;   // queries of one attention call
constexpr float kTiny = 1e-30f;  // what is not larger is quantized to zeros

// A query of one head, ready for every key format in use.
struct Query {
  const float* f;      // [dim] times the softmax scale
  const int8_t* q8;    // [dim], for int8 or int4 keys
  float scale, bias;   // score = scale * integer sum + bias
  int32_t minus_sum;   // -sum(q8)
  const uint8_t* lut;  // [subs][16], for nomad keys
};

// Packed weights, and for kP8 their low plane; without it only the high one is read.
struct Weights {
  const uint8_t* high;
  const uint8_t* low;
  Weights(const uint8_t* packed, const uint8_t* low_plane = nullptr) : high(packed), low(low_plane) {}
};

struct Kernels {
  const char* name;
  // y[r][0..columns) of rows r < rows <= 16 for one tile; columns <= 16.  If only the high plane is read, activations
  // have offset_of_high.
  void (*linear[kProducts])(Weights tile, int k, const void* act, int rows, float* y, size_t ld, int columns);
  // Root-mean-square norm (weight null: none), to float32 or to blocks quantized for a matrix of this kind (stride:
  // records from block to block).
  void (*norm)(const float* x, int k, const float* weight, float eps, float* y);
  void (*center)(const float* x, int k, float* y);  // x less its mean: what makes the norm of y a layer norm
  void (*quantize)(const float* x, int k, Kind kind, Act* out, size_t stride);
  // The same of one block of each row, [rows][32].
  void (*quantize_blocks)(const float* x, int rows, Act* out);
  void (*glu[kFns])(const float* gate, const float* up, int n, float* y);  // fn(gate) * up
  // p x^2 + b x above zero, n (e^x - 1 - x) + b x below, of numbers p, n, b; in place.
  void (*xielu)(float* x, int n, const float* numbers);
  void (*softcap)(float* x, int n, float cap);  // x = cap * tanh(x / cap)
  void (*rotate)(float* head, int dim, int rotary, const float* cos, const float* sin);
  void (*add)(float* x, const float* y, int n);  // x += y
  void (*embed)(Kind kind, Weights weights, int k, int64_t row, float* y);
  // Scores [queries][ld] of 16 keys per tile, for `tiles` tiles from `tile` on.  ahead: offset in bytes of the data
  // that is needed next; it is prefetched.
  void (*score)(KvFormat format, const uint8_t* block, int dim, int tile, int tiles, const Query* q, int queries,
                float* out, size_t ld, ptrdiff_t ahead);
  // For scores [queries][ld], of which n count: the largest of each query; s = exp(s - largest) in place, and their
  // sum.
  void (*largest)(const float* s, size_t ld, int n, int queries, float* out);
  void (*exponentials)(float* s, size_t ld, int n, int queries, const float* largest, float* sum);
  // out[q][dim] += p[q][0..tokens) @ values; from a multiple of 32 in the block; p is 0 beyond, to
  // a multiple of 32.
  void (*weigh)(KvFormat format, const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld,
                int queries, float* out, ptrdiff_t ahead);
  void (*scale)(float* x, int n, float by);
  void (*accumulate)(float* x, const float* y, int n, float by);  // x += y * by
  bool (*exceeds)(const float* s, float limit);                   // whether any of 16 numbers is larger or NaN
  // Preparing queries and appending keys.
  float (*quantize_query)(const float* x, int n, int8_t* q, int32_t* minus_sum);  // returns the scale
  void (*lookup_table)(const float* codebook, const float* query, int dim, int sub, uint8_t* lut, float* scale,
                       float* bias);
  void (*nearest)(const float* codebook, const float* key, int dim, int sub, uint8_t* codes);  // of 16 centroids
  void (*to_half)(const float* x, int n, uint16_t* y);
  // A gated delta rule.  decay = exp(-rate ln(1 + exp(a + bias))), beta = 1 / (1 + exp(-b)); without b, beta = ln(1 +
  // exp(a + bias)).
  void (*decays)(const float* a, const float* b, const float* bias, const float* rate, int n, float* decay,
                 float* beta);
  // y = silu(bias + sum over j of w[j] rows[j]), w [length, n]; a row or bias may be null; n a multiple of 16.
  void (*convolve)(const float* const* rows, const float* w, const float* bias, int length, int n, float* y);
  // 16 columns of a state S [dim][16], from one place to another: S = decay S + k (beta (v - decay S^T k))^T, then
  // out = S^T q unless out is null; dim a multiple of 4.
  void (*delta)(const float* from, float* to, int dim, const float* q, const float* k, const float* v, float decay,
                float beta, float* out);
  // The same of a state space (arXiv 2405.21060): S = decay S + k (step v)^T, then out = S^T q + skip v.
  void (*space)(const float* from, float* to, int dim, const float* q, const float* k, const float* v, float decay,
                float step, float skip, float* out);
  // Multiplies bytes in registers and nothing else, as matrices do: their roof.  Returns multiply-adds.
  int64_t (*dots)(int64_t rounds);
};

// Instruction sets, the best first.
#define EDGESPEC_ISAS(each) \
  each(avx512) each(avxvnni) each(avx2) each(i8mm) each(neon) each(relaxed) each(simd128) each(scalar)
#define EDGESPEC_DECLARE(isa) const Kernels* isa##_kernels();  // null where it is not compiled in
EDGESPEC_ISAS(EDGESPEC_DECLARE)
#define EDGESPEC_NAME(isa) #isa,
constexpr const char* kIsas[] = {EDGESPEC_ISAS(EDGESPEC_NAME)};

// The kernels of an instruction set by its name; null where this processor or build lacks them.
const Kernels* kernels_named(const char* name);
// The best that this processor runs; the environment variable EDGESPEC_ISA, a name, overrides it.
const Kernels& kernels();
const char* kernels_error();  // why EDGESPEC_ISA was not followed, or null

}  // namespace edgespec
