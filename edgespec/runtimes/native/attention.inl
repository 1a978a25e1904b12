// Attention kernels over the vector types of an isa_*.cpp file; included by kernels.inl.

// Work that is kept in registers, chosen for their number: tiles of 16 keys that are scored together and share the
// loads of the queries; queries whose values are summed together, and vectors of such sums.
#ifndef EDGESPEC_SCORE_TILES
#define EDGESPEC_SCORE_TILES 1
#define EDGESPEC_WEIGH_QUERIES 4
#define EDGESPEC_WEIGH_SUMS 4
#endif
constexpr int kScoreTiles = EDGESPEC_SCORE_TILES, kWeighQueries = EDGESPEC_WEIGH_QUERIES,
              kWeighSums = EDGESPEC_WEIGH_SUMS;
// Vectors of dimensions that are summed together for this many queries.
constexpr int weigh_vectors(int queries) { return 4 * queries <= kWeighSums ? 4 : 2 * queries <= kWeighSums ? 2 : 1; }

// To the second cache: it comes a whole piece early.
inline __attribute__((always_inline)) void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

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
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) fstore(out + i * ld + t * 16, acc[t][i]);
}

template <int Q, int T>
void score_int8(const uint8_t* k, const float* scales, int dim, const Query* q, float* out, size_t ld,
                ptrdiff_t ahead) {
  I acc[T][Q];
  for (int t = 0; t < T; ++t)
    for (int i = 0; i < Q; ++i) acc[t][i] = iset(static_cast<int32_t>(static_cast<uint32_t>(q[i].minus_sum) * 128));
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
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t) {
    fetch(reinterpret_cast<const uint8_t*>(scales + t * 16) + ahead);
    const F by = fload(scales + t * 16);
#pragma GCC unroll 8
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
#pragma GCC unroll 2
  for (int t = 0; t < T; ++t)
#pragma GCC unroll 8
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
  for (; tile + kScoreTiles <= end; tile += kScoreTiles, out += kScoreTiles * 16)
    score_tiles<Q, kScoreTiles>(format, block, dim, tile, q, out, ld, ahead);
  for (; tile < end; ++tile, out += 16) score_tiles<Q, 1>(format, block, dim, tile, q, out, ld, ahead);
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

#ifndef EDGESPEC_LANES_TOGETHER
void flargest_each(const F* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = flargest(x[i]);
}
void fsum_each(const F* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = fsum(x[i]);
}
#endif

void k_largest(const float* s, size_t ld, int n, int queries, float* out) {
  F most[kMaxQueries];
  for (int q = 0; q < queries; ++q, s += ld) {
    most[q] = fload(s);
    for (int i = 16; i < n; i += 16) most[q] = fmax(most[q], fload(s + i));
  }
  flargest_each(most, queries, out);
}

void k_exponentials(float* s, size_t ld, int n, int queries, const float* largest, float* sum) {
  F sums[kMaxQueries];
  for (int q = 0; q < queries; ++q, s += ld) {
    const F by = fset(largest[q]);
    sums[q] = fset(0.f);
    for (int i = 0; i < n; i += 16) {
      // hidden tokens weigh nothing, and weights below e^-60 would only make denormal numbers
      const F x = fsub(fload(s + i), by);
      const F e = fzero_below(exponential_near(x), x, -60.f);
      fstore(s + i, e);
      sums[q] = fadd(sums[q], e);
    }
  }
  fsum_each(sums, queries, sum);
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
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) fstore(out + i * dim + v * 16, acc[i][v]);
}

