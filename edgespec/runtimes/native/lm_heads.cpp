// Steps between and after the layers: hidden states in and out, further heads, LM heads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "pass.h"

namespace edgespec {

void Pass::load(const Step& s, int row) {
  std::memcpy(floats(s.out) + size_t(row) * s.k, in_.hidden + row * in_.hidden_width + s.at, size_t(s.k) * 4);
}

void Pass::store(const Step& s, int row) {
  std::memcpy(out_.hidden + size_t(row) * active_.hidden + s.at, floats(s.x) + size_t(row) * s.k, size_t(s.k) * 4);
}

void Pass::norm(const Step& s, int row) {
  const float* x = floats(s.x) + source(s, row) * s.k;
  float* out = floats(s.out) + size_t(row) * (s.n ? s.n : s.k) + s.at;
  if (!s.norms() && !s.add) {
    std::memcpy(out, x, size_t(s.k) * 4);
    return;
  }
  if (!s.add && !s.n) return normed(s, x, out);
  thread_local std::vector<float> kept;
  kept.resize(s.k + 16);
  if (s.norms()) {
    normed(s, x, kept.data());
    x = kept.data();
  }
  if (s.n) {  // vectors may write past a row's end: not into the columns of others
    std::memcpy(out, x, size_t(s.k) * 4);
    return;
  }
  k_.add(out, x, s.k);
  if (s.scale != 1)
    for (int i = 0; i < s.k; ++i) out[i] *= s.scale;
}

// The token's row of a table of all layers, of which this one's part is read.
void Pass::blend(const Step& s, int row) {
  const size_t part = static_cast<size_t>(std::max<int64_t>(0, plan(0)[row])) * s.times + s.first, at = part * s.k;
  float* x = floats(s.x) + size_t(row) * s.k;
  const float* base = floats(s.base) + size_t(row) * s.k;
  thread_local std::vector<float> kept;
  kept.resize(2 * (size_t(s.k) + kTile));
  float *given = kept.data(), *gate = given + s.k + kTile;
  std::memcpy(gate, x, size_t(s.k) * 4);
  if (s.kind == kR8) {
    const int8_t* levels = static_cast<const int8_t*>(weight(s.w)) + at;
    const float scale = vector(s.bias)[part] * s.scale;
    for (int i = 0; i < s.k; ++i) given[i] = base[i] + static_cast<float>(levels[i]) * scale;
  } else {
    const float* numbers = static_cast<const float*>(weight(s.w)) + at;
    for (int i = 0; i < s.k; ++i) given[i] = base[i] + numbers[i] * s.scale;
  }
  k_.glu[s.fn](gate, given, s.k, gate);
  std::memcpy(x, gate, size_t(s.k) * 4);
}

int64_t Pass::activate_pieces(const Step& s) const { return (int64_t(count(s)) * s.k + kPiece - 1) / kPiece; }

// The numbers of all rows as one line: what a vector writes beyond its end is a buffer's padding.
void Pass::activate(const Step& s, int piece) {
  static const auto ones = [] {
    std::array<float, kPiece> all;
    all.fill(1.f);
    return all;
  }();
  float* x = floats(s.x) + size_t(piece) * kPiece;
  const int64_t left = int64_t(count(s)) * s.k - int64_t(piece) * kPiece;
  const int n = static_cast<int>(std::min<int64_t>(kPiece, left));
  if (s.fn == kClamp) {
    const float least = vector(s.w)[0], most = vector(s.w)[1];
    for (int i = 0; i < n; ++i) x[i] = std::max(std::min(x[i], most), least);  // in this order a NaN stays
    return;
  }
  s.fn == kXielu ? k_.xielu(x, n, vector(s.w)) : k_.glu[s.fn](x, ones.data(), n, x);
}

// out *= fn(x), all numbers of all rows as one line.
void Pass::multiply(const Step& s, int piece) {
  const size_t at = size_t(piece) * kPiece;
  const int n = static_cast<int>(std::min<int64_t>(kPiece, int64_t(count(s)) * s.k - int64_t(at)));
  const float* x = floats(s.x) + at;
  thread_local std::vector<float> repeated;
  if (s.times > 1) {
    repeated.resize(kPiece);
    for (int i = 0; i < n; ++i) repeated[i] = floats(s.x)[(at + i) / s.times];
    x = repeated.data();
  }
  k_.glu[s.fn](x, floats(s.out) + at, n, floats(s.out) + at);
}

void Pass::split(const Step& s, int row) {
  const size_t part = row / in_.heads, from = row % in_.heads;
  float* out = floats(s.out) + size_t(row) * s.n;
  std::memcpy(out, floats(s.x) + (from * s.times + part) * s.n, size_t(s.n) * 4);
  if (s.base >= 0) k_.add(out, floats(s.base) + from * s.n, s.n);
}

// Finishes the logits of one row and one tile, y [kTile]; beyond the columns they stay 0.
void Pass::finish_logits(const Step& s, int tile, int columns, float* y) const {
  if (s.bias >= 0) k_.add(y, vector(s.bias) + size_t(tile) * kTile, columns);
  if (s.scale != 1) k_.scale(y, kTile, s.scale);
  if (s.cap > 0) k_.softcap(y, kTile, s.cap);
}

void Pass::logits(const Step& s, int chunk) {
  if (in_.top) return best(s, chunk);
  const int rows = count(s), last = bounds_[chunk + 1], wide = columns(s);
  float* out = out_.logits + source(s, 0) * wide;
  alignas(64) float y[kTile];
  for (int tile = bounds_[chunk]; tile < last; ++tile)
    for (int group = 0; group * kRowGroup < rows; ++group) {
      const int n = rows_in_group(rows, group), columns = std::min(kTile, wide - tile * kTile);
      float* to = out + size_t(group) * kRowGroup * wide + tile * kTile;
      k_.linear[s.kind](tiles(s, s.w, s.low, tile, s.k), s.k, group_acts(s.act, s.kind, s.k, group), n, to, wide,
                        columns);
      if (!s.finishes()) continue;
      for (int i = 0; i < n; ++i, to += wide) {
        std::fill(y, y + kTile, 0.f);
        std::memcpy(y, to, size_t(columns) * 4);
        finish_logits(s, tile, columns, y);
        std::memcpy(to, y, size_t(columns) * 4);
      }
    }
}

namespace {

bool better(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Keep the best `top` of what is offered, in order; the first of equals wins; a NaN wins over everything.
void offer(int64_t* ids, float* values, int top, int64_t id, float value) {
  if (!better(value, values[top - 1])) return;
  int at = top - 1;
  for (; at > 0 && better(value, values[at - 1]); --at) {
    ids[at] = ids[at - 1];
    values[at] = values[at - 1];
  }
  ids[at] = id;
  values[at] = value;
}

}  // namespace

void Pass::best(const Step& s, int chunk) {
  const int rows = count(s), last = bounds_[chunk + 1], top = in_.top, wide = columns(s);
  int64_t* ids = static_cast<int64_t*>(scratch_.found_ids.get(0)) + size_t(chunk) * rows * top;
  float* values = static_cast<float*>(scratch_.found_values.get(0)) + size_t(chunk) * rows * top;
  std::fill_n(ids, size_t(rows) * top, -1);
  std::fill_n(values, size_t(rows) * top, -HUGE_VALF);
  alignas(64) float y[kRowGroup][kTile];
  for (int tile = bounds_[chunk]; tile < last; ++tile) {
    const int columns = std::min(kTile, wide - tile * kTile);
    for (int group = 0; group * kRowGroup < rows; ++group) {
      const int n = rows_in_group(rows, group);
      k_.linear[s.kind](tiles(s, s.w, s.low, tile, s.k), s.k, group_acts(s.act, s.kind, s.k, group), n, y[0], kTile,
                        kTile);
      for (int i = 0; i < n; ++i) {
        const size_t at = size_t(group * kRowGroup + i) * top;
        if (s.finishes()) finish_logits(s, tile, columns, y[i]);
        if (!k_.exceeds(y[i], values[at + top - 1])) continue;
        for (int c = 0; c < columns; ++c) offer(ids + at, values + at, top, tile * kTile + c, y[i][c]);
      }
    }
  }
}

void Pass::merge_best(const Step& s) {
  const int rows = count(s), top = in_.top;
  const int64_t* ids = static_cast<const int64_t*>(scratch_.found_ids.get(0));
  const float* values = static_cast<const float*>(scratch_.found_values.get(0));
  int64_t* best_ids = out_.top_ids + source(s, 0) * top;
  float* best_values = out_.top_values + source(s, 0) * top;
  std::fill_n(best_ids, size_t(rows) * top, -1);
  std::fill_n(best_values, size_t(rows) * top, -HUGE_VALF);
  for (size_t chunk = 0; chunk + 1 < bounds_.size(); ++chunk)
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < top; ++i) {
        const size_t at = (chunk * rows + r) * top + i;
        if (ids[at] >= 0) offer(best_ids + size_t(r) * top, best_values + size_t(r) * top, top, ids[at], values[at]);
      }
}

}  // namespace edgespec
