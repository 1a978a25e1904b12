// Code shared by all instruction sets, over the vector types that an isa_*.cpp file defines before including this: F =
// 16 float32, I = 16 int32, B = 64 bytes, and the functions on them (see isa_scalar.cpp).  The file is included inside
// an anonymous namespace: code compiled for one processor must never be linked into another's path.

#include "functions.inl"
#include "recurrent.inl"

void k_norm(const float* x, int k, const float* weight, float eps, float* y) {
  F sum = fset(0.f);
  int i = 0;
  for (; i + 16 <= k; i += 16) {
    const F v = fload(x + i);
    sum = fma(v, v, sum);
  }
  if (i < k) {
    const F v = fload_n(x + i, k - i);
    sum = fma(v, v, sum);
  }
  const float inverse = 1.f / sqrtf(fsum(sum) / static_cast<float>(k) + eps);
  const F by = fset(inverse);
  for (i = 0; i < k; i += 16) {
    const int n = k - i < 16 ? k - i : 16;
    F v = fmul(n == 16 ? fload(x + i) : fload_n(x + i, n), by);
    if (weight) v = fmul(v, n == 16 ? fload(weight + i) : fload_n(weight + i, n));
    if (n == 16)
      fstore(y + i, v);
    else
      fstore_n(y + i, v, n);
  }
}

// The row less its mean.
void k_center(const float* x, int k, float* y) {
  F sum = fset(0.f);
  int i = 0;
  for (; i + 16 <= k; i += 16) sum = fadd(sum, fload(x + i));
  if (i < k) sum = fadd(sum, fload_n(x + i, k - i));
  const F mean = fset(fsum(sum) / static_cast<float>(k));
  for (i = 0; i + 16 <= k; i += 16) fstore(y + i, fsub(fload(x + i), mean));
  if (i < k) fstore_n(y + i, fsub(fload_n(x + i, k - i), mean), k - i);
}

// A NaN makes the scale NaN, whatever becomes of the levels: so it reaches every product of the block.
inline void quantize_block(F a, F b, float largest, Act* out) {
  const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
  const I qa = ftoi(fmul(a, inverse)), qb = ftoi(fmul(b, inverse));
  istore_s8(out->q, qa);
  istore_s8(out->q + 16, qb);
  const uint32_t first = static_cast<uint32_t>(isum(qa)), sum = first + static_cast<uint32_t>(isum(qb));
  out->scale = largest * (1.f / 127.f);
  out->offset = static_cast<int32_t>(-8u * sum);  // wraps where x is NaN
  out->first = static_cast<int32_t>(-8u * first);
  out->sum = out->scale * static_cast<float>(static_cast<int32_t>(sum));
}

void k_quantize_blocks(const float* x, int rows, Act* out) {
  for (int r = 0; r < rows; ++r, x += kBlock) {
    const F a = fload(x), b = fload(x + 16);
    quantize_block(a, b, flargest_size(fmax_size(fabs_(a), fabs_(b))), out + r);
  }
}

// 16 numbers of x [k] from `at` on, with zeros beyond its end.
inline F sixteen(const float* x, int k, int at) {
  return k - at >= 16 ? fload(x + at) : k > at ? fload_n(x + at, k - at) : fset(0.f);
}

void k_quantize(const float* x, int k, Kind kind, Act* out, size_t stride) {
  const int blocks = blocks_of(k);
  float row = 0;
  if (kind == kC8) {
    F m = fset(0.f);
    for (int i = 0; i < k; i += 16) m = fmax_size(m, fabs_(k - i >= 16 ? fload(x + i) : fload_n(x + i, k - i)));
    row = flargest_size(m);
  }
  for (int block = 0; block < blocks; ++block, out += stride) {
    const F a = sixteen(x, k, block * kBlock), b = sixteen(x, k, block * kBlock + 16);
    quantize_block(a, b, kind == kC8 ? row : flargest_size(fmax_size(fabs_(a), fabs_(b))), out);
  }
}

