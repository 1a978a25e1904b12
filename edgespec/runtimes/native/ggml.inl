// Matrices in block types of files (layout.h), once for all instruction sets but the specification, over their vector
// types.  Each of them says how bits become bytes: bfield, badd, blookup, fload_s8, and how rows are multiplied: dots.

// Bytes: how far codes are fetched before they are used, to the second cache.  Scales are at a tile's end, and read
// from its beginning on: those of the next tile are fetched.
constexpr int kGgmlAhead = 9216;

// Vector j of block b of a group: what 16 columns multiply numbers 4 j to 4 j + 3 by.
template <Kind kind, int b, int j>
EDGESPEC_INLINE B ggml_vector(const uint8_t* codes) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr CodePlace at = code_place(kind, b, 4 * j);
  B x = bfield<at.shift, (1 << f.low) - 1>(codes + at.low * 64);
  if constexpr (f.high > 0)
    x = badd<at.up - f.low, ((1 << f.high) - 1) << f.low>(x, codes + (low_vectors(f) + at.high) * 64);
  if constexpr (f.table > 0) x = blookup(x, kGgmlTables[f.table]);
  return x;
}

// Vectors `first` to `end` of a block.
template <Kind kind, int b, int first, int end>
EDGESPEC_INLINE void ggml_vectors(const uint8_t* codes, B* v) {
  *v = ggml_vector<kind, b, first>(codes);
  if constexpr (first + 1 < end) ggml_vectors<kind, b, first + 1, end>(codes, v + 1);
}

// Lanes that are computed together: all 16, or on AVX2 also one of their two registers.
struct All {
  using Floats = F;
  using Ints = I;
  using Bytes = B;
  static EDGESPEC_INLINE F floats(float x) { return fset(x); }
  static EDGESPEC_INLINE I ints(int32_t x) { return iset(x); }
};

template <class L>
struct SharesOf {
  typename L::Floats scale[2], minimum[2];  // of the halves of a block, or of all of it
};
using Shares = SharesOf<All>;

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

// Scaled products of a row with a block, and its minima, from its sums of products: of the halves, or one of all.
template <Kind kind, class L>
EDGESPEC_INLINE typename L::Floats ggml_scaled(const typename L::Ints (&sums)[2], const Act& a, const SharesOf<L>& s,
                                               typename L::Floats acc) {
  constexpr GgmlFacts f = ggml(kind);
  const auto by = L::floats(a.scale);
  if constexpr (f.share == kBlock) {
    acc = fma(itof(sums[0]), fmul(s.scale[0], by), acc);
    if constexpr (f.minimum && f.scale == kHalf) acc = fma(s.minimum[0], L::floats(a.sum), acc);
    if constexpr (f.minimum && f.scale != kHalf) acc = fnma(s.minimum[0], L::floats(a.sum), acc);
  } else {
    const int32_t firsts[2] = {a.first, a.offset_of_second()};
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      acc = fma(itof(sums[h]), fmul(s.scale[h], by), acc);
      if (f.minimum) acc = fnma(s.minimum[h], L::floats(a.scale * (static_cast<float>(firsts[h]) * -.125f)), acc);
    }
  }
  return acc;
}

// One row of block b. Half of the block's vectors are made at a time, so that AVX2 has registers for them.
template <Kind kind, int b>
EDGESPEC_INLINE F ggml_one(const uint8_t* codes, const Act& a, const Shares& s, F acc) {
  constexpr bool whole = ggml(kind).share == kBlock;
  B v[4];
  I sums[2];
  ggml_vectors<kind, b, 0, 4>(codes, v);
  sums[0] = dots<kLargest<kind>, 4>(iset(ggml_offset<kind>(whole ? a.offset : a.first)), v, a.q);
  ggml_vectors<kind, b, 4, 8>(codes, v);
  sums[1] = dots<kLargest<kind>, 4>(whole ? sums[0] : iset(ggml_offset<kind>(a.offset_of_second())), v, a.q + 16);
  if (whole) sums[0] = sums[1];
  return ggml_scaled<kind, All>(sums, a, s, acc);
}

