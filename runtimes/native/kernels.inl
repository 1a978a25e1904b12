// Everything that can be said once for all instruction sets, over the vector types an isa_*.cpp file defines before
// including this: F = 16 float32, I = 16 int32, B = 64 bytes, and the functions on them (see isa_scalar.cpp).  The file
// is included inside an anonymous namespace: code compiled for one processor must never be linked into another's path.

constexpr float kTiny = 1e-30f;

// exp(x) for x <= 0: 2^r * e^f with |f| <= ln2 / 2, a Taylor series of degree 6.  The relative error is below 3e-7 near
// 0 and grows by 2e-8 with each unit of x, where results count ever less.
inline F exponential(F x) {
  x = fmax(x, fset(-87.f));
  const F r = fround(fmul(x, fset(1.44269504f)));
  const F f = fnma(r, fset(0.69314718f), x);
  F p = fset(1.f / 720.f);
  p = fma(p, f, fset(1.f / 120.f));
  p = fma(p, f, fset(1.f / 24.f));
  p = fma(p, f, fset(1.f / 6.f));
  p = fma(p, f, fset(.5f));
  p = fma(p, f, fset(1.f));
  p = fma(p, f, fset(1.f));
  return fscale2(p, r);
}

// x / (1 + exp(-x)), through exp(-|x|) so that nothing overflows
inline F silu(F x) {
  const F e = exponential(fneg(fabs_(x)));  // in (0, 1]
  const F one = fset(1.f);
  const F weight = fdiv(fpositive(x, one, e), fadd(one, e));  // sigmoid(x)
  return fmul(x, weight);
}

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

inline void quantize_pair(F a, F b, float largest, Act* out) {
  const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
  const I qa = ftoi(fmul(a, inverse)), qb = ftoi(fmul(b, inverse));
  istore_s8(out->q, qa);
  istore_s8(out->q + 16, qb);
  out->scale = largest * (1.f / 127.f);
  out->offset = -8 * isum(iadd(qa, qb));
}

void k_quantize_blocks(const float* x, int rows, Act* out) {
  for (int r = 0; r < rows; ++r, x += kBlock) {
    const F a = fload(x), b = fload(x + 16);
    quantize_pair(a, b, flargest(fmax(fabs_(a), fabs_(b))), out + r);
  }
}

void k_quantize(const float* x, int k, int blocks, bool per_row, Act* out, size_t stride) {
  float row = 0;
  if (per_row) {
    F m = fset(0.f);
    for (int i = 0; i < k; i += 16) m = fmax(m, fabs_(k - i >= 16 ? fload(x + i) : fload_n(x + i, k - i)));
    row = flargest(m);
  }
  for (int block = 0; block < blocks; ++block, out += stride) {
    const int at = block * kBlock, left = k - at;
    F a, b;
    if (left >= kBlock) {
      a = fload(x + at);
      b = fload(x + at + 16);
    } else {
      a = fload_n(x + at, left < 0 ? 0 : left < 16 ? left : 16);
      b = fload_n(x + at + 16, left < 16 ? 0 : left - 16);
    }
    quantize_pair(a, b, per_row ? row : flargest(fmax(fabs_(a), fabs_(b))), out);
  }
}

void k_glu(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; i += 16) fstore(y + i, fmul(silu(fload(gate + i)), fload(up + i)));
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

