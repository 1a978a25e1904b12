#include "target.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "mapping.h"

namespace edgespec {

void Reading::check() const {
  if (cancelled && cancelled->load(std::memory_order_relaxed)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
}

// Runs what changes the text; a pass that failed in its middle may have emptied it.
template <class Work>
auto Target::timed(Work work) {
  struct Timer {
    uint64_t& total;
    std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
    ~Timer() { total += uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun).count()); }
  } timer{nanoseconds_};
  try {
    return work();
  } catch (...) {
    tokens_.resize(std::min<size_t>(tokens_.size(), size_t(left())));
    throw;
  }
}

int64_t Target::follow(const std::vector<int64_t>& other, int64_t count, int64_t same) {
  const int64_t most = std::min<int64_t>(int64_t(tokens_.size()), count);
  same = std::min(same, most);
  while (same < most && tokens_[size_t(same)] == other[size_t(same)]) ++same;
  crop(same);
  return length();
}

void Target::prefill(const std::vector<int64_t>& text, int64_t from, int64_t to, const Reading& reading,
                     const States& states) {
  if (from >= to) return;
  check_tokens(text.data() + from, to - from);
  rows_.clear();
  for (int64_t at = from, count; at < to; at += count) {
    reading.check();
    if (reading.progress && reading.progress(at, to)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
    count = std::min<int64_t>(kLongestPass, to - at);
    const edgespec_result found =
        timed([&] { return read_chunk(text.data() + at, static_cast<int32_t>(count), bool(states)); });
    tokens_.insert(tokens_.end(), text.begin() + at, text.begin() + at + count);
    if (states) states(at, found);
  }
  if (reading.progress && reading.progress(to, to)) throw Failure(EDGESPEC_CANCELLED, "cancelled");
}

edgespec_result Target::run(const TextRows& rows) {
  rows_.clear();
  const edgespec_result found = timed([&] { return run_pass(rows); });
  if (!rows.draft) rows_.assign(rows.tokens, rows.tokens + rows.count);
  return found;
}

void Target::keep_all() {
  std::vector<int32_t> rows(rows_.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
  keep(rows.data(), static_cast<int32_t>(rows.size()));
}

void Target::keep(const int32_t* rows, int32_t count) {
  keep_rows(rows, count);
  for (int32_t i = 0; i < count; ++i) tokens_.push_back(rows_[size_t(rows[i])]);
  rows_.clear();
}

void Target::crop(int64_t length) {
  rows_.clear();
  tokens_.resize(size_t(crop_cache(std::min(length, int64_t(tokens_.size())))));
}

// ---- in a cache of native operators
// ---------------------------------------------------------------------------------

NativeTarget::NativeTarget(edgespec_model& model, int64_t context, int64_t extra_rows, int32_t attention,
                           bool revocable)
    : Target(context) {
  const int status = edgespec_cache_open(&model, 1, context + extra_rows, attention, &cache_);
  if (status == EDGESPEC_NO_MEMORY) throw std::bad_alloc();
  if (status) throw std::invalid_argument(edgespec_error());
  cache_->revocable = revocable;
}

std::pair<uint64_t, uint64_t> NativeTarget::sizes(edgespec_model& model, int32_t attention) {
  const NativeTarget least(model, 1, 0, attention, false);
  const KvLayout& layout = least.cache_->layout;
  return {layout.header_bytes() + 128, layout.block_bytes()};  // and what aligns it
}

// Runs one pass of the model at a time.
template <class Work>
auto NativeTarget::exclusive(Work work) {
  const std::lock_guard<std::mutex> lock(cache_->model.mutex);
  return work();
}

edgespec_result NativeTarget::run_pass(const TextRows& rows) {
  return exclusive([&] { return run_rows(*cache_, 0, rows); });
}

edgespec_result NativeTarget::read_chunk(const int64_t* tokens, int32_t count, bool auxiliary) {
  return exclusive([&] { return edgespec::read_chunk(*cache_, 0, tokens, count, auxiliary); });
}

void NativeTarget::check_tokens(const int64_t* tokens, int64_t count) { check_text(*cache_, 0, tokens, count); }

void NativeTarget::keep_rows(const int32_t* rows, int32_t count) {
  const std::vector<int64_t> wide(rows, rows + count);
  cache_->slots[0].text.keep(wide.data(), count, cache_->slots[0].first);
}

int64_t NativeTarget::crop_cache(int64_t length) {
  Text& text = cache_->slots[0].text;
  text.forget_rows();
  return text.crop(length);
}

void NativeTarget::use_adapter(int number) {
  if (number == cache_->adapter) return;
  crop(0);
  cache_->adapter = number;
}

void NativeTarget::checkpoint() {
  if (cache_->slots[0].text.has_checkpoints() && !cache_->revocable)
    timed([&] { exclusive([&] { keep_states(*cache_, 0); }); });
}

edgespec_result NativeTarget::embed(const int64_t* tokens, int32_t count) {
  return timed([&] { return exclusive([&] { return edgespec::embed(*cache_, tokens, count); }); });
}

edgespec_result NativeTarget::run_heads(int32_t group, const float* hidden, int32_t top) {
  return timed([&] { return exclusive([&] { return edgespec::run_heads(*cache_, group, hidden, 1, top); }); });
}

// ---- on the disk
// -----------------------------------------------------------------------------------------------------

namespace {

// A file is this, then the key, the tokens, and the slot's memory: states, and blocks up to the last token.
struct SavedHead {
  char magic[8];
  uint64_t version, key, tokens, high_water_mark, bytes;  // key, bytes: sizes
  uint64_t checksum;                                      // of all that follows: it finds damage, and no malice
};
constexpr char kMagic[] = "EDGETEXT";
constexpr uint64_t kSavedVersion = 1;

uint64_t checksum_of(const std::vector<Piece>& pieces) {
  uint64_t sum = 0;
  for (const Piece& piece : pieces) {
    const auto* bytes = static_cast<const uint8_t*>(piece.data);
    for (size_t at = 0; at < piece.size; at += 8) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + at, std::min<size_t>(8, piece.size - at));
      sum = (sum ^ word) * 0x9E3779B97F4A7C15;
      sum ^= sum >> 29;
    }
  }
  return sum;
}

}  // namespace

