#include "pool.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "constants.h"
#include "guarded.h"
#include "pages.h"

namespace edgespec {
namespace {

constexpr int64_t kAligned = 64;              // bytes
constexpr int64_t kPiece = int64_t(1) << 24;  // bytes that are copied together

int64_t rounded(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

BlockPool::BlockPool(int64_t width, int64_t entries, int64_t head, int64_t block)
    : width_(width),
      entries_(entries),
      head_(head),
      block_(block),
      slot_bytes_(rounded(head + 4 * entries, kAligned)),
      slots_(static_cast<size_t>(width)) {}

int64_t BlockPool::bytes(int64_t blocks) const {
  return width_ * (slot_bytes_ + rounded((blocks * block_ + width_ - 1) / width_, kAligned));
}

int64_t BlockPool::blocks() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return blocks_;
}

void BlockPool::move(uint8_t* memory, int64_t blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (memory_) {
    const int64_t used = width_ * slot_bytes_ + static_cast<int64_t>(counts_.size()) * block_;
    for (int64_t first = 0; first < used; first += kPiece) {  // so that no more than a piece is in memory twice
      const int64_t last = std::min(first + kPiece, used);
      std::memcpy(memory + first, memory_ + first, static_cast<size_t>(last - first));
      give_back(memory_ + first, memory_ + last);
    }
  }
  const bool fresh = !memory_;
  memory_ = memory;
  blocks_ = blocks;
  for (int64_t slot = 0; fresh && slot < width_; ++slot) std::fill_n(table(slot), entries_, -1);  // passes refuse it
}

int32_t BlockPool::take() {
  if (free_.empty()) {
    if (static_cast<int64_t>(counts_.size()) == blocks_) return -1;
    counts_.push_back(1);
    free_.reserve(counts_.capacity());  // so that nothing fails where a block is freed
    return static_cast<int32_t>(counts_.size() - 1);
  }
  std::pop_heap(free_.begin(), free_.end(), std::greater<>());
  const int32_t number = free_.back();
  free_.pop_back();
  counts_[static_cast<size_t>(number)] = 1;
  return number;
}

void BlockPool::release(int32_t number) {
  if (--counts_[static_cast<size_t>(number)]) return;
  free_.push_back(number);
  std::push_heap(free_.begin(), free_.end(), std::greater<>());
  give_back(block(number), block(number + 1));
}

int64_t BlockPool::own(int64_t slot, int64_t first, int64_t end) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return own_locked(slot, first, end);
}

int64_t BlockPool::own_locked(int64_t slot, int64_t first, int64_t end) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  int32_t* const numbers = table(slot);
  const int64_t at = first / kKvBlock, need = (end + kKvBlock - 1) / kKvBlock;
  if (need > entries_) refuse("a text of " + std::to_string(end) + " tokens is longer than a slot");
  while (s.shared > at) {  // from the last one on: what is copied stays so if there is no memory for the rest
    const int64_t last = s.shared - 1;
    if (last < s.used && counts_[static_cast<size_t>(numbers[last])] > 1) {
      const int32_t made = take();
      if (made < 0) return blocks_ + 1;
      std::memcpy(block(made), block(numbers[last]), static_cast<size_t>(block_));
      release(numbers[last]);
      numbers[last] = made;
    }
    s.shared = last;
  }
  for (; s.used < need; ++s.used) {
    const int32_t made = take();
    if (made < 0) return blocks_ + need - s.used;
    numbers[s.used] = made;
  }
  return 0;
}

void BlockPool::trim(int64_t slot, int64_t tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  trim_locked(slot, tokens);
}

void BlockPool::trim_locked(int64_t slot, int64_t tokens) {
  Slot& s = slots_[static_cast<size_t>(slot)];
  for (const int64_t kept = (tokens + kKvBlock - 1) / kKvBlock; s.used > kept; --s.used) {
    release(table(slot)[s.used - 1]);
    table(slot)[s.used - 1] = -1;
  }
  s.shared = std::min(s.shared, s.used);
}