void k_embed(Kind kind, const uint8_t* weight, int k, int64_t row, float* y) {
  const int column = static_cast<int>(row % kTile);
  const uint8_t* tile = weight + static_cast<size_t>(row / kTile) * tile_bytes(kind, k);
  if (kind == kF32) {
    const float* w = reinterpret_cast<const float*>(tile);
    for (int i = 0; i < k; ++i) y[i] = w[i * kTile + column];
    return;
  }
  const int blocks = blocks_of(k);
  const size_t payload = kind == kQ4 ? 256 : 512;
  const float* column_scales = reinterpret_cast<const float*>(tile + blocks * size_t(512));  // kC8
  for (int block = 0; block < blocks; ++block) {
    const uint8_t *q, *scales;
    if (kind == kC8) {
      q = tile + block * payload;
      scales = nullptr;
    } else {
      const uint8_t* pair = tile + (block / 2) * (64 + 2 * payload);
      scales = pair + (block & 1) * 32;
      q = pair + 64 + (block & 1) * payload;
    }
    const float scale =
        scales ? half_to_float(reinterpret_cast<const uint16_t*>(scales)[column]) : column_scales[column];
    for (int i = 0; i < kBlock && block * kBlock + i < k; ++i) {
      int level;
      if (kind == kQ4) {
        const uint8_t byte = q[(i % 16) / 4 * 64 + column * 4 + i % 4];
        level = (i < 16 ? byte & 15 : byte >> 4) - 8;
      } else {
        level = q[i / 4 * 64 + column * 4 + i % 4] - 128;
      }
      y[block * kBlock + i] = static_cast<float>(level) * scale;
    }
  }
}

// ---- attention -----------------------------------------------------------------------------------------------------

// Tiles of 16 keys that are scored side by side: they share the loads of the queries.  More registers, more tiles.
#ifndef EDGESPEC_SCORE_TILES
#define EDGESPEC_SCORE_TILES 1
#endif
constexpr int kScoreTiles = EDGESPEC_SCORE_TILES;

// To the second cache: it comes a whole piece early.
inline void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

template <int Q, int T, bool Half>
void score_float(const uint8_t* k, int dim, const Query* q, float* out, size_t ld, ptrdiff_t ahead) {
  F acc[T][Q];
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) acc[t][i] = fset(0.f);
  const size_t tile = size_t(dim) * (Half ? 32 : 64);
  for (int d = 0; d < dim; ++d) {
    F x[T];
    for (int t = 0; t < T; ++t) {
      const uint8_t* at = k + t * tile + size_t(d) * (Half ? 32 : 64);
      if (!Half || d % 2 == 0) fetch(at + ahead);
      x[t] = Half ? fload_half(reinterpret_cast<const uint16_t*>(at)) : fload(reinterpret_cast<const float*>(at));
    }
    for (int i = 0; i < Q; ++i) {
      const F by = fset(q[i].f[d]);
      for (int t = 0; t < T; ++t) acc[t][i] = fma(x[t], by, acc[t][i]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) fstore(out + i * ld + t * 16, acc[t][i]);
}

template <int Q, int T>
void score_int8(const uint8_t* k, const float* scales, int dim, const Query* q, float* out, size_t ld,
                ptrdiff_t ahead) {
  I acc[T][Q];
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) acc[t][i] = iset(q[i].minus_sum * 128);
  for (int d = 0; d < dim; d += 4) {
    B x[T];
    for (int t = 0; t < T; ++t) {
      const uint8_t* at = k + (size_t(t) * dim + d) * 16;
      fetch(at + ahead);
      x[t] = bload(at);
    }
    for (int i = 0; i < Q; ++i)
      for (int t = 0; t < T; ++t) acc[t][i] = dot_u8(acc[t][i], x[t], q[i].q8 + d);
  }
  for (int t = 0; t < T; ++t) {
    fetch(reinterpret_cast<const uint8_t*>(scales + t * 16) + ahead);
    const F by = fload(scales + t * 16);
    for (int i = 0; i < Q; ++i) fstore(out + i * ld + t * 16, fmul(fmul(by, fset(q[i].scale)), itof(acc[t][i])));
  }
}

