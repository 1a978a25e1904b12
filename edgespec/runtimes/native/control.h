// Draft as many tokens as is fastest, and none where plain decoding is, as edgespec/control: each round verifies the
// number K of guesses that maximizes
//
//     (1 + sum_{i <= K} prod_{j <= i} a_j) / (d(K) + v(rows(K)))          K = 0 is plain decoding: 1
//
// with a_j = P(guess j is accepted | all before it were), which is estimated from the rounds.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cost.h"

namespace edgespec {

using Rates = std::vector<double>;  // of positions 1 and on; the last one holds for those after it

// Discounted counts by position: verified guesses, and the accepted ones among them.
struct Evidence {
  std::vector<double> tested, accepted;

  bool empty() const { return tested.empty(); }
  void learn(int right, int tested_now, double keep);
};

// Discounted sums over rounds: tokens, and time in plain steps.
struct Pace {
  double tokens = 0, steps = 0;

  double speed() const { return steps ? tokens / steps : 1; }
  void add(double more, double time, double keep);
  Pace with(const Pace& prior, double weight) const;
};

// Estimates the rates of the first `length` positions: counts, and a prior that counts as `weight` of them.
Rates posterior(const Rates& prior, double weight, const Evidence& evidence, size_t length);

// The highest predicted speed of any number of guesses.  costs: of a round over each, in plain steps; the first one is
// 1, plain decoding's.
double best_speed(const Rates& rates, const std::vector<double>& costs);

// How often a guess of a given draft probability is accepted, as edgespec/formulas/confidence.py.
class Confidence {
 public:
  explicit Confidence(const Rates& rates = {}, double mean = 0.8);
  double chance(double probability) const { return rates_[range(probability)]; }
  double mean() const { return mean_; }
  void learn(double probability, bool accepted);

 private:
  static constexpr std::array<double, 7> kBounds{0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97};
  static size_t range(double probability);

  std::array<double, kBounds.size() + 1> rates_;
  std::array<int64_t, kBounds.size() + 1> seen_{};
  double mean_;
  int64_t tested_ = 0;
};

// The budget of a method as a candidate of method auto, as edgespec/control/learned.py.
struct Standing {
  double budget = 2.5;  // plain steps that it may lose
  int64_t now = 0;      // rounds in which it was a candidate
  int64_t until = 0;    // round before which it is not tried again
  int64_t wait = 96;    // rounds to wait after the next failure; doubled while tries fail
  bool failed = false;  // it was left last because it was too slow, or could not run
  bool gained = false;  // rounds were faster than plain decoding since it ran out of budget last

  double round_loss_limit() const;  // plain steps that one round may lose
  bool exhausted() const;           // its budget is too empty to guess anything
  bool ready() const { return now >= until && !exhausted(); }
  void accrue(double share);  // counts a round, of which this many plain steps are added to the budget
  void back_off();            // it failed: it is tried again later, and later still if that fails too
  void gain();                // its rounds are faster than plain decoding
  void charge(double lost);   // a round took this many plain steps beyond its tokens; negative: it gained
};

// A record of a method: all texts of a session begin with it, and add to it.
struct Learned {
  CostModel cost;
  std::vector<std::pair<int, Evidence>> evidence;  // by bucket, the oldest first
  Pace pace;
  int bucket = 0;  // of the last proposal
};

// Facts of a drafter that control must know.
struct DrafterFacts {
  bool cheap = false;          // proposing costs next to nothing: a proposal is seen before it is decided on
  bool stops = false;          // it stops drafting where more guesses are not worth it
  std::map<int, Rates> rates;  // by bucket, where nothing was measured
  bool at_once = false;        // drafting takes the same time for any depth
};

// Decides how many guesses of one drafter are worth verifying.
class Control {
 public:
  // prior: rates to begin with; empty: assumed.
  Control(DrafterFacts facts, Learned& learned, int most, Rates prior);

  // Begins a text; reproducible: it uses counts and the given costs, never the clock, and leaves no trace.
  void begin(bool reproducible);
  int64_t most() const { return most_; }  // guesses of a round
  const DrafterFacts& facts() const { return facts_; }

