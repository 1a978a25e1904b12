#include "books.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "guarded.h"

namespace edgespec {
namespace {

constexpr int64_t kLeastKept = 16;  // tokens: shorter beginnings are read again as fast

}  // namespace

Text::Text(const KvLayout& layout, int taps) : taps_(taps), most_(kCheckpoints) {
  layout_.ring = layout.ring;
  layout_.states = layout.states;
  layout_.state_width = layout.state_width;
  layout_.state_matrix = layout.state_matrix;
}

void Text::hold(int64_t length, int64_t high_water_mark) {
  length_ = certain_ = end_ = length;
  high_water_mark_ = high_water_mark;
  since_ = 0;
  parents_.clear();
  moves_.clear();
  checkpoints_.clear();
}

void Text::clear() {
  hold(0, 0);
  set_held(0);
}

// ---- passes --------------------------------------------------------------------------------------------------------

void Text::plan(const Rows& r, int64_t slot) const {
  const int64_t past = length_ + r.offset;
  int64_t *positions = r.line(kPositions), *slots = r.line(kSlots), *visible = r.line(kVisible),
          *parents = r.line(kParents), *places = r.line(kPlaces);
  if (!(r.how & (kDraft | kRead)) && layout_.states && r.count > kLongestPass)
    refuse("a pass of " + std::to_string(r.count) + " rows: expected at most " + std::to_string(kLongestPass) +
           ", and the rest to be read before");
  for (int64_t i = 0; (r.how & kTree) && i < r.count; ++i)
    if (parents[i] != -1 && (parents[i] < r.first || parents[i] >= r.first + i))
      refuse("row " + std::to_string(r.first + i) + " continues row " + std::to_string(parents[i]) +
             ": expected -1, or an earlier one of its slot");
  for (int64_t i = 0; i < r.count; ++i) {
    places[i] = past + i;
    slots[i] = slot;
    if (!(r.how & kHypotheses)) visible[i] = r.how & kMutual ? past + r.count : past;
    if (!(r.how & kTree)) parents[i] = r.how & kMutual || !i ? -1 : r.first + i - 1;
    const int64_t parent = parents[i] - r.first;
    const int64_t depth = parent < 0 ? 0 : positions[parent] - visible[parent] + 1;
    positions[i] = r.how & kMutual ? places[i] : visible[i] + depth;
  }
}

void Text::run(const Rows& r) {
  if (!(r.how & kDraft)) {
    parents_.resize(static_cast<size_t>(r.count));
    for (int64_t i = 0; i < r.count; ++i)  // the rows of a block are kept in order
      parents_[i] = !(r.how & kTree) ? i - 1 : std::max<int64_t>(-1, r.line(kParents)[i] - r.first);
  }
  end_ = length_ + r.offset + r.count;
  high_water_mark_ = std::max(high_water_mark_, end_);
  if (r.how & kRead) certain_ = length_ + r.count;
}

void Text::keep(const int64_t* rows, int64_t count, int64_t first) {
  std::vector<Move> moved;
  for (int64_t i = 0, before = -1; i < count; ++i) {
    const int64_t row = rows ? rows[i] - first : i;
    if (row < 0 || row >= static_cast<int64_t>(parents_.size()) || parents_[row] != before)
      refuse("row " + std::to_string(row + first) + " does not continue those before it, or is not of the last pass");
    if (row != i) moved.push_back({length_ + row, length_ + i});
    before = row;
  }
  moves_.insert(moves_.end(), moved.begin(), moved.end());
  length_ += count;
  parents_.clear();
}

void Text::write_moves(int64_t* out, int64_t slot, int64_t read, bool revocable) const {
  const auto put = [&](int64_t from, int64_t to) {
    *out++ = slot;
    *out++ = from;
    *out++ = to;
  };
  for (const Move& move : moves_) put(move.from, move.to);
  if (!delta()) return;
  int64_t committed = length_ + read;
  if (revocable)  // what may be taken back waits in the rows of the states
    committed = std::min(committed, std::max({certain_, held().second, end_ + taps_ - kStateRows}));
  put(kCommitted, committed);
}

int64_t Text::needed() const {
  int64_t found = length_;
  for (const Move& move : moves_) found = std::max(found, move.from + 1);
  return found;
}

// ---- going back ----------------------------------------------------------------------------------------------------

bool Text::is_lost(int64_t same) const {
  return (stateful() && (high_water_mark_ - same > kLongestPass || same < since_)) || held().second > same;
}

int64_t Text::last_checkpoint(int64_t most) const {
  const auto after = checkpoints_.upper_bound(most);
  return after == checkpoints_.begin() ? 0 : std::prev(after)->first;
}

int64_t Text::cropped(int64_t length) const {
  const int64_t same = std::min(length, length_);
  return is_lost(same) ? last_checkpoint(same) : same;
}

int64_t Text::crop(int64_t length) {
  const int64_t same = std::min(length, length_);
  if (is_lost(same)) return restart(same);
  if (same < length_) parents_.clear();
  forget_checkpoints(same);
  // tokens that the next pass moves are not in place yet; they only move forward, so those left need no other
  moves_.erase(std::remove_if(moves_.begin(), moves_.end(), [&](const Move& move) { return move.to >= same; }),
               moves_.end());
  length_ = certain_ = same;
  return same;
}

int64_t Text::restart(int64_t most) {
  forget_checkpoints(most);
  set_held(0);
  const int64_t left = last_checkpoint(most);
  if (left) restore(left, checkpoints_.at(left)->data());
  parents_.clear();
  moves_.clear();
  length_ = high_water_mark_ = certain_ = since_ = end_ = left;
  return left;
}

bool Text::reaches(int64_t visible, int64_t count) const {
  if (delta() && visible < length_) return false;
  if (!layout_.states) return true;
  return visible >= since_ && std::max(high_water_mark_, length_ + count) - visible + taps_ <= kStateRows;
}

int64_t Text::lends(int64_t length) const {
  for (const Move& move : moves_) length = std::min(length, move.to);  // which are not in place yet
  return cropped(length);
}

int64_t Text::copy_prefix_from(const Text& other, int64_t length) {
  const bool back = other.is_lost(length);  // to a checkpoint
  hold(length, back ? length : other.high_water_mark());
  since_ = other.since_;
  checkpoints_ = other.checkpoints_;
  forget_checkpoints(length);
  limit(most_);
  return back ? restart(length) : length;
}

// ---- states --------------------------------------------------------------------------------------------------------

std::pair<int64_t, int64_t> Text::held() const {
  if (!delta() || !head_) return {std::numeric_limits<int64_t>::max(), 0};
  std::pair<int64_t, int64_t> found{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  for (int layer = 0; layer < layout_.states; ++layer) {
    const int64_t tokens = *Cache(head_, layout_).applied(layer);
    found = {std::min(found.first, tokens), std::max(found.second, tokens)};
  }
  return found;
}

void Text::set_held(int64_t tokens) {
  for (int layer = 0; delta() && head_ && layer < layout_.states; ++layer)
    *Cache(head_, layout_).applied(layer) = tokens;
}

size_t Text::state_size(int64_t tokens) const {
  const size_t rows = static_cast<size_t>(std::min<int64_t>(tokens, taps_ - 1)) * layout_.state_width;
  return layout_.states * (rows + layout_.state_bytes() / 4 - size_t(kStateRows) * layout_.state_width);
}

// Visits what is read after `tokens` tokens: of each layer the rows that the next token sees, then of each what there
// is after the rows.
template <class Visit>
void Text::each_state(int64_t tokens, Visit visit) const {
  const size_t width = size_t(layout_.state_width), rest = layout_.state_bytes() / 4 - kStateRows * width;
  const Cache cache(head_, layout_);
  for (int layer = 0; layer < layout_.states; ++layer)
    for (int64_t t = std::max<int64_t>(0, tokens - taps_ + 1); t < tokens; ++t) visit(cache.state(layer, t), width);
  for (int layer = 0; rest && layer < layout_.states; ++layer) visit(cache.matrix(layer), rest);
}

void Text::copy_states(float* out) const {
  each_state(length_, [&](const float* from, size_t count) {
    std::memcpy(out, from, count * 4);
    out += count;
  });
}

void Text::restore(int64_t tokens, const float* from) {
  each_state(tokens, [&](float* to, size_t count) {
    std::memcpy(to, from, count * 4);
    from += count;
  });
}

bool Text::put_states(const float* states, size_t count) {
  since_ = length_;
  if (count != state_size()) return false;
  restore(length_, states);
  return true;
}

void Text::checkpoint() {
  forget_checkpoints(length_ - 1);
  if (length_ < kLeastKept || !most_) return;
  auto states = std::make_shared<std::vector<float>>(state_size());
  copy_states(states->data());
  checkpoints_[length_] = std::move(states);
  limit(most_);
}

void Text::limit(size_t most) {
  most_ = most;
  while (checkpoints_.size() > most) checkpoints_.erase(std::next(checkpoints_.begin(), most > 1 ? 1 : 0));
}

std::vector<int64_t> Text::checkpoints() const {
  std::vector<int64_t> found;
  for (const auto& kept : checkpoints_) found.push_back(kept.first);
  return found;
}

size_t Text::checkpoint_bytes() const {
  size_t bytes = 0;
  for (const auto& kept : checkpoints_) bytes += kept.second->size() * 4;
  return bytes;
}

}  // namespace edgespec

// ---- for Python ----------------------------------------------------------------------------------------------------

using edgespec::answered;
using edgespec::Text;

Text* edgespec_text_open(int64_t states, int64_t width, int64_t matrix, int64_t taps, int64_t ring) {
  edgespec::KvLayout layout;
  layout.states = static_cast<int>(states);
  layout.state_width = static_cast<int>(width);
  layout.state_matrix = static_cast<size_t>(matrix);
  layout.ring = static_cast<int>(ring);
  Text* made = nullptr;
  edgespec::guarded([&] { made = new Text(layout, static_cast<int>(taps)); });
  return made;
}

void edgespec_text_close(Text* text) { delete text; }

void edgespec_text_attach(Text* text, uint8_t* head) { text->attach(head); }

void edgespec_text_hold(Text* text, int64_t length, int64_t high_water_mark) { text->hold(length, high_water_mark); }

int64_t edgespec_text_high_water_mark(const Text* text) { return text->high_water_mark(); }

int64_t edgespec_text_plan(Text* text, int64_t* plan, int64_t width, int64_t first, int64_t count, int64_t offset,
                           int64_t how, int64_t slot) {
  return answered([&] {
    const edgespec::Rows rows{plan, width, first, count, offset, how};
    text->plan(rows, slot);
    text->run(rows);
    return 0;
  });
}

int64_t edgespec_text_keep(Text* text, const int64_t* rows, int64_t count) {
  return answered([&] {
    text->keep(rows, count);
    return 0;
  });
}

int64_t edgespec_text_waiting(const Text* text) { return text->waiting(); }

void edgespec_text_moves(const Text* text, int64_t* out, int64_t slot, int64_t read, int64_t revocable) {
  text->write_moves(out, slot, read, revocable != 0);
}

void edgespec_text_moved(Text* text) { text->moved(); }

int64_t edgespec_text_needed(const Text* text) { return text->needed(); }

int64_t edgespec_text_cropped(const Text* text, int64_t length) { return text->cropped(length); }

int64_t edgespec_text_crop(Text* text, int64_t length) { return text->crop(length); }

int64_t edgespec_text_restart(Text* text) { return text->restart(0); }

int64_t edgespec_text_reaches(const Text* text, int64_t visible, int64_t count) {
  return text->reaches(visible, count);
}

int64_t edgespec_text_lends(const Text* text, int64_t length) { return text->lends(length); }

int64_t edgespec_text_copy_prefix_from(Text* text, const Text* other, int64_t length) {
  return answered([&] { return text->copy_prefix_from(*other, length); });
}

int64_t edgespec_text_behind(const Text* text) {
  const auto held = text->held();
  return !text->delta() ? 0 : held.first < text->length() ? 1 : held.second > text->length() ? -1 : 0;
}

void edgespec_text_set_held(Text* text, int64_t tokens) { text->set_held(tokens); }

int64_t edgespec_text_state_size(const Text* text) { return static_cast<int64_t>(text->state_size()); }

void edgespec_text_copy_states(const Text* text, float* out) { text->copy_states(out); }

int64_t edgespec_text_put_states(Text* text, const float* states, int64_t count) {
  return text->put_states(states, static_cast<size_t>(count));
}

int64_t edgespec_text_checkpoint(Text* text) {
  return answered([&] {
    text->checkpoint();
    return 0;
  });
}

void edgespec_text_limit(Text* text, int64_t most) { text->limit(static_cast<size_t>(most)); }

int64_t edgespec_text_checkpoints(const Text* text, int64_t* lengths, int64_t room) {
  return answered([&] {
    const std::vector<int64_t> found = text->checkpoints();
    std::copy_n(found.begin(), std::min<size_t>(found.size(), static_cast<size_t>(room)), lengths);
    return static_cast<int64_t>(found.size());
  });
}

int64_t edgespec_text_checkpoint_bytes(const Text* text) { return static_cast<int64_t>(text->checkpoint_bytes()); }
