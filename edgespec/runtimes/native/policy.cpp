#include "policy.h"

#include <algorithm>

namespace edgespec {

std::vector<Ask> Policy::choose(int64_t budget) {
  std::vector<Ask> asks;
  for (Drafter* one : drafters_) asks.push_back({one, budget, {}, false});
  return asks;
}

void Policy::lose(Drafter* drafter) {
  drafters_.erase(std::remove(drafters_.begin(), drafters_.end(), drafter), drafters_.end());
}

// ---- adaptive
// --------------------------------------------------------------------------------------------------------

Control* Adaptive::of(const Drafter* drafter) const {
  const auto at = std::find(drafters_.begin(), drafters_.end(), drafter);
  return at == drafters_.end() ? nullptr : controls_[size_t(at - drafters_.begin())];
}

void Adaptive::begin(bool reproducible) {
  for (Control* one : controls_)
    if (one) one->begin(reproducible);
}

std::vector<Ask> Adaptive::choose(int64_t budget) {
  chosen_ = true;
  std::vector<Ask> asks;
  std::vector<std::vector<int64_t>> rows;
  for (size_t i = 0; i < drafters_.size(); ++i)
    rows.push_back(drafters_[i]->rows(controls_[i] ? std::min(budget, controls_[i]->most()) : budget));
  for (size_t i = 0; i < drafters_.size(); ++i) {
    if (!controls_[i]) {
      asks.push_back({drafters_[i], budget, {}, false});
      continue;
    }
    double required = 1;
    for (size_t j = i + 1; j < drafters_.size(); ++j)
      if (controls_[j]) required = std::max(required, controls_[j]->promised(rows[j]));
    const int64_t length = controls_[i]->choose(rows[i], required, limit_);
    if (!length) continue;
    asks.push_back({drafters_[i], length, {}, false});
    if (controls_[i]->facts().stops)
      asks.back().least_gain = [control = controls_[i]](int64_t depth) { return control->least_gain(depth); };
  }
  return asks;
}

void Adaptive::review(const Ask& ask, Proposal& proposal, const std::vector<int64_t>& text, double) {
  Control* control = of(ask.drafter);
  if (control && control->facts().cheap)
    proposal.cut(control->cut(proposal.tokens, proposal.bucket, text, ask.most), {});
}

void Adaptive::told(const Outcome& round) {
  bool came = chosen_;
  chosen_ = false;
  for (size_t i = 0; i < drafters_.size(); ++i) {
    Drafter* drafter = drafters_[i];
    if (!controls_[i]) {
      came = came && drafter != round.winner;
      continue;
    }
    Control::Result result;
    result.came = came;
    result.rows = round.rows;
    result.pass_ms = round.pass_ms;
    result.draft_ms = drafters_.size() > 1 ? round.asked_ms(drafter) : round.draft_ms;
    if (drafter == round.winner) {
      result.guessed = true;
      result.guesses = round.proposal.size();
      result.depth = static_cast<int>(round.proposal.deepest());
      result.bucket = round.proposal.bucket;
      result.right = static_cast<int>(round.verdict.path.size());
      result.tested = round.proposal.tested(round.verdict.path);
      result.caught_up = drafter->caught_up();
      came = false;
    }
    controls_[i]->told(result);
  }
}

void Adaptive::lose(Drafter* drafter) {
  const auto at = std::find(drafters_.begin(), drafters_.end(), drafter);
  if (at != drafters_.end()) controls_.erase(controls_.begin() + (at - drafters_.begin()));
  Policy::lose(drafter);
}

}  // namespace edgespec
