#include "target.h"

#include <algorithm>
#include <chrono>

namespace edgespec {

void Reading::check() const {
  if (cancelled && cancelled->load(std::memory_order_relaxed)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
}

Target::Target(edgespec_model& model, int64_t context, int64_t extra_rows, int32_t attention, bool revocable)
    : context_(context) {
  const int status = edgespec_cache_open(&model, 1, context + extra_rows, attention, &cache_);
  if (status == EDGESPEC_NO_MEMORY) throw std::bad_alloc();
  if (status) throw std::invalid_argument(edgespec_error());
  cache_->revocable = revocable;
}

// Runs what changes the text in its slot, one pass of the model at a time.
template <class Work>
auto Target::exclusive(Work work) {
  struct Timer {
    uint64_t& total;
    std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
    ~Timer() { total += uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun).count()); }
  } timer{nanoseconds_};
  const std::lock_guard<std::mutex> lock(cache_->model.mutex);
  try {
    return work();
  } catch (...) {  // a pass that failed in its middle has emptied the slot
    tokens_.resize(std::min<size_t>(tokens_.size(), size_t(cache_->slots[0].text.length())));
    throw;
  }
}

int64_t Target::follow(const std::vector<int64_t>& other, int64_t count, int64_t same) {
  const int64_t most = std::min<int64_t>(int64_t(tokens_.size()), count);
  same = std::min(same, most);
  while (same < most && tokens_[size_t(same)] == other[size_t(same)]) ++same;
  Text& text = cache_->slots[0].text;
  text.forget_rows();
  rows_.clear();
  same = text.crop(same);
  tokens_.resize(size_t(same));
  return same;
}

void Target::prefill(const std::vector<int64_t>& text, int64_t from, int64_t to, const Reading& reading) {
  if (from >= to) return;
  check_text(*cache_, 0, text.data() + from, to - from);
  rows_.clear();
  for (int64_t at = from, count; at < to; at += count) {
    reading.check();
    if (reading.progress && reading.progress(at, to)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
    count = std::min<int64_t>(kLongestPass, to - at);
    exclusive([&] { read_chunk(*cache_, 0, text.data() + at, static_cast<int>(count)); });
    tokens_.insert(tokens_.end(), text.begin() + at, text.begin() + at + count);
  }
  if (reading.progress && reading.progress(to, to)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
}

void Target::checkpoint() {
  if (cache_->slots[0].text.has_checkpoints() && !cache_->revocable) exclusive([&] { keep_states(*cache_, 0); });
}

edgespec_result Target::run(const TextRows& rows) {
  rows_.clear();
  const edgespec_result found = exclusive([&] { return run_rows(*cache_, 0, rows); });
  if (!rows.draft) rows_.assign(rows.tokens, rows.tokens + rows.count);
  return found;
}

void Target::keep(const int32_t* rows, int32_t count) {
  const std::vector<int64_t> wide(rows, rows + count);
  cache_->slots[0].text.keep(wide.data(), count, cache_->slots[0].first);
  for (int64_t row : wide) tokens_.push_back(rows_[size_t(row)]);
  rows_.clear();
}

}  // namespace edgespec
