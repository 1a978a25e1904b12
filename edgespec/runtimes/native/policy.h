// Chooses who guesses in each round of a text, and how much, as edgespec/decoding/policy.py.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "control.h"
#include "drafter.h"

namespace edgespec {

// A drafter that is to guess in this round.
struct Ask {
  Drafter* drafter;
  int64_t most;                               // deepest guess
  std::function<double(int64_t)> least_gain;  // see Drafter::propose; may be empty
};

// A round, for those that learn from it.
struct Outcome {
  const Proposal& proposal;  // as it was verified
  const Verdict& verdict;
  Drafter* winner;                                 // author of the proposal; null: there was none
  std::vector<std::pair<Drafter*, double>> asked;  // who was asked, and for how many ms
  int32_t rows;
  double pass_ms;
};

// Asks its drafters in order, each for as many guesses as a round may have, until one offers something.
class Policy {
 public:
  explicit Policy(std::vector<Drafter*> drafters) : drafters_(std::move(drafters)) {}
  virtual ~Policy() = default;

  const std::vector<Drafter*>& drafters() const { return drafters_; }  // that have not failed
  // reproducible: the number of guesses decides the text, so that nothing may depend on the clock.
  virtual void begin(bool reproducible) { (void)reproducible; }
  virtual std::vector<Ask> choose(int64_t budget);
  // Cuts a proposal to what is worth verifying.
  virtual void review(const Ask&, Proposal&, const std::vector<int64_t>& text) { (void)text; }
  virtual void told(const Outcome&) {}
  virtual void lose(Drafter* drafter);

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
  void review(const Ask& ask, Proposal& proposal, const std::vector<int64_t>& text) override;
  void told(const Outcome& round) override;
  void lose(Drafter* drafter) override;

 private:
  Control* of(const Drafter* drafter) const;

  std::vector<Control*> controls_;
  bool chosen_ = false;  // whether this round's turns were given
};

}  // namespace edgespec
