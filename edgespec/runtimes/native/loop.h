// THE loop, as edgespec/decoding/loop.py: every method decodes through it; with the empty proposal it is plain
// decoding.
//
// State: `tokens` is the truth; the target's slot holds all of them but the last, the pending token.  A round feeds the
// pending token and a proposal, and commits the accepted guesses and one token more.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "policy.h"

namespace edgespec {

struct LoopOptions {
  Sampling sampling;
  uint64_t seed = 0;
  bool seeded = false;         // the caller gave the seed
  int64_t new_tokens = 128;    // most that are written
  int64_t guesses = 4;         // deepest guess of a proposal
  std::vector<int64_t> stops;  // tokens that end the text
  bool logprobs = false;
  int64_t top_logprobs = 0;  // and of this many of the likeliest tokens
};

struct Round {
  std::vector<int64_t> tokens;    // accepted guesses, then one token more (cut after one that ends the text)
  std::vector<int64_t> drafted;   // all guesses that were verified, in the proposal's order
  std::vector<int64_t> rejected;  // those that would have followed the accepted ones
  int32_t accepted = 0;           // how many of `tokens` were guesses
  int32_t finish = 0;             // EDGESPEC_GOES_ON, or why it is the last
  std::string drafter;            // the drafter that guessed; empty: none did
  std::vector<double> logprobs;   // of each of `tokens`, by the unadjusted model, if asked for
  // [tokens, top_logprobs]: of the likeliest tokens in the place of each; -1 where there are no more
  std::vector<int64_t> top_ids;
  std::vector<double> top_logprobs;
};

struct LoopCounts {
  int64_t prompt_tokens = 0, reused_tokens = 0, rounds = 0, drafted = 0, accepted = 0, tokens = 0;
  uint64_t prompt_ns = 0, round_ns = 0, pass_ns = 0;  // pass_ns: of all passes in rounds
};

// Throws std::invalid_argument, Failure: it is empty, does not fit, or has a token that the target does not know.
void check_prompt(const std::vector<int64_t>& prompt, const Target& target);

class Loop {
 public:
  // Reads the prompt, without its last token, into the target's slot, which may already hold its beginning.  prompt,
  // the options' sampling: checked for this target.  policy: outlives this.  Throws Failure: it was cancelled.
  Loop(Target& target, Policy& policy, std::vector<int64_t> prompt, LoopOptions options, const Reading& reading);
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // Runs a round.  Throws Failure: it was cancelled, or the model is damaged.
  const Round& next();

  // Ends the text with the first `count` tokens of the last round.
  const Round& end(size_t count, int32_t finish);

  bool ended() const { return round_.finish != 0; }
  const std::vector<int64_t>& tokens() const { return tokens_; }
  const LoopCounts& counts() const { return counts_; }
  const std::string& dropped() const { return dropped_; }  // drafters that failed, and why

 private:
  void take_in();
  Proposal propose(int64_t budget);
  template <class Work>
  bool attempt(Drafter* drafter, Work work);  // null: the policy
  void drop(Drafter* drafter, const char* why);
  void begin_clocks();
  void add_clocks();
  uint64_t passed() const;
  Seen seen_of(const edgespec_result& found, const Proposal& proposal, const Verdict& verdict);
  template <bool (Drafter::*wants)() const>
  bool any() const;
  void commit(const Proposal& proposal, const Verdict& verdict, const edgespec_result& rows);

  Target& target_;
  Policy& policy_;
  std::vector<int64_t> tokens_;
  LoopOptions options_;
  const Reading& reading_;
  Noise noise_;
  Prefix prefix_;
  Request request_;
  Round round_;
  LoopCounts counts_;
  std::string dropped_;
  std::vector<float> hidden_;  // states of the rows that the last round kept
  int64_t left_;
  std::vector<std::pair<const Drafter*, uint64_t>> clocks_;  // drafters of this round, and their nanoseconds before it
  uint64_t target_clock_ = 0;
  Drafter* winner_ = nullptr;                       // of this round
  std::vector<std::pair<Drafter*, double>> asked_;  // in this round, and for how many ms
  double draft_ms_ = 0;                             // of this round
  std::vector<Drafter*> drafters_;                  // of the policy, at the last take_in
  std::set<Drafter*> begun_;                        // have begun this text, and missed nothing since
};

}  // namespace edgespec