// Pairs (i, i + rotary / 2) turned by the position's angle, as in Hugging Face's models.
void k_rotate(float* head, int, int rotary, const float* cos, const float* sin) {
  const int half = rotary / 2;
  for (int i = 0; i < half; i += 16) {
    const int n = half - i < 16 ? half - i : 16;
    const F c = fload_n(cos + i, n), s = fload_n(sin + i, n), a = fload_n(head + i, n), b = fload_n(head + half + i, n);
    fstore_n(head + i, fnma(b, s, fmul(a, c)), n);
    fstore_n(head + half + i, fma(a, s, fmul(b, c)), n);
  }
}

void k_add(float* x, const float* y, int n) {
  int i = 0;
  for (; i + 16 <= n; i += 16) fstore(x + i, fadd(fload(x + i), fload(y + i)));
  if (i < n) fstore_n(x + i, fadd(fload_n(x + i, n - i), fload_n(y + i, n - i)), n - i);
}

void k_embed(Kind kind, Weights weights, int k, int64_t row, float* y) {
  const int column = static_cast<int>(row % kTile);
  const size_t number = static_cast<size_t>(row / kTile);
  const uint8_t* tile = weights.high + number * tile_bytes(kind, k);
  if (takes_floats(kind)) {
    for (int i = 0; i < k; ++i) y[i] = float_at(kind, tile, size_t(i) * kTile + column);
    return;
  }
  if (is_ggml(kind)) {
    for (int i = 0; i < k; ++i) y[i] = ggml_weight(kind, tile, k, i, column);
    return;
  }
  const int blocks = blocks_of(k);
  const bool four = is_four(kind);
  const size_t payload = payload_bytes(kind);
  const float* column_scales = reinterpret_cast<const float*>(tile + blocks * size_t(512));  // kC8
  for (int block = 0; block < blocks; ++block) {
    const uint8_t *q, *scales;
    if (in_blocks(kind)) {
      const uint8_t* pair = tile + block / 2 * pair_bytes(kind);
      scales = pair + block % 2 * 32;
      q = pair + 64 + block % 2 * payload;
    } else {
      q = tile + block * payload;
      scales = nullptr;
    }
    const float scale =
        scales ? half_to_float(reinterpret_cast<const uint16_t*>(scales)[column]) : column_scales[column];
    for (int i = 0; i < kBlock && block * kBlock + i < k; ++i) {
      int level;
      float more = 0;
      if (four) {
        const int at = (i % 16) / 4 * 64 + column * 4 + i % 4, shift = i < 16 ? 0 : 4;
        level = (q[at] >> shift & 15) - 8;
        if (kind == kP8) {
          level *= 16;
          if (weights.low)
            level += weights.low[number * low_bytes(k) + block * payload + at] >> shift & 15;
          else
            more = 7.5f;
        }
      } else {
        level = q[i / 4 * 64 + column * 4 + i % 4] - 128;
      }
      y[block * kBlock + i] = (static_cast<float>(level) + more) * scale;
    }
  }
}

#include "attention.inl"

// Only the high plane: its values are in 16ths.
void linear_high(const uint8_t* tile, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  linear<kQ4>(tile, k, act, rows, y, ld, columns);
  for (int r = 0; r < rows; ++r) fstore_n(y + r * ld, fmul(fload_n(y + r * ld, columns), fset(16.f)), columns);
}

void k_scale(float* x, int n, float by) {
  for (int i = 0; i < n; i += 16) fstore(x + i, fmul(fload(x + i), fset(by)));
}

void k_accumulate(float* x, const float* y, int n, float by) {
  for (int i = 0; i < n; i += 16) fstore(x + i, fma(fload(y + i), fset(by), fload(x + i)));
}

bool k_exceeds(const float* s, float limit) { return fexceeds(fload(s), limit); }

