// Attention of a pass: grouped heads over the cache, for any number of rows.
//
// The tokens of a sequence are cut into splits of fixed length at fixed places.  An item of work is a few rows and one
// split, of one KV head or of all: it walks the cache in the order it lies in memory, block by block, and keeps a
// running maximum, sum and weighted value for each query (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
// 2205.14135).  Those of the splits are merged in their order.  Neither the number of threads nor the rows beside a row
// change what is added in which order.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "pass.h"

namespace edgespec {
namespace {

constexpr int kSplit = 4 * kKvBlock;               // tokens
constexpr int kManySplits = 4;                     // from here on there are enough items without one for each head
constexpr int kGroupQueries = 32;                  // queries that an item takes together, about
constexpr float kHidden = -3e38f, kSeen = -1e30f;  // a hidden score, and what every real one is above

}  // namespace

// The layout of what attend leaves for merge: [row][head][split]{largest, sum, value[dim]}, padded to vectors.
static size_t partial_stride(int dim) { return size_t(dim) + kTile; }

// The first place of its slot that a row sees through a window (0: all).
static int64_t first_seen(const Visible& v, int window) {
  const int64_t oldest = v.oldest(window);
  int64_t first = oldest;
  for (const Visible::Token& token : v.beyond)
    if (token.position >= oldest) first = std::min(first, token.place);
  return first;
}

void Pass::plan_queries(const Step& s) {
  const size_t count = size_t(in_.rows) * s.heads;
  dim_ = round_up(s.dim, kTile);
  queries_ = static_cast<Query*>(scratch_.queries.get(count * sizeof(Query)));
  scratch_.query_floats.get(count * dim_ * 4);
  scratch_.query_bytes.get(count * dim_);
  scratch_.query_tables.get(count * dim_ * 16);
}

// Groups of rows, and how many splits the one that sees most takes; each group counts them from its own first.
void Pass::plan_attention(const Step& s) {
  const int64_t* slots = plan(2);
  const int most = std::max(1, kGroupQueries / (s.heads / s.kv));
  groups_.clear();
  for (int r = 0; r < in_.rows; ++r) {
    if (groups_.empty() || groups_.back().slot != slots[r] || groups_.back().count == most)
      groups_.push_back({static_cast<int>(slots[r]), r, 0, INT64_MAX, 0});
    Group& group = groups_.back();
    ++group.count;
    const Visible& v = scratch_.visible[r];
    group.begin = std::min(group.begin, first_seen(v, s.window));
    group.end = std::max(group.end, v.last);
  }
  splits_ = 1;
  for (const Group& group : groups_)
    splits_ = std::max(splits_, static_cast<int>((group.end + kSplit - 1) / kSplit - group.begin / kSplit));
  item_heads_ = splits_ >= kManySplits ? s.kv : 1;
  // for the whole cache at once: memory that is given back piece by piece, as the text grows, stays in malloc's hands
  const size_t most_splits = std::max<size_t>(splits_, (capacity_ + kSplit - 1) / kSplit);
  scratch_.partial.get(size_t(in_.rows) * s.heads * most_splits * partial_stride(dim_) * 4);
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
  const int heads = item_heads_, parts = s.kv / heads, each = s.heads / s.kv;
  const int first_head = chunk % parts * heads, split = chunk / parts % splits_;
  const Group& group = groups_[size_t(chunk) / parts / splits_];
  const int64_t from = (group.begin / kSplit + split) * kSplit;
  const int queries = group.count * each;
  const Cache kv = cache(group.slot);
  const auto result = [&](int head, int query) {
    const size_t row = group.first + query / each, at = size_t(head) * each + query % each;
    return static_cast<float*>(scratch_.partial.get(0)) +
           ((row * s.heads + at) * splits_ + split) * partial_stride(dim_);
  };
  for (int head = first_head; head < first_head + heads; ++head)
    for (int q = 0; q < queries; ++q) {
      float* out = result(head, q);
      out[0] = kHidden;
      std::memset(out + 1, 0, (partial_stride(dim_) - 1) * sizeof(float));
    }
  const int64_t end = std::min<int64_t>(from + kSplit, group.end);
  for (int64_t token = std::max(from, group.begin / kKvBlock * kKvBlock); token < end; token += kKvBlock) {
    const int64_t block = token / kKvBlock;
    const int tokens = static_cast<int>(std::min<int64_t>(kKvBlock, end - token));
    for (int head = first_head; head < first_head + heads; ++head) {
      // the processor follows a stream by itself, but not to its next piece elsewhere in memory
      const uint8_t* here = kv.keys(block, s.layer, head);
      const uint8_t* next = head + 1 < first_head + heads  ? kv.keys(block, s.layer, head + 1)
                            : token + kKvBlock < group.end ? kv.keys(block + 1, s.layer, first_head)
                                                           : here;
      for (int q = 0; q < queries; q += kMaxQueries) {
        const int n = std::min(kMaxQueries, queries - q);
        float* results[kMaxQueries];
        for (int i = 0; i < n; ++i) results[i] = result(head, q + i);
        attend_block(s, group, kv, head, token, tokens, q, n, results, q ? 0 : next - here);
      }
    }
  }
  if (splits_ == 1)
    for (int row = 0; row < group.count; ++row)
      for (int head = first_head; head < first_head + heads; ++head) merge(s, (group.first + row) * s.kv + head);
}

// One block of one KV head, up to 8 queries: scores, then the running softmax and the values they weigh.
void Pass::attend_block(const Step& s, const Group& group, const Cache& kv, int head, int64_t token, int there,
                        int first, int queries, float* const* results, ptrdiff_t ahead) const {
  const int each = s.heads / s.kv, tokens = round_up(there, 32);
  const int64_t block = token / kKvBlock;
  const KvFormat format = in_.read_codes ? in_.layout.codes : in_.layout.keys;
  alignas(64) float scores[kMaxQueries][kKvBlock], values[kMaxQueries * kMaxHeadDim];
  Query wanted[kMaxQueries];
  for (int i = 0; i < queries; ++i) {
    const int row = group.first + (first + i) / each, at = head * each + (first + i) % each;
    wanted[i] = queries_[size_t(row) * s.heads + at];
  }
  k_.score(format, in_.read_codes ? kv.codes(block, s.layer, head) : kv.keys(block, s.layer, head), dim_, 0,
           tokens / kTile, wanted, queries, scores[0], kKvBlock, ahead);
  if (in_.layout.ring && in_.layout.window && is_coded(format))  // only drafts may have a window
    recent_scores(s, group, head, token, tokens, first, queries, scores[0]);
  for (int i = 0; i < queries && s.cap > 0; ++i) k_.softcap(scores[i], tokens, s.cap);
  hide(s, group, first, queries, token, tokens, scores[0]);
  float largest_of[kMaxQueries];     // of all queries first: finding one is a chain of dependent instructions
  for (int i = 0; i < queries; ++i)  // in this order a NaN of the block stays
    largest_of[i] = std::max(k_.largest(scores[i], tokens), results[i][0]);
  for (int i = 0; i < queries; ++i) {
    float* out = results[i];
    const float largest = largest_of[i];
    if (largest > out[0] && out[0] > kSeen) {  // what was summed so far counts less
      alignas(64) float shrink[kTile];
      std::fill(shrink, shrink + kTile, out[0]);
      k_.exponentials(shrink, kTile, largest);
      out[1] *= shrink[0];
      k_.scale(out + kTile, dim_, shrink[0]);
    }
    out[0] = largest;
    if (!(largest <= kSeen))
      out[1] += k_.exponentials(scores[i], tokens, largest);
    else
      std::memset(scores[i], 0, sizeof scores[i]);
    std::memcpy(values + size_t(i) * dim_, out + kTile, size_t(dim_) * 4);
  }
  k_.weigh(in_.layout.values, kv.values(block, s.layer, head), dim_, 0, there, scores[0], kKvBlock, queries, values,
           ahead);
  for (int i = 0; i < queries; ++i) std::memcpy(results[i] + kTile, values + size_t(i) * dim_, size_t(dim_) * 4);
}

void Pass::hide(const Step& s, const Group& group, int first, int queries, int64_t from, int tokens,
                float* scores) const {
  const int each = s.heads / s.kv;
  for (int i = 0; i < queries; ++i) {
    const Visible& v = scratch_.visible[group.first + (first + i) / each];
    const int64_t oldest = v.oldest(s.window);
    const int low = static_cast<int>(std::clamp<int64_t>(oldest - from, 0, tokens));
    const int high = static_cast<int>(std::clamp<int64_t>(v.high - from, low, tokens));
    if (low == 0 && high == tokens) continue;
    float* row = scores + size_t(i) * kKvBlock;
    float beyond[kKvBlock];
    const auto is_here = [&](const Visible::Token& token) {
      return token.place >= from && token.place < from + tokens && token.position >= oldest;
    };
    for (const Visible::Token& token : v.beyond)
      if (is_here(token)) beyond[token.place - from] = row[token.place - from];
    std::fill(row, row + low, kHidden);
    std::fill(row + high, row + tokens, kHidden);
    for (const Visible::Token& token : v.beyond)
      if (is_here(token)) row[token.place - from] = beyond[token.place - from];
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
      k_.score(kKvF16, exact, dim_, static_cast<int>(row / kTile), 1, wanted, queries, tile[0], kTile, 0);
    };
    if (sink) {
      rescore(token);
      for (int i = 0; i < queries; ++i)
        for (int c = 0; c < kTile && token + c < layout.sinks; ++c) scores[size_t(i) * kKvBlock + at + c] = tile[i][c];
    }
    if (token + kTile <= least || token >= group.end) continue;
    rescore(kSinkRows + token % layout.ring);
    for (int i = 0; i < queries; ++i)
      for (int c = 0; c < kTile; ++c)
        if (token + c >= oldest[i]) scores[size_t(i) * kKvBlock + at + c] = tile[i][c];
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
