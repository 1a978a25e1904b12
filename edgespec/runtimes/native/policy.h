// Chooses who guesses in each round of a text, and how much, as edgespec/decoding/policy.py.
#pragma once
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control.h"
#include "drafter.h"

namespace edgespec {

// A drafter that is to guess in this round.
struct Ask {
  Drafter* drafter;
  int64_t most;                               // deepest guess
  std::function<double(int64_t)> least_gain;  // see Drafter::propose; may be empty
  // it is asked in any case, and its guesses are not verified: the policy learns from them
  bool looks = false;
};

// A round, for those that learn from it.
struct Outcome {
  const Proposal& proposal;  // as it was verified
  const Verdict& verdict;
  Drafter* winner;                                 // author of the proposal; null: there was none
  std::vector<std::pair<Drafter*, double>> asked;  // who was asked, and for how many ms
  int32_t rows;
  double pass_ms;
  double draft_ms;  // of choosing, and of all that were asked

  double asked_ms(const Drafter* drafter) const {
    double total = 0;
    for (const auto& [one, ms] : asked)
      if (one == drafter) total += ms;
    return total;
  }
};

// Asks its drafters in order, each for as many guesses as a round may have, until one offers something.
class Policy {
 public:
  explicit Policy(std::vector<Drafter*> drafters) : drafters_(std::move(drafters)) {}
  virtual ~Policy() = default;

  const std::vector<Drafter*>& drafters() const { return drafters_; }  // that have not failed
  // reproducible: the number of guesses decides the text, so that nothing may depend on the clock.
  virtual void begin(bool reproducible) { (void)reproducible; }
  virtual std::vector<Ask> choose(int64_t budget);  // throws what a drafter throws that is made now
  // Cuts a proposal, which took ms, to what is worth verifying.
  virtual void review(const Ask&, Proposal&, const std::vector<int64_t>& text, double ms) { (void)text, (void)ms; }
  virtual void told(const Outcome&) {}
  virtual void lose(Drafter* drafter);               // that failed; null: the one that is made now
  virtual std::string in_use() const { return ""; }  // the method that is made now

 protected:
  std::vector<Drafter*> drafters_;
};

// Asks each drafter as far as its control predicts a gain.  A cheap one must promise more than those after it.
class Adaptive : public Policy {
 public:
  // controls: by drafter, in the same order; null: it is always asked.  They outlive this.
  Adaptive(std::vector<Drafter*> drafters, std::vector<Control*> controls)
      : Policy(std::move(drafters)), controls_(std::move(controls)) {}

  void begin(bool reproducible) override;
  std::vector<Ask> choose(int64_t budget) override;
  void review(const Ask& ask, Proposal& proposal, const std::vector<int64_t>& text, double ms) override;
  void told(const Outcome& round) override;
  void lose(Drafter* drafter) override;

 protected:
  std::vector<Control*> controls_;
  bool chosen_ = false;      // whether this round's turns were given
  double limit_ = HUGE_VAL;  // plain steps that a round may lose

 private:
  Control* of(const Drafter* drafter) const;
};

}  // namespace edgespec