float k_quantize_query(const float* x, int n, int8_t* q, int32_t* minus_sum) {
  F m = fset(0.f);
  for (int i = 0; i < n; i += 16) m = fmax_size(m, fabs_(fload(x + i)));
  const float largest = flargest_size(m);
  const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
  I sum = iset(0);
  for (int i = 0; i < n; i += 16) {
    const I v = ftoi(fmul(fload(x + i), inverse));
    istore_s8(q + i, v);
    sum = iadd(sum, v);
  }
  *minus_sum = static_cast<int32_t>(-static_cast<uint32_t>(isum(sum)));  // wraps where x is NaN
  return largest * (1.f / 127.f);
}

// Products of the query with every centroid, less the smallest of their sub-vector, in 7 bits of one common step.
void k_lookup_table(const float* codebook, const float* query, int dim, int sub, uint8_t* lut, float* scale,
                    float* bias) {
  const int subs = dim / sub;
  float table[kMaxHeadDim * 16], smallest[kMaxHeadDim];
  float total = 0, range = kTiny;
  for (int m = 0; m < subs; ++m) {
    F acc = fset(0.f);
    for (int d = 0; d < sub; ++d)
      acc = fma(fload(codebook + (size_t(m) * sub + d) * 16), fset(query[m * sub + d]), acc);
    fstore(table + m * 16, acc);
    const float low = -flargest(fneg(acc)), high = flargest(acc);
    smallest[m] = low;
    total += low;
    range = high - low > range ? high - low : range;
  }
  const F inverse = fset(127.f / range);
  for (int m = 0; m < subs; ++m)
    istore_s8(reinterpret_cast<int8_t*>(lut + m * 16),
              ftoi(fmul(fsub(fload(table + m * 16), fset(smallest[m])), inverse)));
  *scale = range * (1.f / 127.f);
  *bias = total;
}

void k_nearest(const float* codebook, const float* key, int dim, int sub, uint8_t* codes) {
  for (int m = 0; m < dim / sub; ++m) {
    F distance = fset(0.f);
    for (int d = 0; d < sub; ++d) {
      const F e = fsub(fload(codebook + (size_t(m) * sub + d) * 16), fset(key[m * sub + d]));
      distance = fma(e, e, distance);
    }
    const float least = -flargest(fneg(distance));
    float each[16];
    fstore(each, distance);
    int code = 0;
    while (code < 15 && each[code] != least) ++code;
    codes[m] = static_cast<uint8_t>(code);
  }
}

void k_to_half(const float* x, int n, uint16_t* y) {
  for (int i = 0; i < n; i += 16) fstore_half(y + i, fload(x + i));
}

int64_t k_dots(int64_t rounds) {
  const Roof x = roof_start();
  Roof a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x;  // an array would be kept in memory
  for (int64_t round = 0; round < rounds; ++round) {
    roof_step(a, x), roof_step(b, x), roof_step(c, x), roof_step(d, x), roof_step(e, x);
    roof_step(f, x), roof_step(g, x), roof_step(h, x), roof_step(i, x), roof_step(j, x);
  }
  return rounds * 10 * kRoofMacs;
}

constexpr Kernels kTable(const char* name) {
  return Kernels{name,
                 {EDGESPEC_PRODUCTS(linear)},
                 k_norm,
                 k_center,
                 k_quantize,
                 k_quantize_blocks,
                 {k_glu<silu>, k_glu<gelu>, k_glu<gelu_tanh>, k_glu<relu>, k_glu<relu2>, k_glu<sigmoid>, k_swiglu_oai},
                 k_xielu,
                 k_softcap,
                 k_rotate,
                 k_add,
                 k_embed,
                 k_score,
                 k_largest,
                 k_exponentials,
                 k_weigh,
                 k_scale,
                 k_accumulate,
                 k_exceeds,
                 k_quantize_query,
                 k_lookup_table,
                 k_nearest,
                 k_to_half,
                 k_decays,
                 k_convolve,
                 k_delta,
                 k_space,
                 k_dots};
}
