// Matrices of 16- and 32-bit floats, once for all instruction sets but the specification, over their vector types,
// their fload_half and fload_bfloat.  A column of a row is four partial sums, k modulo 4, each of them in the order of
// k, added as (0 + 1) + (2 + 3).  An instruction set says for how many rows it has registers: kFloatRows for all four
// sums at once, kChainRows (or 0) for one sum after the other.

constexpr size_t line_bytes(Kind kind) { return size_t(kTile) * kKinds[kind].bits / 8; }  // of one k
constexpr size_t kFloatsAhead = 9216;  // how far weights are fetched before they are used, to the second cache
constexpr int kPanel = 256;            // numbers of k whose weights stay in the first cache, a multiple of 4

template <Kind kind>
EDGESPEC_INLINE F float_vector(const uint8_t* w) {
  if constexpr (kind == kF32) return fload(reinterpret_cast<const float*>(w));
  if constexpr (kind == kF16) return fload_half(reinterpret_cast<const uint16_t*>(w));
  if constexpr (kind == kBF16) return fload_bfloat(reinterpret_cast<const uint16_t*>(w));
}

EDGESPEC_INLINE void put_sums(const F (&sums)[4], float* y, int columns) {
  fstore_n(y, fadd(fadd(sums[0], sums[1]), fadd(sums[2], sums[3])), columns);
}

template <Kind kind, int R>
EDGESPEC_INLINE void float_rows(const uint8_t* w, int k, const float* x, float* y, size_t ld, int columns) {
  constexpr size_t kLine = line_bytes(kind);
  F sums[R][4];
  for (auto& row : sums)
    for (F& sum : row) sum = fset(0.f);
  const auto add = [&](int i, int s) __attribute__((always_inline)) {
    const F v = float_vector<kind>(w + s * kLine);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[r][s] = fma(v, fset(x[size_t(r) * k + i + s]), sums[r][s]);
  };
  int i = 0;
  for (; i + 4 <= k; i += 4, w += 4 * kLine) {
#pragma GCC unroll 4
    for (size_t at = 0; at < 4 * kLine; at += 64) __builtin_prefetch(w + at + kFloatsAhead, 0, 2);
    add(i, 0), add(i, 1), add(i, 2), add(i, 3);
  }
  if (i < k) add(i, 0);
  if (i + 1 < k) add(i, 1);
  if (i + 2 < k) add(i, 2);
  for (int r = 0; r < R; ++r) put_sums(sums[r], y + r * ld, columns);
}

// Adds n numbers of k to the sums of R rows.
template <Kind kind, int R>
EDGESPEC_INLINE void chain_rows(const uint8_t* w, int n, const float* x, int k, F (*sums)[4]) {
#pragma GCC unroll 1
  for (int s = 0; s < 4; ++s) {
    F sum[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[r] = sums[r][s];
    for (int i = s; i < n; i += 4) {
      const F v = float_vector<kind>(w + i * line_bytes(kind));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r] = fma(v, fset(x[size_t(r) * k + i]), sum[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r][s] = sum[r];
  }
}

// R, 2 R, ... of the rows -> how many.
template <Kind kind, int R>
EDGESPEC_INLINE int chains(const uint8_t* w, int k, const float* x, int rows, float* y, size_t ld, int columns) {
  F sums[kRowGroup][4];
  const int whole = rows / R * R;
  for (int r = 0; r < whole; ++r)
    for (F& sum : sums[r]) sum = fset(0.f);
  for (int at = 0; at < k; at += kPanel, w += kPanel * line_bytes(kind)) {
    const int n = k - at < kPanel ? k - at : kPanel;
    for (size_t line = 0; line < n * line_bytes(kind); line += 64) __builtin_prefetch(w + line + kFloatsAhead, 0, 2);
    for (int r = 0; r < whole; r += R) chain_rows<kind, R>(w, n, x + size_t(r) * k + at, k, sums + r);
  }
  for (int r = 0; r < whole; ++r) put_sums(sums[r], y + r * ld, columns);
  return whole;
}

template <Kind kind>
void linear_floats(const uint8_t* w, int k, const void* act, int rows, float* y, size_t ld, int columns) {
  const float* x = static_cast<const float*>(act);
  int r = 0;
  if constexpr (kChainRows > 0) {
    if (rows >= kChainRows) r = chains<kind, kChainRows>(w, k, x, rows, y, ld, columns);
    if (rows - r >= 4) r += chains<kind, 4>(w, k, x + size_t(r) * k, rows - r, y + r * ld, ld, columns);
  }
  for (; r + kFloatRows <= rows; r += kFloatRows)
    float_rows<kind, kFloatRows>(w, k, x + size_t(r) * k, y + r * ld, ld, columns);
  for (; kFloatRows > 2 && r + 2 <= rows; r += 2) float_rows<kind, 2>(w, k, x + size_t(r) * k, y + r * ld, ld, columns);
  for (; r < rows; ++r) float_rows<kind, 1>(w, k, x + size_t(r) * k, y + r * ld, ld, columns);
}
