#include "hosted.h"

#include <algorithm>
#include <string>

#include "sampling.h"

namespace edgespec {

// Has the caller run a pass, which first moves what the last one left to be moved.
void HostedTarget::call(const TextRows& rows, int32_t scored) {
  const int64_t kept = length();
  left_ = kept;
  if (rows.gates || rows.inputs || rows.draft || rows.hidden || rows.auxiliary || rows.mutual)
    refuse("passes of the caller run the whole model on tokens");
  if (rows.parents && !host_.trees) refuse("passes of the caller run no trees");
  if (kept + rows.count > room_)
    refuse("a pass to place " + std::to_string(kept + rows.count) + ": expected at most " + std::to_string(room_));
  positions_.resize(size_t(rows.count));
  for (int32_t i = 0; i < rows.count; ++i) {
    const int32_t parent = rows.parents ? rows.parents[i] : i - 1;
    positions_[size_t(i)] = parent < 0 ? kept : positions_[size_t(parent)] + 1;
  }
  logits_.resize(size_t(scored) * size_t(vocab_));
  edgespec_host_pass pass{};
  pass.size = sizeof pass;
  pass.rows = rows.count;
  pass.tokens = rows.tokens;
  pass.positions = positions_.data();
  pass.parents = rows.parents;
  pass.kept = kept;
  pass.moves = moves_.data();
  pass.move_count = static_cast<int32_t>(moves_.size() / 2);
  pass.scored = scored;
  pass.columns = vocab_;
  pass.logits = scored ? logits_.data() : nullptr;
  const int status = host_.run(host_.user, &pass);
  if (status && !moves_.empty()) left_ = moves_[1];  // any of them may have been made
  moves_.clear();
  if (!status) return;
  const char* why = host_.error ? host_.error(host_.user) : nullptr;
  throw Failure(EDGESPEC_HOST_FAILED, "the caller's pass: " + (why ? std::string(why) : std::to_string(status)));
}

edgespec_result HostedTarget::run_pass(const TextRows& rows) {
  edgespec_result found{};
  found.rows = rows.unscored ? 0 : rows.last ? rows.last : rows.count;
  call(rows, found.rows);
  if (!rows.top) {
    found.columns = static_cast<int32_t>(vocab_);
    found.logits = logits_.data();
    return found;
  }
  ids_.clear();
  values_.clear();
  for (int32_t row = 0; row < found.rows; ++row) {
    const float* logits = logits_.data() + size_t(row) * size_t(vocab_);
    ids_.push_back(argmax(logits, vocab_));
    values_.push_back(logits[ids_.back()]);
  }
  found.top = 1;
  found.ids = ids_.data();
  found.values = values_.data();
  return found;
}

edgespec_result HostedTarget::read_chunk(const int64_t* tokens, int32_t count, bool auxiliary) {
  TextRows rows{tokens, count};
  rows.auxiliary = auxiliary;
  call(rows, 0);
  return {};
}

void HostedTarget::check_tokens(const int64_t*, int64_t count) {
  if (length() + count > room_)
    refuse(std::to_string(length() + count) + " tokens: expected at most " + std::to_string(room_));
}

void HostedTarget::keep_rows(const int32_t* rows, int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (rows[i] != i) moves_.insert(moves_.end(), {length() + rows[i], length() + i});
}

int64_t HostedTarget::crop_cache(int64_t length) {
  while (!moves_.empty() && moves_.back() >= length) moves_.resize(moves_.size() - 2);
  return length;
}

}  // namespace edgespec