template <int Q, bool Half>
void weigh_float(const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld, float* out,
                 ptrdiff_t ahead) {
  if constexpr (Q > kWeighQueries) {
    weigh_float<Q / 2, Half>(values, dim, first, tokens, p, ld, out, ahead);
    weigh_float<Q - Q / 2, Half>(values, dim, first, tokens, p + Q / 2 * ld, ld, out + size_t(Q / 2) * dim, 0);
  } else {
    constexpr int kBytes = Half ? 2 : 4, V = weigh_vectors(Q);
    values += size_t(first) * dim * kBytes;
    int d = 0;
    for (; d + 16 * V <= dim; d += 16 * V)
      weigh_float_part<Q, V, Half>(values + d * kBytes, dim, tokens, p, ld, out + d, ahead);
    for (; d < dim; d += 16) weigh_float_part<Q, 1, Half>(values + d * kBytes, dim, tokens, p, ld, out + d, ahead);
  }
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
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < V; ++j) {
      float* to = out + size_t(i) * dim + j * 16;
      fstore(to, fma(fset(step[i]), itof(acc[i][j]), fload(to)));
    }
}

// All dimensions, as many queries at a time as registers take.
template <int Q>
void weigh_all(const uint8_t* v, int dim, const int8_t (*weights)[32], const float* step, float* out, ptrdiff_t ahead) {
  if constexpr (Q > kWeighQueries) {
    weigh_all<Q / 2>(v, dim, weights, step, out, ahead);
    weigh_all<Q - Q / 2>(v, dim, weights + Q / 2, step + Q / 2, out + size_t(Q / 2) * dim, 0);
  } else {
    constexpr int V = weigh_vectors(Q);
    int d = 0;
    for (; d + 16 * V <= dim; d += 16 * V) weigh_part<Q, V>(v + d * 4, dim, weights, step, out + d, ahead);
    for (; d < dim; d += 16) weigh_part<Q, 1>(v + d * 4, dim, weights, step, out + d, ahead);
  }
}

// Weights p [Q][32] times the values' scales in 7 bits, and a level's step.
template <int Q>
void weight_levels(const float* p, size_t ld, F low, F high, int8_t (*levels)[32], float* step) {
#ifdef EDGESPEC_LANES_TOGETHER
  if constexpr (Q > 4) return levels_together<Q>(p, ld, low, high, levels, step);
#endif
  for (int i = 0; i < Q; ++i) {
    const F a = fmul(fload(p + i * ld), low);
    const F b = fmul(fload(p + i * ld + 16), high);
    const float largest = flargest_size(fmax_size(a, b));
    const F inverse = fset(largest > kTiny ? 127.f / largest : 0.f);
    istore_s8(levels[i], ftoi(fmul(a, inverse)));
    istore_s8(levels[i] + 16, ftoi(fmul(b, inverse)));
    step[i] = largest * (1.f / 127.f);
  }
}

// Weights are quantized to 7 bits per 32 tokens, values' scales folded in: the products of one vector instruction can
// then not saturate anywhere.
template <int Q>
void weigh_int8(const uint8_t* values, int dim, int first, int tokens, const float* p, size_t ld, float* out,
                ptrdiff_t ahead) {
  const float* scales = reinterpret_cast<const float*>(values + size_t(kKvBlock) * dim);
  alignas(64) int8_t levels[kKvBlock / 32][Q][32];
  float step[kKvBlock / 32][Q];
  for (int n = 0; n < tokens; n += 32) {
    const int left = tokens - n;  // scales beyond may be what another text has left, and NaN
    const F low = left >= 32 ? fload(scales + first + n) : fload_n(scales + first + n, left);
    const F high = left >= 32 ? fload(scales + first + n + 16) : fload_n(scales + first + n + 16, left - 16);
    fetch(reinterpret_cast<const uint8_t*>(scales + first + n) + ahead);
    fetch(reinterpret_cast<const uint8_t*>(scales + first + n + 16) + ahead);
    weight_levels<Q>(p + n, ld, low, high, levels[n / 32], step[n / 32]);
  }
  for (int n = 0; n < tokens; n += 32)
    weigh_all<Q>(values + size_t(first + n) * dim, dim, levels[n / 32], step[n / 32], out, ahead);
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
    case 5: return weigh_any<5>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 6: return weigh_any<6>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 7: return weigh_any<7>(format, values, dim, first, tokens, p, ld, out, ahead);
    case 8: return weigh_any<8>(format, values, dim, first, tokens, p, ld, out, ahead);
    default: return;
  }
}
