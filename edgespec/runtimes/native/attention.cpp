// Attention of a pass: grouped heads over the cache, for any number of rows.
//
// The tokens of a sequence are cut into splits of fixed length at fixed positions.  A work item is a few rows and one
// split, of one KV head or of all.  It walks the cache block by block, in memory order, and keeps a running maximum,
// sum and weighted value for each query (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).  The
// splits are merged in their order.  Neither the number of threads nor other rows change the order of additions.
//
// Blocks whose rows see tokens stored out of order, as in a tree: tree.cpp.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "fused.h"
#include "pass.h"

namespace edgespec {
namespace {

constexpr int kSplit = 4 * kKvBlock;               // tokens
constexpr int kManySplits = 4;                     // from here on there are enough items without one per head
constexpr int kGroupQueries = 32;                  // queries that an item takes together, about
constexpr float kHidden = -3e38f, kSeen = -1e30f;  // a hidden score, and what every real one is above

}  // namespace

// Size of attend's output for merge, for each group, KV head and split: values [queries][dim], then for all queries the
// largest score and the sum of weights.  Each query has room for kTile numbers, so that values are whole vectors.
static size_t partial_stride(int dim) { return size_t(dim) + kTile; }

// The first token that a row sees through a window (0: all).
static int64_t first_seen(const Visible& v, int window) {
  const int64_t oldest = v.oldest(window);
  for (size_t i = 0; i < v.beyond.size() && v.high + static_cast<int64_t>(i) < oldest; ++i)
    if (v.beyond[i].position >= oldest) return v.high + static_cast<int64_t>(i);
  return oldest;
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
  const int64_t* slots = s.memory ? in_.sources : this->slots();
  const int most = std::max(1, kGroupQueries / (s.heads / s.kv));
  groups_.clear();
  path_.assign(in_.rows, -1);
  for (int r = 0; r < in_.rows; ++r) {
    if (groups_.empty() || groups_.back().slot != slots[r] || groups_.back().count == most)
      groups_.push_back({static_cast<int>(slots[r]), r, 0, INT64_MAX, 0, 0, INT64_MAX, INT64_MAX, {}, {}});
    Group& group = groups_.back();
    ++group.count;
    const Visible& v = seen(s, r);
    group.begin = std::min(group.begin, first_seen(v, s.window));
    group.end = std::max(group.end, v.beyond.empty() ? v.shut(s.after) : v.end());
    group.open = std::max(group.open, v.oldest(s.window));
    group.shut = std::min(group.shut, v.shut(s.after));
    if (!v.beyond.empty()) group.tail = std::min(group.tail, v.high / kKvBlock);
  }
  for (Group& group : groups_)
    if (group.tail < INT64_MAX) find_tail(group);
  splits_ = 1;
  for (const Group& group : groups_)
    splits_ = std::max(splits_, static_cast<int>((group.end + kSplit - 1) / kSplit - group.begin / kSplit));
  item_heads_ = splits_ >= kManySplits ? s.kv : 1;
  // for the whole cache at once: memory that is given back piece by piece, as the text grows, stays in malloc's hands;
  // of a pool and of memories, where each could have the longest text but few do, in steps
  size_t most_splits = in_.layout.table || s.memory ? 1 : (capacity_ + kSplit - 1) / kSplit;
  while (most_splits < static_cast<size_t>(splits_)) most_splits *= 2;
  scratch_.partial.get(size_t(in_.rows) * s.heads * most_splits * partial_stride(dim_) * 4);
}

// Index of the queries of a row at a KV head; the rows of a group are contiguous.
size_t Pass::query_at(const Step& s, int kv_head, int row) const {
  return (size_t(kv_head) * in_.rows + row) * (s.heads / s.kv);
}

float* Pass::partial(const Step& s, const Group& group, int kv_head, int split) const {
  const size_t queries = size_t(group.count) * (s.heads / s.kv);
  return static_cast<float*>(scratch_.partial.get(0)) +
         (size_t(group.first) * s.heads * splits_ + (size_t(kv_head) * splits_ + split) * queries) *
             partial_stride(dim_);
}

void Pass::prepare_query(const Step& s, int row, int head, const float* q) {
  const size_t at = query_at(s, head / (s.heads / s.kv), row) + head % (s.heads / s.kv);
  float* f = static_cast<float*>(scratch_.query_floats.get(0)) + at * dim_;
  int8_t* bytes = static_cast<int8_t*>(scratch_.query_bytes.get(0)) + at * dim_;
  uint8_t* lut = static_cast<uint8_t*>(scratch_.query_tables.get(0)) + at * dim_ * 16;
  std::memcpy(f, q, size_t(dim_) * 4);
  Query& query = queries_[at];
  query = {f, bytes, 1.f, 0.f, 0, lut};
  const KvFormat format = key_format(s);
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
  if (merging_) return merge(s, chunk);
  const int heads = item_heads_, parts = s.kv / heads, each = s.heads / s.kv;
  const int first_head = chunk % parts * heads, split = chunk / parts % splits_;
  const Group& group = groups_[size_t(chunk) / parts / splits_];
  const int64_t from = (group.begin / kSplit + split) * kSplit, end = std::min<int64_t>(from + kSplit, group.end);
  const int64_t first = std::max(from, group.begin / kKvBlock * kKvBlock) / kKvBlock;
  const int queries = group.count * each;
  const int64_t last = std::max(first, (end + kKvBlock - 1) / kKvBlock), whole = std::clamp(group.tail, first, last);
  const int blocks = static_cast<int>(whole - first);
  const Cache kv = cache(s, group.slot);
  for (int head = first_head; head < first_head + heads; ++head) {
    float* part = partial(s, group, head, split);
    float* largest = part + size_t(queries) * dim_;
    std::memset(part, 0, size_t(queries) * partial_stride(dim_) * sizeof(float));
    std::fill_n(largest, queries, kHidden);
  }
  // Few queries follow the order of memory; of many, what is summed of one head stays in the nearest cache.
  const bool by_block = queries <= kMaxQueries;
  const auto head_of = [&](int i) { return first_head + (by_block ? i % heads : i / blocks); };
  const auto block_of = [&](int i) { return first + (by_block ? i / heads : i % blocks); };
  for (int i = 0; i < heads * blocks; ++i) {
    const int head = head_of(i);
    const int64_t block = block_of(i);
    const int there = static_cast<int>(std::min<int64_t>(kKvBlock, end - block * kKvBlock));
    // the processor prefetches a stream automatically, but not its next piece elsewhere in memory
    const uint8_t* here = kv.keys(block, s.layer, head);
    const uint8_t* next = i + 1 < heads * blocks ? kv.keys(block_of(i + 1), s.layer, head_of(i + 1))
                          : whole < last         ? kv.keys(whole, s.layer, first_head)
                          : end < group.end      ? kv.keys(end / kKvBlock, s.layer, first_head)
                                                 : here;
    for (int q = 0; q < queries; q += kMaxQueries)
      attend_block(s, group, kv, head, split, block, there, q, std::min(kMaxQueries, queries - q), q ? 0 : next - here,
                   nullptr);
  }
  for (int head = first_head; head < first_head + heads && whole < last; ++head)
    attend_tail(s, group, kv, head, split, whole, end);
  if (splits_ == 1)
    for (int row = 0; row < group.count; ++row)
      for (int head = first_head; head < first_head + heads; ++head) merge(s, (group.first + row) * s.kv + head);
}

// One block of one KV head, up to 8 queries: scores, then the running softmax and the values they weigh.
void Pass::attend_block(const Step& s, const Group& group, const Cache& kv, int head, int split, int64_t block,
                        int there, int first, int queries, ptrdiff_t ahead, const Tail* tail) const {
  const int tokens = round_up(there, 32);
  const int64_t token = block * kKvBlock;
  const KvFormat format = key_format(s);
  const Query* wanted = queries_ + query_at(s, head, group.first) + first;
  alignas(64) float scores[kMaxQueries][kKvBlock];
  k_.score(format, read_codes(s) ? kv.codes(block, s.layer, head) : kv.keys(block, s.layer, head), dim_, 0,
           tokens / kTile, wanted, queries, scores[0], kKvBlock, ahead);
  if (reads_recent(s)) recent_scores(s, group, head, token, tokens, first, queries, scores[0]);
  for (int i = 0; i < queries && s.cap > 0; ++i) k_.softcap(scores[i], tokens, s.cap);
  if (token < group.open || token + tokens > group.shut) hide(s, group, first, queries, token, tokens, tail, scores[0]);
  if (s.relative >= 0) relate(s, group, head, first, queries, token, tokens, scores[0]);
  const int all = group.count * (s.heads / s.kv);
  float* part = partial(s, group, head, split);
  float *values = part + size_t(first) * dim_, *largest = part + size_t(all) * dim_ + first, *sum = largest + all;
  float most[kMaxQueries], sums[kMaxQueries];
  k_.largest(scores[0], kKvBlock, tokens, queries, most);
  for (int i = 0; i < queries; ++i) {
    const float before = largest[i];
    largest[i] = std::max(most[i], before);       // in this order a NaN of the block stays
    if (largest[i] > before && before > kSeen) {  // what was summed so far counts less
      alignas(64) float shrink[kTile];
      std::fill(shrink, shrink + kTile, before);
      k_.exponentials(shrink, kTile, kTile, 1, &largest[i], sums);
      sum[i] *= shrink[0];
      k_.scale(values + size_t(i) * dim_, dim_, shrink[0]);
    }
    most[i] = largest[i] <= kSeen ? HUGE_VALF : largest[i];  // no token is seen, so all weights are 0
  }
  k_.exponentials(scores[0], kKvBlock, tokens, queries, most, sums);
  for (int i = 0; i < queries; ++i) sum[i] += sums[i];
  if (tail)
    weigh_tail(s, group, kv, head, block, there, first, queries, *tail, scores[0], values);
  else
    k_.weigh(layout(s).values, kv.values(block, s.layer, head), dim_, 0, there, scores[0], kKvBlock, queries, values,
             ahead);
}

// Scores of tokens that a row does not see at their index: none, or those of tokens stored out of order.
void Pass::hide(const Step& s, const Group& group, int first, int queries, int64_t from, int tokens, const Tail* tail,
                float* scores) const {
  const int each = s.heads / s.kv;
  const size_t columns = group.tiles.size() * kTile;
  for (int i = 0; i < queries; ++i) {
    const Visible& v = seen(s, group.first + (first + i) / each);
    const int64_t oldest = v.oldest(s.window);
    const int low = static_cast<int>(std::clamp<int64_t>(oldest - from, 0, tokens));
    const int high = static_cast<int>(std::clamp<int64_t>(v.shut(s.after) - from, low, tokens));
    if (low == 0 && high == tokens) continue;
    float* row = scores + size_t(i) * kKvBlock;
    std::fill(row, row + low, kHidden);
    std::fill(row + high, row + tokens, kHidden);
    for (int64_t token = std::max(from, v.high); tail && token < std::min(from + tokens, v.end()); ++token) {
      const Visible::Token& seen = v.beyond[token - v.high];
      if (seen.position < oldest) continue;
      const bool recent = token < in_.layout.sinks || token > v.position - in_.layout.window;
      row[token - from] = (tail->exact && recent ? tail->exact : tail->scores)[(first + i) * columns + seen.column];
    }
  }
}

// Adds to scores of tokens [from, from + tokens) what their distance from each row gives at this KV head's heads.
void Pass::relate(const Step& s, const Group& group, int kv_head, int first, int queries, int64_t from, int tokens,
                  float* scores) const {
  const int each = s.heads / s.kv;
  for (int i = 0; i < queries; ++i, scores += kKvBlock) {
    const float* line = vector(s.relative) + size_t(kv_head * each + (first + i) % each) * s.n;
    const int64_t start = from - scratch_.visible[group.first + (first + i) / each].position + s.at;  // of token `from`
    const int low = static_cast<int>(std::clamp<int64_t>(-start, 0, tokens));
    const int high = static_cast<int>(std::clamp<int64_t>(s.n - start, low, tokens));
    for (int t = 0; t < low; ++t) scores[t] += line[0];
    if (low < high) k_.add(scores + low, line + start + low, high - low);
    for (int t = high; t < tokens; ++t) scores[t] += line[s.n - 1];
  }
}

// Scores of the newest and the first tokens again, from their exact keys.
void Pass::recent_scores(const Step& s, const Group& group, int kv_head, int64_t from, int tokens, int first,
                         int queries, float* scores) const {
  const int each = s.heads / s.kv;
  const KvLayout& layout = in_.layout;
  const auto* exact = reinterpret_cast<const uint8_t*>(cache(group.slot).recent(s.layer, kv_head));
  const Query* wanted = queries_ + query_at(s, kv_head, group.first) + first;
  int64_t oldest[kMaxQueries], least = INT64_MAX;
  for (int i = 0; i < queries; ++i) {
    oldest[i] = scratch_.visible[group.first + (first + i) / each].position - layout.window + 1;
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
  const Group& group =
      *std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return row < g.first + g.count; });
  const int all = group.count * each;
  const size_t stride = size_t(all) * partial_stride(dim_);  // from split to split
  thread_local std::vector<float> weights;
  const int padded = round_up(splits_ + 1, kTile);
  weights.resize(padded);
  alignas(64) float value[kMaxHeadDim];
  for (int i = 0; i < each; ++i) {
    const int query = (row - group.first) * each + i;
    const float* values = partial(s, group, kv_head, 0) + size_t(query) * dim_;
    const float* most = partial(s, group, kv_head, 0) + size_t(all) * dim_ + query;
    for (int j = 0; j < padded; ++j) weights[j] = j < splits_ ? most[j * stride] : kHidden;
    if (s.sinks >= 0) weights[splits_] = vector(s.sinks)[kv_head * each + i];
    float largest, sum = 0;
    k_.largest(weights.data(), 0, padded, 1, &largest);
    k_.exponentials(weights.data(), 0, padded, 1, &largest, &sum);
    std::memset(value, 0, size_t(dim_) * 4);
    sum = s.sinks >= 0 ? weights[splits_] : 0.f;
    for (int j = 0; j < splits_; ++j) {
      if (weights[j] == 0) continue;
      sum = fused(most[j * stride + all], weights[j], sum);
      k_.accumulate(value, values + j * stride, dim_, weights[j]);
    }
    k_.scale(value, dim_, 1.f / sum);
    std::memcpy(floats(s.out) + (size_t(row) * s.heads + kv_head * each + i) * s.dim, value, size_t(s.dim) * 4);
  }
}

}  // namespace edgespec
