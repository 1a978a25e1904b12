#include "hidden_state.h"

#include <algorithm>
#include <cmath>

namespace edgespec {
namespace {

constexpr int64_t kMostOwed = 64;  // rows whose states are kept while nothing is proposed
constexpr int64_t kRound = 12;     // rows that a round may leave to be read, and its guesses be timed
constexpr size_t kEmbeddingBytes = size_t(1) << 20;

}  // namespace

HiddenStateDrafter::HiddenStateDrafter(NativeTarget& target, NativeTarget& drafter, std::string name, int64_t vocab,
                                       const std::vector<int64_t>& head, BlockPart block)
    : target_(target),
      drafter_(drafter),
      name_(std::move(name)),
      vocab_(vocab),
      head_(head),
      columns_(drafter.given()),
      hidden_(drafter.hidden()),
      width_(columns_ - hidden_),
      block_(block),
      deferred_(block.rows ? 0 : 1) {
  if (target.gates().auxiliary < 0 || hidden_ != target.hidden() || width_ < hidden_ || width_ % hidden_)
    refuse(name_ + ": its drafter is of another hidden size than the target");
}

DrafterFacts HiddenStateDrafter::facts() const {
  DrafterFacts found;
  found.at_once = block_.rows > 0;
  return found;
}

bool HiddenStateDrafter::benchmark_step() {
  if (block_.rows) {
    guess_block(0, guesses(), true);
    return true;
  }
  const int64_t token = 0;
  const std::vector<float> zeros(size_t(columns_), 0);
  TextRows rows{&token, 1};
  rows.inputs = zeros.data();
  rows.top = 1;
  rows.hidden = true;
  drafter_.run(rows);
  return true;
}

// Keeps the rows that are still right, and the states that the next rows need.
void HiddenStateDrafter::begin(const Request& request) {
  const std::vector<int64_t>& tokens = request.tokens;
  const int64_t size = int64_t(tokens.size()), first = at_;
  const int64_t common =
      std::mismatch(tokens_.begin(), tokens_.begin() + std::min(tokens_.size(), tokens.size()), tokens.begin()).first -
      tokens_.begin();
  int64_t known = std::min({common, first + owed(), size - 1});
  if (!sound_) known = 0;
  at_ = sound_ ? std::max<int64_t>(0, std::min({rows(), common - deferred_, size - 1 - deferred_})) : 0;
  drafter_.crop(at_);
  if (first <= at_ && at_ < known)
    states_ = {states_.begin() + (at_ - first) * width_, states_.begin() + (known - first) * width_};
  else
    states_.clear();
  tokens_ = tokens;
  sound_ = true;
}

void HiddenStateDrafter::add(const Seen& seen, int64_t from) {
  if (!seen.hidden || seen.columns != hidden_ + width_) refuse("the target gave no auxiliary hidden states");
  for (int64_t i = from; i < seen.rows; ++i) {
    const float* row = seen.hidden + i * seen.columns + hidden_;
    states_.insert(states_.end(), row, row + width_);
  }
}

void HiddenStateDrafter::absorb(const Request&, int64_t first, const Seen& seen) {
  if (first > known()) refuse("auxiliary hidden states of a later token than expected");
  add(seen, known() - first);  // a target with states may read known tokens again
  settle(1);
}

// Makes the rows whose states are kept, but the deferred one, if there are at least `least`.
void HiddenStateDrafter::settle(int64_t least) {
  const int64_t count = owed() - deferred_;
  if (count < least) return;
  drafter_.crop(at_);
  for (int64_t done = 0, rows; done < count; done += rows) {
    rows = std::min<int64_t>(count - done, kLongestPass);
    const int64_t* tokens = tokens_.data() + at_ + done + deferred_;
    const float* states = states_.data() + done * width_;
    std::vector<float> made;
    if (deferred_) {
      made = inputs(tokens, rows, states, width_);
    } else {
      made.resize(size_t(rows * columns_));
      for (int64_t i = 0; i < rows; ++i)
        std::copy_n(states + i * width_, width_, made.begin() + i * columns_ + hidden_);
    }
    TextRows wanted{tokens, static_cast<int32_t>(rows)};
    wanted.inputs = made.data();
    wanted.fused = wanted.unscored = true;
    wanted.bare = !deferred_;
    drafter_.run(wanted);
    drafter_.keep_all();
  }
  at_ += count;
  states_.erase(states_.begin(), states_.begin() + count * width_);
}

// [count, columns]: embeddings of tokens as the target sees them, then states [count, columns of them].
std::vector<float> HiddenStateDrafter::inputs(const int64_t* tokens, int64_t count, const float* states,
                                              int64_t columns) {
  if ((embeddings_.size() + size_t(count)) * size_t(hidden_) * sizeof(float) > kEmbeddingBytes) embeddings_.clear();
  std::vector<int64_t> fresh;
  for (int64_t i = 0; i < count; ++i)
    if (embeddings_.emplace(tokens[i], std::vector<float>()).second) fresh.push_back(tokens[i]);
  if (!fresh.empty()) {
    const edgespec_result found = target_.embed(fresh.data(), static_cast<int32_t>(fresh.size()));
    for (size_t i = 0; i < fresh.size(); ++i) {
      const float* row = found.hidden + i * size_t(found.hidden_columns);
      embeddings_[fresh[i]].assign(row, row + hidden_);
    }
  }
  std::vector<float> made(size_t(count * columns_), 0);
  for (int64_t i = 0; i < count; ++i) {
    const std::vector<float>& embedding = embeddings_.at(tokens[i]);
    std::copy(embedding.begin(), embedding.end(), made.begin() + i * columns_);
    if (columns) std::copy_n(states + i * columns, columns, made.begin() + i * columns_ + hidden_);
  }
  return made;
}

Proposal HiddenStateDrafter::propose(const Request& request, int64_t budget, const LeastGain&) {
  const std::vector<int64_t>& tokens = request.tokens;
  const int64_t size = int64_t(tokens.size()), length = std::min(budget, drafter_.context() - size), last = size - 1;
  const bool complete = sound_ && at_ + owed() == last && tokens_.size() == tokens.size();
  if (length < 1 || last < 1 || !complete) return {};
  sound_ = false;
  const int64_t start = std::min(rows(), last - deferred_);
  caught_up_ = last - start <= kRound;
  drafter_.crop(start);
  if (!deferred_) settle(1);
  length_ = block_.rows ? std::min(length, guesses()) : length;
  Proposal made = draw_chain(request, length_);
  drafter_.crop(last);
  states_.erase(states_.begin(), states_.end() - deferred_ * width_);
  at_ = last - deferred_;
  sound_ = true;
  return made;
}

// Runs a block: the pending token, and masks where `length` guesses will be.
void HiddenStateDrafter::guess_block(int64_t pending, int64_t length, bool best) {
  std::vector<int64_t> tokens(size_t(length + 1), block_.mask);
  tokens[0] = pending;
  const std::vector<float> made = inputs(tokens.data(), length + 1, nullptr, 0);
  TextRows wanted{tokens.data(), static_cast<int32_t>(length + 1)};
  wanted.inputs = made.data();
  wanted.mutual = true;
  wanted.last = static_cast<int>(length + block_.anchor);
  wanted.top = best;
  found_ = drafter_.run(wanted);
  next_ = 0;
}

DrawingDrafter::Row HiddenStateDrafter::step(const Request& request, int64_t guess, bool best) {
  best = best && vocab_ <= target_.vocab();
  if (block_.rows) {
    if (guess < 0) guess_block(request.tokens.back(), length_, best);
    return at(next_++, best);
  }
  std::vector<float> made;
  TextRows wanted{&guess, 1};
  if (guess < 0) {  // the last rows of the text
    const int64_t from = rows() - at_;
    wanted.count = static_cast<int32_t>(owed() - from);
    wanted.tokens = request.tokens.data() + request.tokens.size() - size_t(wanted.count);
    made = inputs(wanted.tokens, wanted.count, states_.data() + from * width_, width_);
    wanted.fused = true;
  } else {
    made = inputs(&guess, 1, own_.data(), hidden_);
  }
  wanted.inputs = made.data();
  wanted.hidden = true;
  wanted.last = 1;
  wanted.top = best;
  found_ = drafter_.run(wanted);
  const float* own = found_.hidden + size_t(wanted.count - 1) * size_t(found_.hidden_columns);
  own_.assign(own, own + hidden_);
  drafter_.keep_all();
  return at(0, best);
}

// A row of what the last pass found.
DrawingDrafter::Row HiddenStateDrafter::at(int32_t row, bool best) {
  Row made;
  if (best) {
    const int64_t found = found_.ids[row];
    made.best = head_.empty() ? found : head_[size_t(found)];
    made.value = found_.values[row];
    return made;
  }
  made.logits = found_.logits + size_t(row) * size_t(found_.columns);
  made.columns = std::min<int64_t>(found_.columns, target_.vocab());
  if (head_.empty()) return made;
  spread_.assign(size_t(std::min(vocab_, target_.vocab())), -HUGE_VALF);
  for (size_t i = 0; i < head_.size(); ++i)
    if (head_[i] < int64_t(spread_.size())) spread_[size_t(head_[i])] = made.logits[i];
  made.logits = spread_.data();
  made.columns = int64_t(spread_.size());
  return made;
}

// Keeps the states of the rows that the text has.
void HiddenStateDrafter::observe(const Proposal&, const Verdict&, const Seen& seen) {
  if (!sound_) return;
  add(seen, 0);
  tokens_.insert(tokens_.end(), seen.tokens.begin(), seen.tokens.end());
  if (owed() >= kMostOwed) settle(kMostOwed);
}

}  // namespace edgespec
