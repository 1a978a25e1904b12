#include "loop.h"

#include <algorithm>
#include <chrono>

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

void check_prompt(const std::vector<int64_t>& prompt, const Target& target) {
  if (prompt.empty()) refuse("expected a prompt of at least one token");
  if (int64_t(prompt.size()) >= target.context())
    throw Failure(EDGESPEC_FULL, "the prompt has " + std::to_string(prompt.size()) + " tokens and the context " +
                                     std::to_string(target.context()) + ": no room for a new one");
  for (int64_t token : prompt)
    if (token < 0 || token >= target.vocab())
      refuse("token " + std::to_string(token) + " is outside the vocabulary of " + std::to_string(target.vocab()));
}

}  // namespace

Loop::Loop(Target& target, Policy& policy, std::vector<int64_t> prompt, LoopOptions options, const Reading& reading)
    : target_(target),
      policy_(policy),
      tokens_(std::move(prompt)),
      options_(std::move(options)),
      reading_(reading),
      noise_(options_.seed),
      request_{tokens_, options_.sampling, noise_, prefix_, reading_, options_.seeded && options_.sampling.rejects()},
      left_(options_.new_tokens) {
  check_prompt(tokens_, target_);
  options_.sampling.check(target_.vocab());
  if (left_ < 1 || options_.guesses < 0) refuse("expected at least one new token, and no fewer than 0 guesses");
  Timer timer(counts_.prompt_ns);
  const int64_t size = int64_t(tokens_.size());
  prefix_.begin(tokens_, options_.sampling.counts_text() ? target_.vocab() : 0);
  policy_.begin(request_.reproducible);
  const std::vector<Drafter*> begun = policy_.drafters();
  for (Drafter* one : begun) attempt(one, [&] { one->begin(request_); });
  counts_.prompt_tokens = size;
  counts_.reused_tokens = target_.follow(tokens_, size - 1);
  if (counts_.reused_tokens == size - 1) return;
  target_.prefill(tokens_, counts_.reused_tokens, size - 1, reading_);
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
    dropped_ += std::string(drafter->name()) + ": " + failure.what() + "\n";
  } catch (const std::exception& error) { dropped_ += std::string(drafter->name()) + ": " + error.what() + "\n"; }
  policy_.lose(drafter);
  return false;
}

// The first proposal that is not empty.
Proposal Loop::propose(int64_t budget) {
  winner_ = nullptr;
  asked_.clear();
  if (budget < 1) return {};
  for (const Ask& ask : policy_.choose(budget)) {
    Proposal found;
    const auto begun = Clock::now();
    const bool made = attempt(ask.drafter, [&] {
      found = ask.drafter->propose(request_, ask.most, ask.least_gain);
      found.cut(ask.most, options_.stops);
      policy_.review(ask, found, tokens_);
    });
    asked_.emplace_back(ask.drafter, milliseconds(Clock::now() - begun));
    if (!made || found.empty()) continue;
    winner_ = ask.drafter;
    return found;
  }
  return {};
}

const Round& Loop::next() {
  if (ended()) refuse("the text has ended");
  reading_.check();
  Timer timer(counts_.round_ns);
  const uint64_t before = passes();
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
  wanted.top = options_.sampling.plain_greedy() && !options_.logprobs;
  const auto begun = Clock::now();
  const edgespec_result found = target_.run(wanted);
  const double pass_ms = milliseconds(Clock::now() - begun);

  // verify: which guesses are accepted, and the token after them
  const Verdict verdict = verify(proposal, found, options_.sampling, noise_, prefix_);
  commit(proposal, verdict, found);

  // learn
  const std::vector<Drafter*> observers = policy_.drafters();
  static const Proposal none;
  for (Drafter* one : observers)
    attempt(one, [&] {
      one == winner_ || observers.size() == 1 ? one->observe(proposal, verdict)
                                              : one->observe(none, {{}, verdict.next});
    });
  policy_.told({proposal, verdict, winner_, asked_, wanted.count, pass_ms});
  counts_.pass_ns += passes() - before;
  return round_;
}

uint64_t Loop::passes() const {
  uint64_t total = target_.nanoseconds();
  for (const Drafter* one : policy_.drafters()) total += one->nanoseconds();
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
