#include "loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "verify.h"

namespace edgespec {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

class Timer {
 public:
  explicit Timer(uint64_t& total) : total_(total), begun_(std::chrono::steady_clock::now()) {}
  ~Timer() { total_ += uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begun_).count()); }

 private:
  uint64_t& total_;
  std::chrono::steady_clock::time_point begun_;
};

}  // namespace

void check_prompt(const std::vector<int64_t>& prompt, const Target& target) {
  if (prompt.empty()) refuse("expected a prompt of at least one token");
  if (int64_t(prompt.size()) >= target.context())
    throw Failure(EDGESPEC_FULL, "the prompt has " + std::to_string(prompt.size()) + " tokens and the context " +
                                     std::to_string(target.context()) + ": no room for a new one");
  for (int64_t token : prompt)
    if (token < 0 || token >= target.vocab())
      refuse("token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(target.vocab()));
}

Loop::Loop(Target& target, Policy& policy, std::vector<int64_t> prompt, LoopOptions options, const Reading& reading)
    : target_(target),
      policy_(policy),
      tokens_(std::move(prompt)),
      options_(std::move(options)),
      reading_(reading),
      noise_(options_.seed),
      request_{tokens_, options_.sampling, noise_, prefix_, reading_, options_.seeded && options_.sampling.rejects()},
      left_(options_.new_tokens) {
  if (left_ < 1 || options_.guesses < 0) refuse("expected at least one new token, and no fewer than 0 guesses");
  Timer timer(counts_.prompt_ns);
  const int64_t size = int64_t(tokens_.size());
  prefix_.begin(tokens_, options_.sampling.counts_text() ? target_.vocab() : 0);
  attempt(nullptr, [&] { policy_.begin(request_.reproducible); });
  take_in();
  counts_.prompt_tokens = size;
  // a drafter that needs states is given those of all tokens that it does not know: some are read again for that
  int64_t known = size - 1;
  for (const Drafter* one : policy_.drafters())
    if (one->wants_states()) known = std::min(known, one->known());
  counts_.reused_tokens = target_.follow(tokens_, known);
  if (counts_.reused_tokens == size - 1) return;
  Target::States states;
  if (any<&Drafter::wants_states>())
    states = [&](int64_t first, const edgespec_result& found) {
      const Seen seen{found.hidden, found.hidden_columns, static_cast<int32_t>(target_.length() - first), {}};
      for (Drafter* one : std::vector<Drafter*>(policy_.drafters()))
        if (one->wants_states()) attempt(one, [&] { one->absorb(request_, first, seen); });
    };
  target_.prefill(tokens_, counts_.reused_tokens, size - 1, reading_, states);
  target_.checkpoint();
}

// Leaves out a drafter that fails, for the rest of the request; nothing it throws changes the text.
template <class Work>
bool Loop::attempt(Drafter* drafter, Work work) {
  try {
    work();
    return true;
  } catch (const Failure& failure) {
    if (failure.status == EDGESPEC_CANCELLED) throw;
    drop(drafter, failure.what());
  } catch (const std::exception& error) { drop(drafter, error.what()); }
  return false;
}

void Loop::drop(Drafter* drafter, const char* why) {
  dropped_ += (drafter ? drafter->name() : policy_.in_use()) + ": " + why + "\n";
  policy_.lose(drafter);
  begun_.erase(drafter);
}

// Follows the policy's drafters: those that are new begin, and those that left have to begin again.  A cheap one reads
// what it missed when it proposes.
void Loop::take_in() {
  const std::vector<Drafter*> now = policy_.drafters();
  for (Drafter* one : drafters_)
    if (std::find(now.begin(), now.end(), one) == now.end() && !one->facts().cheap) begun_.erase(one);
  for (Drafter* one : now)
    if (!begun_.count(one) && attempt(one, [&] { one->begin(request_); })) begun_.insert(one);
  drafters_ = policy_.drafters();
}

// The first proposal that is not empty.
Proposal Loop::propose(int64_t budget) {
  winner_ = nullptr;
  asked_.clear();
  draft_ms_ = 0;
  if (budget < 1) return {};
  const auto start = Clock::now();
  std::vector<Ask> asks;
  attempt(nullptr, [&] { asks = policy_.choose(budget); });
  if (policy_.drafters() != drafters_) {
    add_clocks();
    take_in();
  }
  Proposal winner;
  for (const Ask& ask : asks) {
    if (winner_ && !ask.looks) continue;
    if (!begun_.count(ask.drafter)) {  // one that looks, or one that failed to begin
      if (!ask.looks || !attempt(ask.drafter, [&] { ask.drafter->begin(request_); })) continue;
      begun_.insert(ask.drafter);
    }
    Proposal found;
    const auto begun = Clock::now();
    const bool made = attempt(ask.drafter, [&] {
      found = ask.drafter->propose(request_, ask.most, ask.least_gain);
      found.cut(ask.most, options_.stops);
      policy_.review(ask, found, tokens_, milliseconds(Clock::now() - begun));
    });
    asked_.emplace_back(ask.drafter, milliseconds(Clock::now() - begun));
    if (!made || found.empty()) continue;
    winner_ = ask.drafter;
    winner = std::move(found);
  }
  draft_ms_ = milliseconds(Clock::now() - start);
  return winner;
}

const Round& Loop::next() {
  if (ended()) refuse("the text has ended");
  reading_.check();
  Timer timer(counts_.round_ns);
  begin_clocks();
  // reads again what a failed pass has dropped
  target_.prefill(tokens_, target_.length(), int64_t(tokens_.size()) - 1, reading_);
  // one of the tokens that are left is the recovered or bonus one, and so is one of the places left in the context
  const int64_t room = target_.context() - int64_t(tokens_.size());

  // propose: guesses that hang off the pending token; no guess is plain decoding
  const Proposal proposal = propose(std::min({options_.guesses, left_ - 1, room - 1}));

  // pass: the pending token and all guesses at once
  std::vector<int64_t> rows{tokens_.back()};
  rows.insert(rows.end(), proposal.tokens.begin(), proposal.tokens.end());
  std::vector<int32_t> parents;
  if (!proposal.chain()) {
    parents.push_back(-1);
    for (int32_t parent : proposal.parents) parents.push_back(parent + 1);
  }
  TextRows wanted{rows.data(), static_cast<int32_t>(rows.size()), parents.empty() ? nullptr : parents.data()};
  wanted.top = options_.sampling.plain_greedy() && !options_.logprobs && !options_.top_logprobs;
  wanted.hidden = any<&Drafter::wants_hidden>();
  wanted.auxiliary = any<&Drafter::wants_states>();
  const auto begun = Clock::now();
  const edgespec_result found = target_.run(wanted);
  const double pass_ms = milliseconds(Clock::now() - begun);

  // verify: which guesses are accepted, and the token after them
  const Verdict verdict = verify(proposal, found, options_.sampling, noise_, prefix_);
  commit(proposal, verdict, found);

  // learn
  const std::vector<Drafter*> observers = policy_.drafters();
  static const Proposal none;
  const Seen seen = seen_of(found, proposal, verdict);
  for (Drafter* one : observers)
    attempt(one, [&] {
      one == winner_ || observers.size() == 1 ? one->observe(proposal, verdict, seen)
                                              : one->observe(none, {{}, verdict.next}, seen);
    });
  policy_.told({proposal, verdict, winner_, asked_, wanted.count, pass_ms, draft_ms_});
  counts_.pass_ns += passed();
  return round_;
}

// Copies the hidden states of the rows that are kept, because drafters that observe run passes.
Seen Loop::seen_of(const edgespec_result& found, const Proposal& proposal, const Verdict& verdict) {
  Seen seen;
  seen.columns = found.hidden_columns;
  seen.rows = static_cast<int32_t>(verdict.path.size() + 1);
  for (int32_t node : verdict.path) seen.tokens.push_back(proposal.tokens[size_t(node)]);
  seen.tokens.push_back(verdict.next);
  if (!found.hidden) return seen;
  hidden_.assign(found.hidden, found.hidden + found.hidden_columns);
  for (int32_t node : verdict.path) {
    const float* row = found.hidden + size_t(node + 1) * size_t(found.hidden_columns);
    hidden_.insert(hidden_.end(), row, row + found.hidden_columns);
  }
  seen.hidden = hidden_.data();
  return seen;
}

const Round& Loop::end(size_t count, int32_t finish) {
  const size_t left_out = round_.tokens.size() - count;
  counts_.tokens -= int64_t(left_out);
  counts_.accepted -= round_.accepted;
  round_.tokens.resize(count);
  if (!round_.logprobs.empty()) round_.logprobs.resize(count);
  round_.top_ids.resize(count * size_t(options_.top_logprobs));
  round_.top_logprobs.resize(count * size_t(options_.top_logprobs));
  round_.accepted = std::min(round_.accepted, static_cast<int32_t>(count));
  counts_.accepted += round_.accepted;
  round_.finish = finish;
  return round_;
}

template <bool (Drafter::*wants)() const>
bool Loop::any() const {
  const std::vector<Drafter*>& all = policy_.drafters();
  return std::any_of(all.begin(), all.end(), [](const Drafter* one) { return (one->*wants)(); });
}

// Notes what the passes of all drafters have taken before this round, or before a drafter joined in it.
void Loop::begin_clocks() {
  target_clock_ = target_.nanoseconds();
  clocks_.clear();
  add_clocks();
}

void Loop::add_clocks() {
  for (const Drafter* one : policy_.drafters())
    if (std::none_of(clocks_.begin(), clocks_.end(), [&](const auto& known) { return known.first == one; }))
      clocks_.emplace_back(one, one->nanoseconds());
}

// Nanoseconds of this round's passes.
uint64_t Loop::passed() const {
  uint64_t total = target_.nanoseconds() - target_clock_;
  for (const auto& [one, before] : clocks_) total += one->nanoseconds() - before;
  return total;
}

// The slot keeps the row that each new token was chosen from; the last token is the new pending one, whose own row
// comes with the next pass.
void Loop::commit(const Proposal& proposal, const Verdict& verdict, const edgespec_result& rows) {
  const int64_t room = target_.context() - int64_t(tokens_.size());
  round_ = {};
  for (int32_t node : verdict.path) round_.tokens.push_back(proposal.tokens[size_t(node)]);
  round_.tokens.push_back(verdict.next);
  const auto end =
      std::find_first_of(round_.tokens.begin(), round_.tokens.end(), options_.stops.begin(), options_.stops.end());
  if (end != round_.tokens.end()) {
    round_.tokens.erase(end + 1, round_.tokens.end());
    round_.finish = EDGESPEC_STOPPED;
  } else if (int64_t(round_.tokens.size()) >= std::min(left_, room)) {
    round_.finish = int64_t(round_.tokens.size()) == left_ ? EDGESPEC_LENGTH : EDGESPEC_CONTEXT;
  }
  round_.drafted = proposal.tokens;
  round_.accepted = static_cast<int32_t>(std::min(verdict.path.size(), round_.tokens.size()));
  round_.rejected = proposal.rejected(verdict.path);
  if (winner_) round_.drafter = winner_->name();

  std::vector<int32_t> kept{0};
  for (int32_t node : verdict.path) kept.push_back(node + 1);
  kept.resize(round_.tokens.size());
  for (size_t i = 0; options_.logprobs && i < kept.size(); ++i)
    round_.logprobs.push_back(
        log_softmax_at(rows.logits + size_t(kept[i]) * rows.columns, rows.columns, round_.tokens[i]));
  const size_t top = size_t(options_.top_logprobs);
  for (size_t i = 0; top && i < kept.size(); ++i) {
    for (const auto& [token, value] :
         likely_tokens(rows.logits + size_t(kept[i]) * rows.columns, rows.columns, int64_t(top))) {
      round_.top_ids.push_back(token);
      round_.top_logprobs.push_back(value);
    }
    round_.top_ids.resize((i + 1) * top, -1);
    round_.top_logprobs.resize((i + 1) * top, -HUGE_VAL);
  }
  target_.keep(kept.data(), static_cast<int32_t>(kept.size()));
  for (int64_t token : round_.tokens) {
    tokens_.push_back(token);
    prefix_.commit(token);
  }
  left_ -= int64_t(round_.tokens.size());
  ++counts_.rounds;
  counts_.drafted += proposal.size();
  counts_.accepted += round_.accepted;
  counts_.tokens += int64_t(round_.tokens.size());
}

}  // namespace edgespec
