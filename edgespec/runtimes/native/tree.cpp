// Attention of rows whose ancestors are stored out of order, as in a tree (Visible::beyond).  The result has the same
// bits as if they were in order.
//
// A key's score does not depend on its location.  So the scores of such tokens are computed once for all rows, and
// placed in order among a row's scores.  Values are added up in order, int8 ones 32 together.  So the values of such
// tokens, and those before them of the same 32, are copied in order, once for all rows of a path.
#include <algorithm>
#include <cstring>

#include "pass.h"

namespace edgespec {
namespace {

constexpr int kTogether = 32;  // tokens whose values are quantized together

}  // namespace

// Finds the paths of a group's rows, and the cache tiles of tokens on them that are stored out of order.
void Pass::find_tail(Group& group) {
  const int64_t* parents = plan(4);
  auto& tiles = group.tiles;
  for (int r = group.first + group.count - 1; r >= group.first; --r) {  // children before their parents
    const Visible& v = scratch_.visible[r];
    if (v.beyond.empty()) {
      path_[r] = -1;
      continue;
    }
    if (path_[r] < 0) {
      path_[r] = static_cast<int>(group.leaves.size());
      group.leaves.push_back(r);
      for (const Visible::Token& token : v.beyond) tiles.push_back(token.place / kTile);
    }
    if (parents[r] >= group.first && path_[parents[r]] < 0) path_[parents[r]] = path_[r];
  }
  std::sort(tiles.begin(), tiles.end());
  tiles.erase(std::unique(tiles.begin(), tiles.end()), tiles.end());
  for (int r = group.first; r < group.first + group.count; ++r)
    for (Visible::Token& token : scratch_.visible[r].beyond) {
      const auto tile = std::lower_bound(tiles.begin(), tiles.end(), token.place / kTile) - tiles.begin();
      token.column = static_cast<int>(tile * kTile + token.place % kTile);
    }
}

// Attends to the blocks from `first` to token `end` of one KV head, where some rows see tokens stored out of order.
void Pass::attend_tail(const Step& s, const Group& group, const Cache& kv, int head, int split, int64_t first,
                       int64_t end) const {
  thread_local Memory scores, values;
  const int queries = group.count * (s.heads / s.kv);
  const size_t columns = group.tiles.size() * kTile;
  const int64_t blocks = (end + kKvBlock - 1) / kKvBlock - first;
  float* found = static_cast<float*>(scores.get(2 * queries * columns * sizeof(float)));
  float* exact = reads_recent(s) ? found + queries * columns : nullptr;
  auto* laid = static_cast<uint8_t*>(values.get(group.leaves.size() * blocks * value_bytes(in_.layout.values, dim_)));
  score_tail(s, group, kv, head, false, found);
  if (exact) score_tail(s, group, kv, head, true, exact);
  lay_values(s, group, kv, head, first, blocks, laid);
  const Tail tail{found, exact, laid, first, blocks};
  for (int64_t block = first; block < first + blocks; ++block) {
    const int there = static_cast<int>(std::min<int64_t>(kKvBlock, end - block * kKvBlock));
    for (int q = 0; q < queries; q += kMaxQueries)
      attend_block(s, group, kv, head, split, block, there, q, std::min(kMaxQueries, queries - q), 0, &tail);
  }
}

// Scores of all queries of a group with the tiles of keys stored out of order, [queries][columns].
void Pass::score_tail(const Step& s, const Group& group, const Cache& kv, int head, bool exact, float* scores) const {
  const int queries = group.count * (s.heads / s.kv);
  const size_t columns = group.tiles.size() * kTile;
  const KvFormat format = exact ? kKvF16 : key_format(s);
  const bool whole = format == kKvNomad1 || format == kKvNomad2;  // of which nothing less than a block is scored
  const Query* wanted = queries_ + query_at(s, head, group.first);
  alignas(64) float found[kMaxQueries][kKvBlock];
  for (int q = 0; q < queries; q += kMaxQueries) {
    const int some = std::min(kMaxQueries, queries - q);
    int64_t held = -1;
    for (size_t i = 0; i < group.tiles.size(); ++i) {
      const int64_t place = group.tiles[i] * kTile, block = place / kKvBlock;
      const int tile = static_cast<int>(place % kKvBlock / kTile);
      float* out = scores + q * columns + i * kTile;
      if (exact) {
        const auto* recent = reinterpret_cast<const uint8_t*>(kv.recent(s.layer, head));
        const int64_t row = kSinkRows + place % in_.layout.ring;
        k_.score(format, recent, dim_, static_cast<int>(row / kTile), 1, wanted + q, some, out, columns, 0);
        continue;
      }
      const uint8_t* keys = in_.read_codes ? kv.codes(block, s.layer, head) : kv.keys(block, s.layer, head);
      if (!whole) {
        k_.score(format, keys, dim_, tile, 1, wanted + q, some, out, columns, 0);
        continue;
      }
      if (block != held) k_.score(format, keys, dim_, 0, kKvBlock / kTile, wanted + q, some, found[0], kKvBlock, 0);
      held = block;
      for (int j = 0; j < some; ++j) std::memcpy(out + j * columns, found[j] + tile * kTile, kTile * sizeof(float));
    }
  }
  for (int q = 0; q < queries && s.cap > 0; ++q) k_.softcap(scores + q * columns, static_cast<int>(columns), s.cap);
}

// Values of each path as if all were in order, [leaves][blocks], from the first 32 that contain one out of order.
void Pass::lay_values(const Step& s, const Group& group, const Cache& kv, int head, int64_t begin, int64_t blocks,
                      uint8_t* out) const {
  const size_t size = value_bytes(in_.layout.values, dim_);
  for (const int leaf : group.leaves) {
    const Visible& v = scratch_.visible[leaf];
    const int64_t first = v.high / kTogether * kTogether;
    for (int64_t block = begin; block < begin + blocks; ++block, out += size) {
      const int64_t from = block * kKvBlock, end = from + kKvBlock;
      const int low = static_cast<int>(std::clamp<int64_t>(first - from, 0, kKvBlock));
      const int high = static_cast<int>(std::clamp<int64_t>(v.high - from, low, kKvBlock));
      if (low < high) kv.copy_values(dim_, kv.values(block, s.layer, head), low, high, out);
      for (int64_t token = std::max(from, v.high); token < std::min(end, v.end()); ++token) {
        const int64_t place = v.beyond[token - v.high].place;
        kv.move_value(dim_, kv.values(place / kKvBlock, s.layer, head), static_cast<int>(place % kKvBlock), out,
                      static_cast<int>(token - from));
      }
    }
  }
}

// Weighs the values of a block: first the values that all these queries read in place, then the rest, path by path.
void Pass::weigh_tail(const Step& s, const Group& group, const Cache& kv, int head, int64_t block, int there, int first,
                      int queries, const Tail& tail, const float* p, float* out) const {
  const int each = s.heads / s.kv;
  const int64_t from = block * kKvBlock;
  const KvFormat format = in_.layout.values;
  const size_t size = value_bytes(format, dim_);
  const uint8_t* values = kv.values(block, s.layer, head);
  const auto path = [&](int i) { return path_[group.first + (first + i) / each]; };
  const auto leaf = [&](int i) -> const Visible& { return scratch_.visible[group.leaves[path(i)]]; };
  const auto kept = [&](int i) {  // tokens of the block that are read in place
    return path(i) < 0 ? there
                       : static_cast<int>(std::clamp<int64_t>(leaf(i).high / kTogether * kTogether - from, 0, there));
  };
  int all = there;
  for (int i = 0; i < queries; ++i) all = std::min(all, kept(i));
  if (all) k_.weigh(format, values, dim_, 0, all, p, kKvBlock, queries, out, 0);
  for (int i = 0, next; i < queries; i = next) {
    for (next = i + 1; next < queries && path(next) == path(i);) ++next;
    const float* weights = p + size_t(i) * kKvBlock;
    float* to = out + size_t(i) * dim_;
    const int here = kept(i);
    if (all < here) k_.weigh(format, values, dim_, all, here - all, weights + all, kKvBlock, next - i, to, 0);
    if (path(i) < 0) continue;
    const uint8_t* laid = tail.values + (size_t(path(i)) * tail.blocks + (block - tail.begin)) * size;
    const int end = static_cast<int>(std::min<int64_t>(there, leaf(i).end() - from));
    if (here < end) k_.weigh(format, laid, dim_, here, end - here, weights + here, kKvBlock, next - i, to, 0);
  }
}

}  // namespace edgespec