int64_t BlockPool::share(int64_t slot, int64_t other, int64_t tokens) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Slot &s = slots_[static_cast<size_t>(slot)], &o = slots_[static_cast<size_t>(other)];
  const int64_t whole = tokens / kKvBlock;
  const int32_t* const numbers = table(other);
  for (int64_t i = 0; i < whole; ++i) ++counts_[static_cast<size_t>(numbers[i])];
  trim_locked(slot, 0);
  std::copy_n(numbers, whole, table(slot));
  s.used = s.shared = whole;
  o.shared = std::max(o.shared, whole);
  if (const int64_t lacking = own_locked(slot, tokens, tokens)) return lacking;
  if (tokens % kKvBlock) std::memcpy(block(table(slot)[whole]), block(numbers[whole]), static_cast<size_t>(block_));
  std::memcpy(head(slot), head(other), static_cast<size_t>(head_));
  return 0;
}

void BlockPool::clear(int64_t slot) {
  const std::lock_guard<std::mutex> lock(mutex_);
  trim_locked(slot, 0);
  slots_[static_cast<size_t>(slot)] = {};
  std::memset(head(slot), 0, static_cast<size_t>(head_));
  give_back(head(slot), head(slot) + head_);
}

int64_t BlockPool::used(int64_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return slots_[static_cast<size_t>(slot)].used;
}

int64_t BlockPool::share_of(int64_t slot) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  double blocks = 0;
  for (int64_t i = 0; i < slots_[static_cast<size_t>(slot)].used; ++i)
    blocks += 1. / counts_[static_cast<size_t>(table(slot)[i])];
  return std::llround(blocks * static_cast<double>(block_));
}

std::vector<int32_t> BlockPool::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

}  // namespace edgespec

// ---- for Python ----------------------------------------------------------------------------------------------------

using edgespec::answered;
using edgespec::BlockPool;

BlockPool* edgespec_pool_open(int64_t width, int64_t entries, int64_t head, int64_t block) {
  BlockPool* made = nullptr;
  edgespec::guarded([&] { made = new BlockPool(width, entries, head, block); });
  return made;
}

void edgespec_pool_close(BlockPool* pool) { delete pool; }

int64_t edgespec_pool_bytes(const BlockPool* pool, int64_t blocks) { return pool->bytes(blocks); }

int64_t edgespec_pool_slot_bytes(const BlockPool* pool) { return pool->slot_bytes(); }

int64_t edgespec_pool_move(BlockPool* pool, uint8_t* memory, int64_t blocks) {
  return answered([&] { return pool->move(memory, blocks), 0; });
}

int64_t edgespec_pool_blocks(const BlockPool* pool) { return pool->blocks(); }

int64_t edgespec_pool_own(BlockPool* pool, int64_t slot, int64_t first, int64_t end) {
  return answered([&] { return pool->own(slot, first, end); });
}

int64_t edgespec_pool_trim(BlockPool* pool, int64_t slot, int64_t tokens) {
  return answered([&] { return pool->trim(slot, tokens), 0; });
}

int64_t edgespec_pool_share(BlockPool* pool, int64_t slot, int64_t other, int64_t tokens) {
  return answered([&] { return pool->share(slot, other, tokens); });
}

int64_t edgespec_pool_clear(BlockPool* pool, int64_t slot) {
  return answered([&] { return pool->clear(slot), 0; });
}

int64_t edgespec_pool_used(const BlockPool* pool, int64_t slot) { return pool->used(slot); }

int64_t edgespec_pool_share_of(const BlockPool* pool, int64_t slot) { return pool->share_of(slot); }

int64_t edgespec_pool_counts(const BlockPool* pool, int32_t* out, int64_t room) {
  return answered([&] {
    const std::vector<int32_t> found = pool->counts();
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(room)), out);
    return static_cast<int64_t>(found.size());
  });
}