// Bytes of the slot's memory that `tokens` tokens take.
static size_t bytes_of(const KvLayout& layout, uint64_t tokens) {
  return layout.header_bytes() + size_t((tokens + kKvBlock - 1) / kKvBlock) * layout.block_bytes();
}

void NativeTarget::save(const std::string& path, const std::string& key) {
  Text& text = cache_->slots[0].text;
  text.forget_rows();
  rows_.clear();
  timed([&] { exclusive([&] { settle(*cache_, 0); }); });
  SavedHead head{{}, kSavedVersion, key.size(), tokens_.size(), uint64_t(text.high_water_mark()), 0, 0};
  std::memcpy(head.magic, kMagic, sizeof head.magic);
  head.bytes = bytes_of(cache_->layout, tokens_.size());
  const std::vector<Piece> pieces{
      {key.data(), key.size()}, {tokens_.data(), 8 * tokens_.size()}, {cache_->base, size_t(head.bytes)}};
  head.checksum = checksum_of(pieces);
  write_file(path, {{&head, sizeof head}, pieces[0], pieces[1], pieces[2]});
}

void NativeTarget::restore(const std::string& path, const std::string& key) {
  const Mapping file(path);
  SavedHead head;
  if (file.size() < sizeof head) refuse(path + ": not a saved text");
  std::memcpy(&head, file.data(), sizeof head);
  if (std::memcmp(head.magic, kMagic, sizeof head.magic)) refuse(path + ": not a saved text");
  if (head.version != kSavedVersion) refuse(path + ": saved by another version");
  const uint64_t left = file.size() - sizeof head, most = uint64_t(context_);
  if (head.key > left || head.tokens > left / 8 || head.bytes > left || head.key + 8 * head.tokens + head.bytes != left)
    refuse(path + ": truncated or damaged");
  const uint8_t *name = file.data() + sizeof head, *tokens = name + head.key, *memory = tokens + 8 * head.tokens;
  if (head.key != key.size() || std::memcmp(name, key.data(), key.size())) refuse(path + ": saved with another model");
  const std::vector<Piece> pieces{
      {name, size_t(head.key)}, {tokens, size_t(8 * head.tokens)}, {memory, size_t(head.bytes)}};
  if (checksum_of(pieces) != head.checksum) refuse(path + ": damaged");
  if (head.tokens >= most || head.high_water_mark > uint64_t(cache_->layout.capacity(cache_->each)) ||
      head.high_water_mark < head.tokens || head.bytes != bytes_of(cache_->layout, head.tokens))
    refuse(path + ": " + std::to_string(head.tokens) + " tokens do not fit this session");
  std::vector<int64_t> saved(size_t(head.tokens));
  std::memcpy(saved.data(), tokens, 8 * saved.size());
  for (int64_t token : saved)
    if (token < 0 || token >= vocab()) refuse(path + ": a token outside the vocabulary");
  std::memcpy(cache_->base, memory, size_t(head.bytes));
  Text& text = cache_->slots[0].text;
  text.hold(int64_t(saved.size()), int64_t(head.high_water_mark));
  tokens_ = std::move(saved);
  rows_.clear();
  const auto held = text.held();
  if (text.delta() && (held.first != text.length() || held.second != text.length())) {
    text.clear();
    tokens_.clear();
    refuse(path + ": its states are of another text");
  }
}

}  // namespace edgespec
