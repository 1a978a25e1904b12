#include "sources.h"

#include <algorithm>
#include <cstring>

#include "guarded.h"
#include "pages.h"

namespace edgespec {

void SourcePool::move(uint8_t* memory, int64_t places) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (memory_) std::memcpy(memory, memory_, count_ * static_cast<size_t>(size_));
  memory_ = memory;
  count_ = static_cast<size_t>(places);
}

int64_t SourcePool::find(const std::string& digest) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Place& one : places_)
    if (one.used && one.filled && one.digest == digest) {
      one.used = ++now_;
      return &one - places_.data();
    }
  return -1;
}

int64_t SourcePool::take(const std::string& digest, int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto free = std::find_if(places_.begin(), places_.end(), [](const Place& one) { return !one.used; });
  auto place = static_cast<size_t>(free - places_.begin());
  if (free == places_.end()) {
    const std::vector<size_t> found = idle();
    if (found.empty()) refuse("all " + std::to_string(places_.size()) + " memories are in use: close a session first");
    place = found.front();
  } else if (place >= count_) {
    return static_cast<int64_t>(place);
  }
  Place made;
  made.digest = digest;
  made.rows = rows;
  made.used = now_ + 1;
  if (places_[place].used) forget(place);
  ++now_;
  places_[place] = std::move(made);
  return static_cast<int64_t>(place);
}

void SourcePool::drop(int64_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget(static_cast<size_t>(place));
}

void SourcePool::shrink(int64_t most) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::vector<size_t> found = idle();
  for (size_t i = 0; i + static_cast<size_t>(most) < found.size(); ++i) forget(found[i]);
}

int64_t SourcePool::rows(int64_t place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Place& one = places_[static_cast<size_t>(place)];
  return one.filled ? one.rows : 0;
}

std::vector<size_t> SourcePool::idle() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < places_.size(); ++i)
    if (places_[i].idle()) found.push_back(i);
  std::sort(found.begin(), found.end(), [&](size_t a, size_t b) { return places_[a].used < places_[b].used; });
  return found;
}

void SourcePool::forget(size_t place) {
  places_[place] = {};
  uint8_t* const first = memory_ + place * static_cast<size_t>(size_);
  give_back(first, first + size_);
}

}  // namespace edgespec

// ---- for Python ----------------------------------------------------------------------------------------------------

using edgespec::answered;
using edgespec::SourcePool;

SourcePool* edgespec_sources_open(int64_t most, int64_t size) {
  SourcePool* made = nullptr;
  edgespec::guarded([&] { made = new SourcePool(most, size); });
  return made;
}

void edgespec_sources_close(SourcePool* pool) { delete pool; }

int64_t edgespec_sources_move(SourcePool* pool, uint8_t* memory, int64_t places) {
  return answered([&] { return pool->move(memory, places), 0; });
}

int64_t edgespec_sources_find(SourcePool* pool, const char* digest, int64_t length) {
  return answered([&] { return pool->find(std::string(digest, static_cast<size_t>(length))); });
}

int64_t edgespec_sources_take(SourcePool* pool, const char* digest, int64_t length, int64_t rows) {
  return answered([&] { return pool->take(std::string(digest, static_cast<size_t>(length)), rows); });
}

void edgespec_sources_filled(SourcePool* pool, int64_t place) { pool->filled(place); }

void edgespec_sources_drop(SourcePool* pool, int64_t place) { pool->drop(place); }

void edgespec_sources_hold(SourcePool* pool, int64_t place) { pool->hold(place); }

void edgespec_sources_release(SourcePool* pool, int64_t place) { pool->release(place); }

int64_t edgespec_sources_shrink(SourcePool* pool, int64_t most) {
  return answered([&] { return pool->shrink(most), 0; });
}

int64_t edgespec_sources_rows(const SourcePool* pool, int64_t place) { return pool->rows(place); }