template <int Q, int T>
void score_int4(const uint8_t* k, int dim, const Query* q, float* out, size_t ld, ptrdiff_t ahead) {
  I acc[T][Q];
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) acc[t][i] = iset(0);
  for (int d = 0; d < dim; d += 8) {
    B low[T], high[T];
    for (int t = 0; t < T; ++t) {
      const uint8_t* at = k + (size_t(t) * dim + d) * 8;
      fetch(at + ahead);
      const B x = bload(at);
      low[t] = blow(x);
      high[t] = bhigh(x);
    }
    for (int i = 0; i < Q; ++i)
      for (int t = 0; t < T; ++t) acc[t][i] = dot_u8(dot_u8(acc[t][i], low[t], q[i].q8 + d), high[t], q[i].q8 + d + 4);
  }
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) fstore(out + i * ld + t * 16, fma(fset(q[i].scale), itof(acc[t][i]), fset(q[i].bias)));
}

template <int Q, int T>
void score_tiles(KvFormat format, const uint8_t* block, int dim, int tile, const Query* q, float* out, size_t ld,
                 ptrdiff_t ahead) {
  const size_t at = size_t(tile) * dim;
  if (format == kKvF32) return score_float<Q, T, false>(block + at * 64, dim, q, out, ld, ahead);
  if (format == kKvF16) return score_float<Q, T, true>(block + at * 32, dim, q, out, ld, ahead);
  if (format == kKvInt4) return score_int4<Q, T>(block + at * 8, dim, q, out, ld, ahead);
  const float* scales = reinterpret_cast<const float*>(block + size_t(kKvBlock) * dim);
  score_int8<Q, T>(block + at * 16, scales + tile * 16, dim, q, out, ld, ahead);
}

template <int Q>
void score_nomad(const uint8_t* codes, int subs, const Query* q, float* out, size_t ld, ptrdiff_t ahead) {
  for (int m = 0; m < subs; ++m) fetch(codes + size_t(m) * 64 + ahead);
  alignas(64) uint16_t sums[Q][kKvBlock];
  const uint8_t* tables[Q];
  for (int i = 0; i < Q; ++i) tables[i] = q[i].lut;
  nomad_sums<Q>(codes, subs, tables, sums);
  for (int i = 0; i < Q; ++i)
    for (int t = 0; t < kKvBlock; t += 16)
      fstore(out + i * ld + t, fma(fset(q[i].scale), fload_u16(sums[i] + t), fset(q[i].bias)));
}

template <int Q>
void score_any(KvFormat format, const uint8_t* block, int dim, int tile, int tiles, const Query* q, float* out,
               size_t ld, ptrdiff_t ahead) {
  if (format == kKvNomad1) return score_nomad<Q>(block, dim, q, out, ld, ahead);
  if (format == kKvNomad2) return score_nomad<Q>(block, dim / 2, q, out, ld, ahead);
  const int end = tile + tiles;
  for (; tile + kScoreTiles <= end; tile += kScoreTiles)
    score_tiles<Q, kScoreTiles>(format, block, dim, tile, q, out + tile * 16, ld, ahead);
  for (; tile < end; ++tile) score_tiles<Q, 1>(format, block, dim, tile, q, out + tile * 16, ld, ahead);
}

void k_score(KvFormat format, const uint8_t* block, int dim, int tile, int tiles, const Query* q, int queries,
             float* out, size_t ld, ptrdiff_t ahead) {
  switch (queries) {
    case 1: return score_any<1>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 2: return score_any<2>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 3: return score_any<3>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 4: return score_any<4>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 5: return score_any<5>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 6: return score_any<6>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 7: return score_any<7>(format, block, dim, tile, tiles, q, out, ld, ahead);
    case 8: return score_any<8>(format, block, dim, tile, tiles, q, out, ld, ahead);
    default: return;
  }
}

float k_largest(const float* s, int n) {
  F m = fload(s);
  for (int i = 16; i < n; i += 16) m = fmax(m, fload(s + i));
  return flargest(m);
}

