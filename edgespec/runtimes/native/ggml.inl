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

template <Kind kind, int b, int j = 0>
EDGESPEC_INLINE void ggml_vectors(const uint8_t* codes, B (&v)[8]) {
  v[j] = ggml_vector<kind, b, j>(codes);
  if constexpr (j < 7) ggml_vectors<kind, b, j + 1>(codes, v);
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

// Takes `zero` back from each level: zero / 8 of an offset.
template <int zero>
EDGESPEC_INLINE I ggml_offset(int32_t offset) {
  return iset(static_cast<int32_t>(static_cast<uint32_t>(offset >> 3) * uint32_t(zero)));
}

// A row of a block: its products, scaled, and its minima.
template <Kind kind>
EDGESPEC_INLINE F ggml_row(const B (&v)[8], const Act& a, const Shares& s, F acc) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kMost = f.table ? kGgmlTables[f.table][f.table == 1 ? 15 : 7] : (1 << (f.low + f.high)) - 1;
  const F by = fset(a.scale);
  if constexpr (f.share == kBlock) {
    const I sum = dots<kMost, 8>(ggml_offset<f.zero>(a.offset), v, a.q);
    acc = fma(itof(sum), fmul(s.scale[0], by), acc);
    if (f.minimum) acc = f.scale == kHalf ? fma(s.minimum[0], fset(a.sum), acc) : fnma(s.minimum[0], fset(a.sum), acc);
  } else {
    const int32_t offsets[2] = {a.first,
                                static_cast<int32_t>(static_cast<uint32_t>(a.offset) - static_cast<uint32_t>(a.first))};
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const I sum = dots<kMost, 4>(ggml_offset<f.zero>(offsets[h]), v + 4 * h, a.q + 16 * h);
      acc = fma(itof(sum), fmul(s.scale[h], by), acc);
      if (f.minimum) acc = fnma(s.minimum[h], fset(a.scale * (static_cast<float>(offsets[h]) * -.125f)), acc);
    }
  }
  return acc;
}

template <Kind kind, int b>
EDGESPEC_INLINE void ggml_blocks(const uint8_t* codes, const uint8_t* ahead, const uint8_t* scales, F d, F m,
                                 const Act*& a, int rows, F* acc) {
  constexpr GgmlFacts f = ggml(kind);
  constexpr int kBlocks = f.group / kBlock;
  constexpr int kLines = static_cast<int>(ggml_codes(f) / 64) / kBlocks;
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + (b * kLines + i) * 64, 0, 2);
  const Shares s = ggml_shares_of<kind, b>(scales, d, m);
  B v[8];
  ggml_vectors<kind, b>(codes, v);
  // a loop even for one row: what GCC makes of a group's blocks without it takes up to 1.35 times as long
#pragma GCC unroll 1
  for (int r = 0; r < rows; ++r) acc[r] = ggml_row<kind>(v, a[r], s, acc[r]);
  a += rows;
  if constexpr (b + 1 < kBlocks) ggml_blocks<kind, b + 1>(codes, ahead, scales, d, m, a, rows, acc);
}

template <Kind kind>
void ggml_rows(const uint8_t* tile, int k, const Act* a, int rows, float* y, size_t ld, int columns) {
  constexpr GgmlFacts f = ggml(kind);
  F acc[kRowGroup];
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
    ggml_blocks<kind, 0>(codes, ahead, scales, d, m, a, rows, acc);
  }
  for (int r = 0; r < rows; ++r) fstore_n(y + r * ld, acc[r], columns);
}
