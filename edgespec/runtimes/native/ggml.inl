// Matrices in block types of files (layout.h), once for all instruction sets but the specification, over their vector
// types.  Each of them says how bits become bytes: bfield, badd, blookup, fload_s8, and how rows are multiplied: dots.

// Bytes: how far codes are fetched before they are used, to the second cache.  Scales are at a tile's end, and read
// from its beginning on: those of the next tile are fetched.
constexpr int kGgmlAhead = 9216;

// Codes of a group from a block on: their low bits, and the high ones, which are stored separately.
struct Codes {
  const uint8_t *low, *high;
};

// Vector j of block b: what 16 columns multiply numbers 4 j to 4 j + 3 by.
template <Kind kind, int b, int j>
EDGESPEC_INLINE B ggml_vector(Codes codes) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr CodePlace at = code_place(kind, b, 4 * j);
  B x = bfield<at.shift, (1 << f.low) - 1>(codes.low + at.low * 64);
  if constexpr (f.high > 0) x = badd<at.up - f.low, ((1 << f.high) - 1) << f.low>(x, codes.high + at.high * 64);
  if constexpr (f.table > 0) x = blookup(x, kGgmlTables[f.table]);
  return x;
}

// Vectors `first` to `end` of a block.
template <Kind kind, int b, int first, int end>
EDGESPEC_INLINE void ggml_vectors(Codes codes, B* v) {
  *v = ggml_vector<kind, b, first>(codes);
  if constexpr (first + 1 < end) ggml_vectors<kind, b, first + 1, end>(codes, v + 1);
}

struct Shares {
  F scale[2], minimum[2];  // of the halves of a block, or of all of it
};

template <Kind kind, int b>
EDGESPEC_INLINE Shares ggml_shares_of(const uint8_t* scales, F d, F m) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kHalves = kBlock / f.share;
  Shares s;
  if constexpr (f.scale != kTimes) {
    s.scale[0] = d;
    s.minimum[0] = m;
    return s;
  }
  const int8_t* times = reinterpret_cast<const int8_t*>(scales) + kTile * 2 * (f.minimum ? 2 : 1);
#pragma GCC unroll 2
  for (int h = 0; h < kHalves; ++h) {
    const int8_t* own = times + (b * kHalves + h) * kTile;
    if constexpr (kind == kQ2_K) {
      int8_t low[kTile], high[kTile];
      for (int c = 0; c < kTile; ++c) {
        low[c] = own[c] & 15;
        high[c] = static_cast<int8_t>(static_cast<uint8_t>(own[c]) >> 4);
      }
      s.scale[h] = fmul(d, fload_s8(low));
      s.minimum[h] = fmul(m, fload_s8(high));
    } else {
      s.scale[h] = fmul(d, fload_s8(own));
      if (f.minimum) s.minimum[h] = fmul(m, fload_s8(own + ggml_shares(f) * kTile));
    }
  }
  return s;
}

template <Kind kind>
constexpr int kLargest = ggml(kind).table ? kGgmlTables[ggml(kind).table][ggml(kind).table == 1 ? 15 : 7]
                                          : (1 << (ggml(kind).low + ggml(kind).high)) - 1;

// The start of a sum that takes `zero` back from each level: zero / 8 of an offset.
template <Kind kind>
EDGESPEC_INLINE int32_t ggml_offset(int32_t offset) {
  return static_cast<int32_t>(static_cast<uint32_t>(offset >> 3) * uint32_t(ggml(kind).zero));
}

// Scaled products of a row with a part of a block, one of two or all of it, and its minima, from its sums of products.
template <Kind kind, int part>
EDGESPEC_INLINE F ggml_scaled(I sum, const Act& a, const Shares& s, F acc) {
  constexpr GgmlFacts f = ggml(kind);
  acc = fma(itof(sum), fmul(s.scale[part], fset(a.scale)), acc);
  if constexpr (f.share < kBlock) {
    const int32_t offset = part ? a.offset_of_second() : a.first;
    if (f.minimum) acc = fnma(s.minimum[part], fset(a.scale * (static_cast<float>(offset) * -.125f)), acc);
  } else if constexpr (f.minimum) {
    acc = f.scale == kHalf ? fma(s.minimum[0], fset(a.sum), acc) : fnma(s.minimum[0], fset(a.sum), acc);
  }
  return acc;
}