  // How deep a costly drafter is to guess, 0: not at all; a cheap one is asked in any case.  rows [budget + 1]: of the
  // pass over a proposal that is cut at each depth.  required: tokens per plain step that it must be predicted to give.
  // limit: plain steps that a round may lose if all its guesses are wrong.
  int64_t choose(const std::vector<int64_t>& rows, double required, double limit = HUGE_VAL);
  // The fewest tokens that a guess more must be expected to gain, by the depth of those before it.
  double least_gain(int64_t depth) const;
  // How deep a cheap drafter's chain is to be verified.
  int64_t cut(const std::vector<int64_t>& guesses, int bucket, const std::vector<int64_t>& text, int64_t budget);
  // Learns what a cheap drafter's chain is worth, without a pass.
  void look(const std::vector<int64_t>& guesses, int bucket, const std::vector<int64_t>& text, int64_t budget);
  // The speed of its next rounds at the best length, which may be below 1; of a cheap one all rounds count.
  double speed(const std::vector<int64_t>& rows);
  // The predicted and the measured time of a round with guesses, in plain steps.  Drafting is compared with the pass of
  // the same round: other work on the machine slows both down.
  double price(int64_t depth, int64_t rows) const { return depth ? steps(depth, rows) : 1; }
  double measured(int rows, double draft_ms, double pass_ms) const;
  // Whether a round over one rejected guess would have been within the limit of the last choice.
  bool affordable() const { return steps(1, 2) - 1 <= limit_; }
  void set_eager(bool eager) { eager_ = eager; }  // whether to begin with a probe where it does not draft
  CostModel& cost() const { return learned_.cost; }
  bool reproducible() const { return reproducible_; }
  // The predicted speed of a costly drafter's next proposal, at least 1.
  double promised(const std::vector<int64_t>& rows);

  struct Result {          // of a round
    bool guessed = false;  // whether the proposal was this drafter's
    int guesses = 0, depth = 0, bucket = 0, right = 0, tested = 0;
    bool came = true;       // whether its turn came
    bool caught_up = true;  // whether drafting took its usual time
    int rows = 1;
    double draft_ms = 0, pass_ms = 0;
  };
  void told(const Result& round);

 private:
  struct Bucket {
    Rates base;
    bool known = false;
    double weight = 0;
    Evidence evidence;
    Rates rates;  // from both; empty: estimate again
    Pace pace;
    int wait = 0, waited = 0, streak = 0;
    int drafting = -1;  // whether it was drafted when last decided on; -1: never
  };
  struct Decision {
    int64_t length = 0;
    int bucket = 0;
    int64_t best = 0;
    double speed = 0;
    bool probing = false, promising = false, resting = false, made = false;
  };
  struct Unverified {  // guesses to compare with the text as it grows
    int64_t at;
    std::vector<int64_t> guesses;
    int bucket;
    int64_t length = 0;  // as many as would have been verified
    double steps = 1;    // and what that round would have taken
    int64_t right = 0;
  };

  Decision decide(int bucket, const std::vector<int64_t>& rows);
  std::pair<int64_t, double> best(Bucket& record, const std::vector<double>& costs);
  const Rates& rates(Bucket& record);
  Pace pace(const Bucket& record, const std::vector<double>& costs) const;
  const std::vector<double>& prices(const std::vector<int64_t>& rows);
  double steps(int64_t depth, int64_t rows) const { return costs_->d(drafted(depth)) + costs_->v(rows); }
  int64_t drafted(int64_t depth) const { return facts_.at_once ? std::min<int64_t>(depth, 1) : depth; }
  Bucket& bucket(int number);
  void count(const Decision& decision, const Result& round);
  void learn(int bucket, int right, int tested);
  void judge(const std::vector<int64_t>& text);
  void set_aside(Unverified one);
  void count_look(double tokens, double steps);

  DrafterFacts facts_;
  Learned& learned_;
  int64_t most_;
  Rates prior_;
  bool given_;  // whether the prior is more than an assumption
  bool reproducible_ = false;
  Learned own_;  // of a reproducible text
  Learned* known_ = nullptr;
  CostModel* costs_ = nullptr;
  std::vector<std::pair<int, Bucket>> buckets_;
  int64_t priced_version_ = -1;
  std::vector<int64_t> priced_rows_;
  std::vector<double> prices_;
  int rest_ = 0;  // rounds that are plain without looking
  double required_ = 1, limit_ = HUGE_VAL;
  bool eager_ = false;
  Decision decision_;
  std::vector<int64_t> chosen_rows_;  // of the last choice
  std::vector<Unverified> unverified_;
  Pace looks_;
};

}  // namespace edgespec