// A row of a block, whose vectors several rows share.
template <Kind kind, class L>
EDGESPEC_INLINE typename L::Floats ggml_row(const typename L::Bytes (&v)[8], const Act& a, const SharesOf<L>& s,
                                            typename L::Floats acc) {
  typename L::Ints sums[2];
  if constexpr (ggml(kind).share == kBlock) {
    sums[0] = dots<kLargest<kind>, 8>(L::ints(ggml_offset<kind>(a.offset)), v, a.q);
  } else {
    sums[0] = dots<kLargest<kind>, 4>(L::ints(ggml_offset<kind>(a.first)), v, a.q);
    sums[1] = dots<kLargest<kind>, 4>(L::ints(ggml_offset<kind>(a.offset_of_second())), v + 4, a.q + 16);
  }
  return ggml_scaled<kind, L>(sums, a, s, acc);
}

// Rows of a block.
template <Kind kind>
EDGESPEC_INLINE void ggml_several(const B (&v)[8], const Act* a, int rows, const Shares& s, F* acc) {
#if defined(EDGESPEC_HALVES)
  // The vectors of half of the columns fit into AVX2's registers. With a zero that is not worth computing it twice.
  if constexpr (ggml(kind).zero == 0) {
    Half::Bytes halves[2][8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      halves[0][j] = v[j].a;
      halves[1][j] = v[j].b;
    }
    const SharesOf<Half> first = {{s.scale[0].a, s.scale[1].a}, {s.minimum[0].a, s.minimum[1].a}};
    const SharesOf<Half> second = {{s.scale[0].b, s.scale[1].b}, {s.minimum[0].b, s.minimum[1].b}};
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r) acc[r].a = ggml_row<kind, Half>(halves[0], a[r], first, acc[r].a);
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r) acc[r].b = ggml_row<kind, Half>(halves[1], a[r], second, acc[r].b);
    return;
  }
#endif
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r) acc[r] = ggml_row<kind, All>(v, a[r], s, acc[r]);
}

// `One`: there is one row.
template <Kind kind, bool One, int b>
EDGESPEC_INLINE void ggml_blocks(const uint8_t* codes, const uint8_t* ahead, const uint8_t* scales, F d, F m,
                                 const Act*& a, int rows, F* acc) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kBlocks = f.group / kBlock;
  constexpr int kLines = static_cast<int>(ggml_codes(f) / 64) / kBlocks;
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + (b * kLines + i) * 64, 0, 2);
  const Shares s = ggml_shares_of<kind, b>(scales, d, m);
  if constexpr (One) {
    *acc = ggml_one<kind, b>(codes, *a, s, *acc);
    asm volatile("" ::: "memory");  // or GCC mixes the blocks of a group, and has no registers left
  } else {
    B v[8];
    ggml_vectors<kind, b, 0, 8>(codes, v);
    ggml_several<kind>(v, a, rows, s, acc);
  }
  a += rows;
  if constexpr (b + 1 < kBlocks) ggml_blocks<kind, One, b + 1>(codes, ahead, scales, d, m, a, rows, acc);
}

template <Kind kind, bool One>
void ggml_product(const uint8_t* tile, int k, const Act* a, int rows, float* y, size_t ld, int columns) {
  constexpr GgmlFacts f = ggml(kind);
  F acc[One ? 1 : kRowGroup];
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
    ggml_blocks<kind, One, 0>(codes, ahead, scales, d, m, a, rows, acc);
  }
  for (int r = 0; r < rows; ++r) fstore_n(y + r * ld, acc[r], columns);
}

template <Kind kind>
void ggml_rows(const uint8_t* tile, int k, const Act* a, int rows, float* y, size_t ld, int columns) {
  if (rows == 1) return ggml_product<kind, true>(tile, k, a, 1, y, ld, columns);
  ggml_product<kind, false>(tile, k, a, rows, y, ld, columns);
}