// The start of a part's sum.
template <Kind kind, int part>
EDGESPEC_INLINE I ggml_start(const Act& a) {
  return iset(ggml_offset<kind>(ggml(kind).share == kBlock ? a.offset : part ? a.offset_of_second() : a.first));
}

// One row of block b. Half of the block's vectors are made at a time, so that AVX2 has registers for them.
template <Kind kind, int b>
EDGESPEC_INLINE F ggml_one(Codes codes, const Act& a, const Shares& s, F acc) {
  constexpr int kLast = ggml(kind).share < kBlock ? 1 : 0;  // part
  B v[4];
  ggml_vectors<kind, b, 0, 4>(codes, v);
  I sum = dots<kLargest<kind>, 4>(ggml_start<kind, 0>(a), v, a.q);
  if constexpr (kLast > 0) {
    acc = ggml_scaled<kind, 0>(sum, a, s, acc);
    sum = ggml_start<kind, 1>(a);
  }
  ggml_vectors<kind, b, 4, 8>(codes, v);
  sum = dots<kLargest<kind>, 4>(sum, v, a.q + 16);
  return ggml_scaled<kind, kLast>(sum, a, s, acc);
}

// Rows of block b, whose vectors they share.
template <Kind kind, int b>
EDGESPEC_INLINE void ggml_any(Codes codes, const Act* a, int rows, const Shares& s, F* acc) {
  B v[8];
  ggml_vectors<kind, b, 0, 8>(codes, v);
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r) {
    if constexpr (ggml(kind).share == kBlock) {
      acc[r] = ggml_scaled<kind, 0>(dots<kLargest<kind>, 8>(ggml_start<kind, 0>(a[r]), v, a[r].q), a[r], s, acc[r]);
    } else {
      const I first = dots<kLargest<kind>, 4>(ggml_start<kind, 0>(a[r]), v, a[r].q);
      const I second = dots<kLargest<kind>, 4>(ggml_start<kind, 1>(a[r]), v + 4, a[r].q + 16);
      acc[r] = ggml_scaled<kind, 1>(second, a[r], s, ggml_scaled<kind, 0>(first, a[r], s, acc[r]));
    }
  }
}

#if defined(EDGESPEC_ROWS)
// R rows of a part of block b: each vector is multiplied by all of them as soon as it is made.
template <Kind kind, int b, int part, int R>
EDGESPEC_INLINE void ggml_several(Codes codes, const Act* a, const Shares& s, F* acc) {
  constexpr int kVectors = ggml(kind).share / 4;
  const auto vector = [&](auto j) __attribute__((always_inline)) {
    return ggml_vector<kind, b, part * kVectors + decltype(j)::value>(codes);
  };
  I sums[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = ggml_start<kind, part>(a[r]);
  dots_of_rows<kLargest<kind>, kVectors>(sums, vector, a, part * 16);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) acc[r] = ggml_scaled<kind, part>(sums[r], a[r], s, acc[r]);
  if constexpr ((part + 1) * kVectors < 8) ggml_several<kind, b, part + 1, R>(codes, a, s, acc);
}
#endif

// Block b and those after it until codes repeat.  R rows, or `rows` where R is 0; those of the next block begin
// `stride` records later.
template <Kind kind, int R, int b>
EDGESPEC_INLINE void ggml_blocks(Codes codes, const uint8_t* ahead, const uint8_t* scales, F d, F m, const Act* a,
                                 int rows, int stride, F* acc) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kLines = static_cast<int>(ggml_codes(f) / 64) / (f.group / kBlock);
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + (b * kLines + i) * 64, 0, 2);
  const Shares s = ggml_shares_of<kind, b>(scales, d, m);
  if constexpr (R == 0) ggml_any<kind, b>(codes, a, rows, s, acc);
  if constexpr (R == 1) *acc = ggml_one<kind, b>(codes, *a, s, *acc);
