// Cross-attention caches of a model: which source each holds, and how many slots read it.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "visible.h"

namespace edgespec {

// Each has a place of the same size in the owner's memory.  A pass fills it, and it is never written again.  One that
// no slot reads stays for the next request of its source, until another source needs its place.  Idle slots are closed
// by other threads.
class SourcePool {
 public:
  // most: places.  size: bytes of a place.
  SourcePool(int64_t most, int64_t size) : size_(size), places_(static_cast<size_t>(most)) {}

  void move(uint8_t* memory, int64_t places);  // to a larger memory

  // The place of a source that is filled, which is now the last one that was used; -1: none is.
  int64_t find(const std::string& digest);
  // A place to fill with a source of `rows` rows: a free one, or the one that was used least recently.  At or above the
  // places that there is memory for: nothing has changed, and it expects memory for that one, and another call.
  int64_t take(const std::string& digest, int64_t rows);
  void filled(int64_t place) {
    change(place, [](Place& one) { one.filled = true; });
  }
  void drop(int64_t place);  // it could not be filled
  void hold(int64_t place) {
    change(place, [](Place& one) { ++one.users; });
  }
  void release(int64_t place) {
    change(place, [](Place& one) { --one.users; });
  }
  // Forgets sources that no slot reads but the `most` used last; their memory goes back to the system.
  void shrink(int64_t most);

  int64_t rows(int64_t place) const;  // of a source that is filled, else 0

 private:
  struct Place {
    std::string digest;
    int64_t rows = 0, users = 0;
    uint64_t used = 0;  // when it was used last; 0: it is free
    bool filled = false;

    bool idle() const { return used && filled && !users; }
  };

  template <class Change>
  void change(int64_t place, Change made) {
    const std::lock_guard<std::mutex> lock(mutex_);
    made(places_[static_cast<size_t>(place)]);
  }
  std::vector<size_t> idle() const;  // places, the least recently used first
  void forget(size_t place);

  const int64_t size_;
  mutable std::mutex mutex_;
  uint8_t* memory_ = nullptr;
  size_t count_ = 0;  // places that there is memory for
  uint64_t now_ = 0;
  std::vector<Place> places_;
};

}  // namespace edgespec

// For Python: a function that can fail returns a number below 0, and edgespec_error() says why.
EDGESPEC_EXPORT edgespec::SourcePool* edgespec_sources_open(int64_t most, int64_t size);
EDGESPEC_EXPORT void edgespec_sources_close(edgespec::SourcePool* pool);
EDGESPEC_EXPORT int64_t edgespec_sources_move(edgespec::SourcePool* pool, uint8_t* memory, int64_t places);
EDGESPEC_EXPORT int64_t edgespec_sources_find(edgespec::SourcePool* pool, const char* digest, int64_t length);
EDGESPEC_EXPORT int64_t edgespec_sources_take(edgespec::SourcePool* pool, const char* digest, int64_t length,
                                              int64_t rows);
EDGESPEC_EXPORT void edgespec_sources_filled(edgespec::SourcePool* pool, int64_t place);
EDGESPEC_EXPORT void edgespec_sources_drop(edgespec::SourcePool* pool, int64_t place);
EDGESPEC_EXPORT void edgespec_sources_hold(edgespec::SourcePool* pool, int64_t place);
EDGESPEC_EXPORT void edgespec_sources_release(edgespec::SourcePool* pool, int64_t place);
EDGESPEC_EXPORT int64_t edgespec_sources_shrink(edgespec::SourcePool* pool, int64_t most);
EDGESPEC_EXPORT int64_t edgespec_sources_rows(const edgespec::SourcePool* pool, int64_t place);
