// Attention of a pass: grouped heads over the cache, for any number of rows.
//
// The tokens of a sequence are cut into splits of fixed length at fixed places.  An item of work is a few rows, one KV
// head and one split; it leaves a maximum, a sum and a weighted value for each query.  Those are merged in the order of
// the splits.  Neither the number of threads nor the rows beside a row change what is added in which order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pass.h"

namespace edgespec {
namespace {

constexpr int kSplit = 2 * kKvBlock;  // tokens
constexpr int kGroupQueries = 32;     // queries that an item takes together, about
constexpr float kHidden = -3e38f;

}  // namespace

// The layout of what attend leaves for merge: [row][head][split]{largest, sum, value[dim]}, padded to vectors.
static size_t partial_stride(int dim) { return size_t(dim) + kTile; }

void Pass::plan_attention(const Step& s) {
  const int64_t* slots = plan(2);
  const int most = std::max(1, kGroupQueries / (s.heads / s.kv));
  int64_t end = 0;
  groups_.clear();
  for (int r = 0; r < in_.rows; ++r) {
    if (groups_.empty() || groups_.back().slot != slots[r] || groups_.back().count == most)
      groups_.push_back({static_cast<int>(slots[r]), r, 0, 0});
    Group& group = groups_.back();
    ++group.count;
    group.end = std::max(group.end, scratch_.visible[r].last);
    end = std::max(end, group.end);
  }
  splits_ = std::max(1, static_cast<int>((end + kSplit - 1) / kSplit));
  const size_t count = size_t(in_.rows) * s.heads;
  queries_ = static_cast<Query*>(scratch_.queries.get(count * sizeof(Query)));
  scratch_.query_floats.get(count * dim_ * 4);
  scratch_.query_bytes.get(count * dim_);
  scratch_.query_tables.get(count * dim_ * 16);
  scratch_.partial.get(count * splits_ * partial_stride(dim_) * 4);
}

void Pass::prepare_query(const Step& s, int row, int head, const float* q) {
  const size_t at = size_t(row) * s.heads + head;
  float* f = static_cast<float*>(scratch_.query_floats.get(0)) + at * dim_;
  int8_t* bytes = static_cast<int8_t*>(scratch_.query_bytes.get(0)) + at * dim_;
  uint8_t* lut = static_cast<uint8_t*>(scratch_.query_tables.get(0)) + at * dim_ * 16;
  std::memcpy(f, q, size_t(dim_) * 4);
  Query& query = queries_[at];
  query = {f, bytes, 1.f, 0.f, 0, lut};
  const KvFormat format = in_.read_codes ? in_.layout.codes : in_.layout.keys;
  const float* table =
      in_.tables.of[format] ? in_.tables.at(format, in_.layout, s.layer, head / (s.heads / s.kv)) : nullptr;
  if (format == kKvInt8) {
    query.scale = k_.quantize_query(q, dim_, bytes, &query.minus_sum);
  } else if (format == kKvInt4) {
    float scaled[kMaxHeadDim], bias = 0;
    for (int d = 0; d < dim_; ++d) {
      scaled[d] = q[d] * table[d];
      bias += q[d] * table[dim_ + d];
    }
    query.scale = k_.quantize_query(scaled, dim_, bytes, &query.minus_sum);
    query.bias = bias;
  } else if (format == kKvNomad1 || format == kKvNomad2) {
    k_.lookup_table(table, q, dim_, format == kKvNomad1 ? 1 : 2, lut, &query.scale, &query.bias);
  }
}

void Pass::attend(const Step& s, int chunk) {
  const int kv_head = chunk % s.kv, split = chunk / s.kv % splits_, each = s.heads / s.kv;
  const Group& group = groups_[size_t(chunk) / s.kv / splits_];
  const int64_t from = int64_t(split) * kSplit;
  const int queries = group.count * each;
  const KvLayout& layout = in_.layout;
  float* partial = static_cast<float*>(scratch_.partial.get(0));
  const auto result = [&](int query) {
    const size_t row = group.first + query / each, head = size_t(kv_head) * each + query % each;
    return partial + ((row * s.heads + head) * splits_ + split) * partial_stride(dim_);
  };
  const int tokens = static_cast<int>(std::min<int64_t>(kSplit, group.end - from));
  if (tokens <= 0) {
    for (int q = 0; q < queries; ++q) result(q)[0] = kHidden;
    return;
  }
  const int padded = round_up(tokens, 32);
  const Cache kv = cache(group.slot);
  const KvFormat format = in_.read_codes ? layout.codes : layout.keys;
  alignas(64) float scores[kMaxQueries][kSplit], values[kMaxQueries * kMaxHeadDim];
  Query wanted[kMaxQueries];
  for (int first = 0; first < queries; first += kMaxQueries) {
    const int n = std::min(kMaxQueries, queries - first);
    for (int i = 0; i < n; ++i) {
      const int row = group.first + (first + i) / each, head = kv_head * each + (first + i) % each;
      wanted[i] = queries_[size_t(row) * s.heads + head];
    }
    for (int at = 0; at < padded; at += kKvBlock) {
      const int64_t block = (from + at) / kKvBlock;
      const uint8_t* keys = in_.read_codes ? kv.codes(block, s.layer, kv_head) : kv.keys(block, s.layer, kv_head);
      k_.score(format, keys, dim_, 0, std::min(kKvBlock, padded - at) / kTile, wanted, n, scores[0] + at, kSplit);
    }
    if (layout.ring && is_coded(format)) recent_scores(s, group, kv_head, from, padded, first, n, scores[0]);
    hide(s, group, first, n, from, padded, scores[0]);
    float largest[kMaxQueries], sum[kMaxQueries];
    for (int i = 0; i < n; ++i) {
      largest[i] = k_.largest(scores[i], padded);
      sum[i] = largest[i] > -1e30f ? k_.exponentials(scores[i], padded, largest[i]) : 0.f;
      if (sum[i] == 0) std::memset(scores[i], 0, sizeof scores[i]);
    }
    std::memset(values, 0, size_t(n) * dim_ * 4);
    for (int at = 0; at < padded; at += kKvBlock)
      k_.weigh(layout.values, kv.values((from + at) / kKvBlock, s.layer, kv_head), dim_, 0,
               std::min(kKvBlock, padded - at), scores[0] + at, kSplit, n, values);
    for (int i = 0; i < n; ++i) {
      float* out = result(first + i);
      out[0] = sum[i] == 0 ? kHidden : largest[i];
      out[1] = sum[i];
      std::memcpy(out + kTile, values + size_t(i) * dim_, size_t(dim_) * 4);
    }
  }
  if (splits_ == 1)
    for (int q = 0; q < group.count; ++q) merge(s, (group.first + q) * s.kv + kv_head);
}

void Pass::hide(const Step& s, const Group& group, int first, int queries, int64_t from, int tokens,
                float* scores) const {
  const int each = s.heads / s.kv;
  for (int i = 0; i < queries; ++i) {
    const Visible& v = scratch_.visible[group.first + (first + i) / each];
    const int64_t oldest = s.window ? v.position - s.window + 1 : 0;
    const int low = static_cast<int>(std::clamp<int64_t>(std::max(v.low, oldest) - from, 0, tokens));
    const int high = static_cast<int>(std::clamp<int64_t>(v.high - from, low, tokens));
    if (low == 0 && high == tokens) continue;
    float* row = scores + size_t(i) * kSplit;
    float beyond[kSplit];
    for (const int64_t token : v.beyond)
      if (token >= from && token < from + tokens) beyond[token - from] = row[token - from];
    std::fill(row, row + low, kHidden);
    std::fill(row + high, row + tokens, kHidden);
    for (const int64_t token : v.beyond)
      if (token >= from && token < from + tokens) row[token - from] = beyond[token - from];
  }
}

// Scores of the newest and the first tokens again, from their exact keys.
void Pass::recent_scores(const Step& s, const Group& group, int kv_head, int64_t from, int tokens, int first,
                         int queries, float* scores) const {
  const int each = s.heads / s.kv;
  const KvLayout& layout = in_.layout;
  const auto* exact = reinterpret_cast<const uint8_t*>(cache(group.slot).recent(s.layer, kv_head));
  Query wanted[kMaxQueries];
  int64_t oldest[kMaxQueries], least = INT64_MAX;
  for (int i = 0; i < queries; ++i) {
    const int row = group.first + (first + i) / each, head = kv_head * each + (first + i) % each;
    wanted[i] = queries_[size_t(row) * s.heads + head];
    oldest[i] = scratch_.visible[row].position - layout.window + 1;
    least = std::min(least, oldest[i]);
  }
  alignas(64) float tile[kMaxQueries][kTile];
  for (int at = 0; at < tokens; at += kTile) {
    const int64_t token = from + at;
    const bool sink = token < layout.sinks;
    if (token + kTile <= least && !sink) continue;
    const auto rescore = [&](int64_t row) {
      k_.score(kKvF16, exact, dim_, static_cast<int>(row / kTile), 1, wanted, queries, tile[0] - row / kTile * kTile,
               kTile);
    };
    if (sink) {
      rescore(token);
      for (int i = 0; i < queries; ++i)
        for (int c = 0; c < kTile && token + c < layout.sinks; ++c) scores[size_t(i) * kSplit + at + c] = tile[i][c];
    }
    if (token + kTile <= least || token >= group.end) continue;
    rescore(kSinkRows + token % layout.ring);
    for (int i = 0; i < queries; ++i)
      for (int c = 0; c < kTile; ++c)
        if (token + c >= oldest[i]) scores[size_t(i) * kSplit + at + c] = tile[i][c];
  }
}

void Pass::merge(const Step& s, int chunk) {
  const int row = chunk / s.kv, kv_head = chunk % s.kv, each = s.heads / s.kv;
  const float* partial = static_cast<const float*>(scratch_.partial.get(0));
  thread_local std::vector<float> weights;
  const int padded = round_up(splits_, kTile);
  weights.resize(padded);
  alignas(64) float value[kMaxHeadDim];
  for (int head = kv_head * each; head < (kv_head + 1) * each; ++head) {
    const float* from = partial + (size_t(row) * s.heads + head) * splits_ * partial_stride(dim_);
    for (int i = 0; i < padded; ++i) weights[i] = i < splits_ ? from[i * partial_stride(dim_)] : kHidden;
    const float largest = k_.largest(weights.data(), padded);
    k_.exponentials(weights.data(), padded, largest);
    std::memset(value, 0, size_t(dim_) * 4);
    float sum = 0;
    for (int i = 0; i < splits_; ++i) {
      if (weights[i] == 0) continue;
      const float* part = from + i * partial_stride(dim_);
      sum = std::fma(part[1], weights[i], sum);
      k_.accumulate(value, part + kTile, dim_, weights[i]);
    }
    k_.scale(value, dim_, 1.f / sum);
    std::memcpy(floats(s.out) + (size_t(row) * s.heads + head) * s.dim, value, size_t(s.dim) * 4);
  }
}

}  // namespace edgespec