#if defined(EDGESPEC_ROWS)
  if constexpr (R > 1) ggml_several<kind, b, 0, R>(codes, a, s, acc);
#endif
  if constexpr (R > 0) asm volatile("" ::: "memory");  // or GCC mixes the blocks of a group, and has no registers left
  if constexpr (b + 1 < period_of(kind))
    ggml_blocks<kind, R, b + 1>(codes, ahead, scales, d, m, a + stride, rows, stride, acc);
}

template <Kind kind, int R>
void ggml_product(const uint8_t* tile, int k, const Act* a, int rows, int stride, float* y, size_t ld, int columns) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kPeriod = period_of(kind);
  constexpr CodePlace next = code_place(kind, kPeriod, 0);
  F acc[R ? R : kRowGroup];
  for (int r = 0; r < rows; ++r) acc[r] = fset(0.f);
  const size_t whole = tile_bytes(kind, k);
  const uint8_t *codes = tile, *scales = tile + k / f.group * ggml_codes(f), *const end = scales;
  for (int group = 0; group < k / f.group; ++group, codes += ggml_codes(f), scales += ggml_scales(f)) {
    const uint8_t* ahead = codes + kGgmlAhead;
    if (ahead >= end) ahead += whole - size_t(end - tile);  // codes of the next tile
    for (size_t i = 0; i < ggml_scales(f); i += 64) __builtin_prefetch(scales + whole + i, 0, 2);
    F d, m = fset(0.f);
    if constexpr (f.scale == kExponent) {
      float each[kTile];
      for (int c = 0; c < kTile; ++c) each[c] = exponent_to_half_float(scales[c]);
      d = fload(each);
    } else {
      d = fload_half(reinterpret_cast<const uint16_t*>(scales));
      if constexpr (f.scale == kZero)
        m = fmul(d, fload_s8(reinterpret_cast<const int8_t*>(scales) + kTile * 2));
      else if (f.minimum)
        m = fload_half(reinterpret_cast<const uint16_t*>(scales) + kTile);
    }
    Codes part = {codes, codes + low_vectors(f) * 64};
    const uint8_t* own = scales;
    for (int b = 0; b < f.group; b += kPeriod * kBlock, a += kPeriod * stride) {
      ggml_blocks<kind, R, 0>(part, ahead, own, d, m, a, rows, stride, acc);
      part = {part.low + next.low * 64, part.high + next.high * 64};
      ahead += ggml_codes(f) / (f.group / kBlock) * kPeriod;
      own += kPeriod * kBlock / f.share * kTile;
    }
  }
  for (int r = 0; r < rows; ++r) fstore_n(y + r * ld, acc[r], columns);
}

template <Kind kind>
void ggml_rows(const uint8_t* tile, int k, const Act* a, int rows, float* y, size_t ld, int columns) {
  if (rows == 1) return ggml_product<kind, 1>(tile, k, a, 1, 1, y, ld, columns);
  const int stride = rows;
#if defined(EDGESPEC_ROWS)
  if (rows == 2) return ggml_product<kind, 2>(tile, k, a, 2, stride, y, ld, columns);
  // by fours, unless a block has two scales: that needs more instructions than the processor keeps decoded
  if constexpr (ggml(kind).share == kBlock) {
    for (; rows >= 4; rows -= 4, a += 4, y += 4 * ld) ggml_product<kind, 4>(tile, k, a, 4, stride, y, ld, columns);
    if (rows == 3) ggml_product<kind, 3>(tile, k, a, 3, stride, y, ld, columns);
    if (rows == 2) ggml_product<kind, 2>(tile, k, a, 2, stride, y, ld, columns);
    if (rows == 1) ggml_product<kind, 1>(tile, k, a, 1, stride, y, ld, columns);
    return;
  }
#endif
  ggml_product<kind, 0>(tile, k, a, rows, stride, y, ld, columns);
}