float k_exponentials(float* s, int n, float largest) {
  const F by = fset(largest);
  F sum = fset(0.f);
  for (int i = 0; i < n; i += 16) {
    // what is hidden weighs nothing, and what weighs next to nothing (e^-60) would only make denormal numbers
    const F x = fsub(fload(s + i), by);
    const F e = fzero_below(exponential(x), x, -60.f);
    fstore(s + i, e);
    sum = fadd(sum, e);
  }
  return fsum(sum);
}

// V vectors of dimensions: out[q] += p[q] @ values
template <int Q, int V, bool Half>
void weigh_float_part(const uint8_t* values, int dim, int tokens, const float* p, size_t ld, float* out,
                      ptrdiff_t ahead) {
  F acc[Q][V];
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v) acc[i][v] = fload(out + i * dim + v * 16);
  const size_t row = size_t(dim) * (Half ? 2 : 4);
  for (int n = 0; n < tokens; ++n, values += row) {
    F x[V];
    for (int v = 0; v < V; ++v) {
      const uint8_t* at = values + v * (Half ? 32 : 64);
      if (!Half || v % 2 == 0) fetch(at + ahead);
      x[v] = Half ? fload_half(reinterpret_cast<const uint16_t*>(at)) : fload(reinterpret_cast<const float*>(at));
    }
    for (int i = 0; i < Q; ++i) {
      const F by = fset(p[i * ld + n]);
      for (int v = 0; v < V; ++v) acc[i][v] = fma(by, x[v], acc[i][v]);
    }
  }
  for (int i = 0; i < Q; ++i)
    for (int v = 0; v < V; ++v) fstore(out + i * dim + v * 16, acc[i][v]);
}

template <int Q, bool Half>
void weigh_float(const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld, float* out,
                 ptrdiff_t ahead) {
  constexpr int kBytes = Half ? 2 : 4;
  values += size_t(first) * dim * kBytes;
  int d = 0;
  for (; d + 64 <= dim; d += 64) weigh_float_part<Q, 4, Half>(values + d * kBytes, dim, tokens, p, ld, out + d, ahead);
  for (; d < dim; d += 16) weigh_float_part<Q, 1, Half>(values + d * kBytes, dim, tokens, p, ld, out + d, ahead);
}

// 32 tokens, V vectors of dimensions: out[q] += step[q] * (weights[q] @ values)
template <int Q, int V>
void weigh_part(const uint8_t* v, int dim, const int8_t (*weights)[32], const float* step, float* out,
                ptrdiff_t ahead) {
  I acc[Q][V];
  for (int i = 0; i < Q; ++i)
    for (int j = 0; j < V; ++j) acc[i][j] = iset(0);
  for (int g = 0; g < 8; ++g) {
    const uint8_t* at = v + size_t(g) * dim * 4;
    B x[V];
    for (int j = 0; j < V; ++j) {
      fetch(at + j * 64 + ahead);
      x[j] = bload(at + j * 64);
    }
    for (int i = 0; i < Q; ++i)
      for (int j = 0; j < V; ++j) acc[i][j] = dot_s8(acc[i][j], x[j], weights[i] + g * 4);
  }
  for (int i = 0; i < Q; ++i)
    for (int j = 0; j < V; ++j) {
      float* to = out + size_t(i) * dim + j * 16;
      fstore(to, fma(fset(step[i]), itof(acc[i][j]), fload(to)));
    }
}

