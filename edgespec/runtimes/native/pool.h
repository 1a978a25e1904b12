// Blocks of keys and values that the slots of a batch refer to by number (layout.h): common beginnings of texts are
// stored once, and a block is copied where one of several slots writes into it.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "visible.h"

namespace edgespec {

// The memory is its owner's, who makes a larger one when a call asks for it: [heads and tables of slots][blocks].
// Memory of blocks that no slot refers to goes back to the system.  Idle slots are closed by other threads.
class BlockPool {
 public:
  // entries: maximum blocks of a slot.  head, block: their bytes.
  BlockPool(int64_t width, int64_t entries, int64_t head, int64_t block);

  int64_t most() const { return width_ * entries_; }  // blocks
  int64_t bytes(int64_t blocks) const;                // of a memory, in whole slots
  int64_t slot_bytes() const { return slot_bytes_; }  // of a head and its table
  void move(uint8_t* memory, int64_t blocks);         // to a larger memory, which is zero
  int64_t blocks() const;                             // that there is memory for

  // Makes blocks for tokens up to `end`, and copies of those from token `first` on that other slots read -> 0, or how
  // many blocks there must be memory for, and another call.
  int64_t own(int64_t slot, int64_t first, int64_t end);
  // Frees the blocks after the first `tokens` tokens.
  void trim(int64_t slot, int64_t tokens);
  // Lets a slot hold the first tokens of another one: it refers to the same whole blocks, and copies the rest and the
  // head -> as own().
  int64_t share(int64_t slot, int64_t other, int64_t tokens);
  // Makes a slot as it was at first.
  void clear(int64_t slot);

  int64_t used(int64_t slot) const;      // blocks
  int64_t share_of(int64_t slot) const;  // bytes of its blocks, and its part of those that several slots refer to
  std::vector<int32_t> counts() const;   // slots that refer to each block that was ever in use

 private:
  struct Slot {
    int64_t used = 0;    // blocks
    int64_t shared = 0;  // blocks from here on belong to this slot alone
  };

  uint8_t* head(int64_t slot) const { return memory_ + slot * slot_bytes_; }
  int32_t* table(int64_t slot) const { return reinterpret_cast<int32_t*>(head(slot) + head_); }
  uint8_t* block(int64_t number) const { return memory_ + width_ * slot_bytes_ + number * block_; }
  int64_t own_locked(int64_t slot, int64_t first, int64_t end);
  int32_t take();  // -1: there is no memory for one more
  void release(int32_t number);
  void trim_locked(int64_t slot, int64_t tokens);

  const int64_t width_, entries_, head_, block_, slot_bytes_;
  mutable std::mutex mutex_;
  uint8_t* memory_ = nullptr;
  int64_t blocks_ = 0;
  std::vector<int32_t> counts_, free_;  // free_: a heap: the lowest is taken, so that used blocks stay close together
  std::vector<Slot> slots_;
};

}  // namespace edgespec

// For Python: a function that can fail returns a number below 0, and edgespec_error() says why.
EDGESPEC_EXPORT edgespec::BlockPool* edgespec_pool_open(int64_t width, int64_t entries, int64_t head, int64_t block);
EDGESPEC_EXPORT void edgespec_pool_close(edgespec::BlockPool* pool);
EDGESPEC_EXPORT int64_t edgespec_pool_bytes(const edgespec::BlockPool* pool, int64_t blocks);
EDGESPEC_EXPORT int64_t edgespec_pool_slot_bytes(const edgespec::BlockPool* pool);
EDGESPEC_EXPORT int64_t edgespec_pool_move(edgespec::BlockPool* pool, uint8_t* memory, int64_t blocks);
EDGESPEC_EXPORT int64_t edgespec_pool_blocks(const edgespec::BlockPool* pool);
EDGESPEC_EXPORT int64_t edgespec_pool_own(edgespec::BlockPool* pool, int64_t slot, int64_t first, int64_t end);
EDGESPEC_EXPORT int64_t edgespec_pool_trim(edgespec::BlockPool* pool, int64_t slot, int64_t tokens);
EDGESPEC_EXPORT int64_t edgespec_pool_share(edgespec::BlockPool* pool, int64_t slot, int64_t other, int64_t tokens);
EDGESPEC_EXPORT int64_t edgespec_pool_clear(edgespec::BlockPool* pool, int64_t slot);
EDGESPEC_EXPORT int64_t edgespec_pool_used(const edgespec::BlockPool* pool, int64_t slot);
EDGESPEC_EXPORT int64_t edgespec_pool_share_of(const edgespec::BlockPool* pool, int64_t slot);
EDGESPEC_EXPORT int64_t edgespec_pool_counts(const edgespec::BlockPool* pool, int32_t* out, int64_t room);