// Weights are quantized to 7 bits per 32 tokens, values' scales folded in: the products of one vector instruction can
// then not saturate anywhere.
template <int Q>
void weigh_int8(const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld, float* out,
                ptrdiff_t ahead) {
  const float* scales = reinterpret_cast<const float*>(values + size_t(kKvBlock) * dim);
  for (int n = 0; n < tokens; n += 32) {
    alignas(64) int8_t weights[Q][32];
    float step[Q];
    fetch(reinterpret_cast<const uint8_t*>(scales + first + n) + ahead);
    fetch(reinterpret_cast<const uint8_t*>(scales + first + n + 16) + ahead);
    for (int i = 0; i < Q; ++i) {
      const F a = fmul(fload(p + i * ld + n), fload(scales + first + n));
      const F b = fmul(fload(p + i * ld + n + 16), fload(scales + first + n + 16));
      const float largest = flargest(fmax(a, b));
      const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
      istore_s8(weights[i], ftoi(fmul(a, inverse)));
      istore_s8(weights[i] + 16, ftoi(fmul(b, inverse)));
      step[i] = largest * (1.f / 127.f);
    }
    const uint8_t* v = values + size_t(first + n) * dim;
    int d = 0;
    for (; d + 64 <= dim; d += 64) weigh_part<Q, 4>(v + d * 4, dim, weights, step, out + d, ahead);
    for (; d < dim; d += 16) weigh_part<Q, 1>(v + d * 4, dim, weights, step, out + d, ahead);
  }
}

template <int Q>
void weigh_any(KvFormat format, const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld,
               float* out, ptrdiff_t ahead) {
  if (format == kKvInt8) return weigh_int8<Q>(values, dim, first, tokens, p, ld, out, ahead);
  if (format == kKvF16) return weigh_float<Q, true>(values, dim, first, tokens, p, ld, out, ahead);
  weigh_float<Q, false>(values, dim, first, tokens, p, ld, out, ahead);
}

void k_weigh(KvFormat format, const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld,
             int queries, float* out, ptrdiff_t ahead) {
  switch (queries) {
    case 1: return weigh_any<1>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 2: return weigh_any<2>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 3: return weigh_any<3>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 4: return weigh_any<4>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 5:
    case 6:
    case 7:
    case 8: {  // two halves: more accumulators than registers would spill
      const int half = queries / 2;
      k_weigh(format, values, dim, first, tokens, p, ld, half, out, ahead);
      return k_weigh(format, values, dim, first, tokens, p + half * ld, ld, queries - half, out + size_t(half) * dim,
                     0);
    }
    default: return;
  }
}

void k_scale(float* x, int n, float by) {
  for (int i = 0; i < n; i += 16) fstore(x + i, fmul(fload(x + i), fset(by)));
}

void k_accumulate(float* x, const float* y, int n, float by) {
  for (int i = 0; i < n; i += 16) fstore(x + i, fma(fload(y + i), fset(by), fload(x + i)));
}

int64_t k_argmax(const float* s, int64_t n) {
  // the largest value first, then where it stands: two fast reads instead of one slow
  int64_t i = 0;
  F m = fset(-3.4e38f);
  for (; i + 16 <= n; i += 16) m = fmax(m, fload(s + i));
  float best = flargest(m);
  for (; i < n; ++i) best = s[i] > best ? s[i] : best;
  for (i = 0; i < n; ++i)
    if (s[i] == best) return i;
  return 0;
}

float k_quantize_query(const float* x, int n, int8_t* q, int32_t* minus_sum) {
  F m = fset(0.f);
  for (int i = 0; i < n; i += 16) m = fmax(m, fabs_(fload(x + i)));
  const float largest = flargest(m);
  const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
  I sum = iset(0);
  for (int i = 0; i < n; i += 16) {
    const I v = ftoi(fmul(fload(x + i), inverse));
    istore_s8(q + i, v);
    sum = iadd(sum, v);
  }
  *minus_sum = -isum(sum);
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

constexpr Kernels kTable(const char* name) {
  return Kernels{name,
                 {linear_q4, linear_q8, linear_c8, linear_f32},
                 k_norm,
                 k_quantize,
                 k_quantize_blocks,
                 k_glu,
                 k_rotate,
                 k_add,
                 k_embed,
                 k_score,
                 k_largest,
                 k_exponentials,
                 k_weigh,
                 k_scale,
                 k_accumulate,
                 k_argmax,
                 k_quantize_query,
                 k_lookup_table,
                 k_nearest,
                 k_to_half};
}
