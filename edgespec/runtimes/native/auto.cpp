#include "auto.h"

#include <algorithm>
#include <cmath>

namespace edgespec {
namespace {

constexpr double kShare = 0.012;  // of all rounds: plain steps that looking may cost in the long run
constexpr double kTried = 1, kPays = 1.01;
constexpr int kCheck = 16;  // rounds between two judgements
// how much more than the one in use another must be estimated at: tried here, or not, or left in this text
constexpr double kRival = 1.05, kUntried = 1, kReturn = 1.3;
constexpr double kBelief = 32;     // weight, in plain steps, of the estimate compared with measured rounds
constexpr double kKeep = 0.985;    // what a round leaves of the weight of older ones
constexpr double kOff = 2;         // a round's measured time is within this factor of the estimate
constexpr double kLook = 0.25;     // most plain steps that looking without a guess is counted as
constexpr double kPassing = 0.01;  // of a plain step: a look that takes less is made while another is in use

}  // namespace

void Auto::begin(bool reproducible) {
  chosen_ = false;
  seeded_ = reproducible;
  own_.assign(candidates_.size(), Standing());
  in_use_ = {};
  begun_.clear();
  out_.clear();
  left_.clear();
  look_ms_.clear();
  for (const Candidate& one : candidates_)
    if (one.made.control) one.made.control->begin(seeded_);
  take(next());
  if (in_use_.which >= 0) enter(in_use_.which);
}

std::vector<Ask> Auto::choose(int64_t budget) {
  depth_ = budget;
  if (in_use_.which < 0 && standing(0).now % kCheck == 0) {
    const int which = next();
    if (which >= 0) take(which);
  }
  if (in_use_.which >= 0 && drafters_.size() == first_.size()) enter(in_use_.which);
  limit_ = in_use_.which < 0 ? HUGE_VAL : standing(in_use_.which).round_loss_limit();
  std::vector<Ask> asks = Adaptive::choose(budget);
  if (!seeded_) add_lookers(budget, asks);
  return asks;
}

// Asks cheap candidates that are not in use for proposals, if that takes almost no time.
void Auto::add_lookers(int64_t budget, std::vector<Ask>& asks) {
  const double plain = plain_ms();
  if (plain == 0) return;
  for (int at = 0; at < count(); ++at) {
    if (!candidates_[size_t(at)].cheap || at == in_use_.which || out_.count(at)) continue;
    const auto took = look_ms_.find(at);
    if (took != look_ms_.end() && took->second > kPassing * plain) {
      took->second = HUGE_VAL;  // not again in this text
      continue;
    }
    try {
      const Control& found = made(at);
      asks.push_back({candidates_[size_t(at)].made.drafter, std::min(budget, found.most()), {}, true});
    } catch (const std::exception&) { out_.insert(at); }  // counted when it becomes the candidate in use
  }
}

void Auto::review(const Ask& ask, Proposal& proposal, const std::vector<int64_t>& text, double ms) {
  if (!ask.looks) return Adaptive::review(ask, proposal, text, ms);
  for (int at = 0; at < count(); ++at) {
    if (!control(at) || candidates_[size_t(at)].made.drafter != ask.drafter) continue;
    control(at)->look(proposal.tokens, proposal.bucket, text, ask.most);
    const double plain = plain_ms(), limit = kPassing * (plain == 0 ? HUGE_VAL : plain);
    const auto known = look_ms_.find(at);
    look_ms_[at] = 0.9 * (known == look_ms_.end() ? 0.5 * limit : known->second) + 0.1 * std::min(ms, 2 * limit);
  }
  proposal = {};
}

// Milliseconds of a plain step; 0: not known.
double Auto::plain_ms() const {
  for (int at = 0; at < count(); ++at)
    if (control(at) && control(at)->cost().plain_ms() != 0) return control(at)->cost().plain_ms();
  return 0;
}

void Auto::told(const Outcome& round) {
  for (int at = 0; at < count(); ++at) standing(at).accrue(kShare / count());
  Adaptive::told(round);
  if (drafters_.size() == first_.size() || in_use_.which < 0) return;
  count_round(*control(in_use_.which), round, round.winner == candidates_[size_t(in_use_.which)].made.drafter);
}

void Auto::lose(Drafter* drafter) {
  int which = drafter ? -1 : in_use_.which;
  for (int at = 0; at < count() && drafter; ++at)
    if (control(at) && candidates_[size_t(at)].made.drafter == drafter) which = at;
  if (which < 0) {
    first_.erase(std::remove(first_.begin(), first_.end(), drafter), first_.end());
    return Adaptive::lose(drafter);
  }
  out_.insert(which);
  standing(which).back_off();
  if (which != in_use_.which) return;
  take(int(out_.size()) == count() ? -1 : next());
}

// ---- decisions
// -------------------------------------------------------------------------------------------------------

double Auto::estimate(int which) {
  const Candidate& one = candidates_[size_t(which)];
  // what earlier texts have made must not matter where the text is reproducible
  if (!one.made.control || (seeded_ && !begun_.count(which))) return one.promise;
  Control& mine = *one.made.control;
  return mine.speed(one.made.drafter->rows(std::min(depth_, mine.most())));
}

// Adds a round of the candidate in use.  own: the proposal was its.
void Auto::count_round(Control& control, const Outcome& round, bool own) {
  const double plain = control.cost().plain_ms();
  const double tokens = own ? double(round.verdict.path.size() + 1) : 1;
  const double expected = own ? control.price(round.proposal.deepest(), round.proposal.size() + 1) : 1;
  double took = expected, draft_ms = round.draft_ms;
  if (!first_.empty()) draft_ms = round.asked_ms(candidates_[size_t(in_use_.which)].made.drafter);
  if (plain != 0 && !control.reproducible()) {
    if (!own)
      took = 1 + std::min(draft_ms / (round.pass_ms != 0 ? round.pass_ms : plain), kLook);
    else
      took = std::min(std::max(control.measured(round.rows, draft_ms, round.pass_ms), took / kOff), took * kOff);
  }
  // a wrong clock must not make a candidate free of charge
  standing(in_use_.which).charge(std::max(took, expected) - tokens);
  in_use_.pace.add(tokens, took, kKeep);
  if (++in_use_.rounds % kCheck == 0) judge(control);
}

// The speed of the candidate in use, corrected by the results of its rounds.
double Auto::gain() { return in_use_.pace.with({estimate(in_use_.which), 1}, kBelief).speed(); }

// Keeps the candidate in use, or switches.
void Auto::judge(const Control& control) {
  const int which = in_use_.which;
  Standing& mine = standing(which);
  const double now = gain();
  const bool spent = mine.exhausted() || !control.affordable();
  if (now < kPays || spent) return switch_candidate(now, spent);
  if (in_use_.pace.speed() >= kPays) mine.gain();
  const int rival = best_candidate(which);
  if (rival < 0) return;
  const double factor = left_.count(rival) ? kReturn : this->control(rival) ? kRival : kUntried;
  if (estimate(rival) <= factor * now) return;
  left_.insert(which);
  take(rival);
}

// Changes to the next candidate, or none, where the one in use is not faster, or has spent its budget.
void Auto::switch_candidate(double gain, bool spent) {
  const int which = best_candidate(in_use_.which);
  const bool looking =
      candidates_[size_t(in_use_.which)].cheap && !spent;  // it may stay where nothing else is to be had
  if (which < 0 && looking) return;
  Standing& mine = standing(in_use_.which);
  if (gain >= kPays && mine.gained)
    mine.gained = false;  // bad luck, or a busy machine: it waits for its budget alone
  else if (!looking)
    mine.back_off();
  take(which < 0 ? next() : which);
}

// The speed of a candidate; one that was too slow before gets another try after its waiting time.  One that keeps
// proposing without verification gets none: its gain is known.
double Auto::hope(int which) {
  const double found = estimate(which);
  if (looks_on(which)) return found >= kPays ? found : 0;
  return standing(which).failed ? std::max(found, candidates_[size_t(which)].promise) : found;
}

bool Auto::looks_on(int which) const {
  const auto took = look_ms_.find(which);
  return which != in_use_.which && took != look_ms_.end() && took->second < HUGE_VAL;
}

// The allowed candidate of the highest estimate that is not expected to lose, or -1.
int Auto::best_candidate(int besides) {
  int best = -1;
  double highest = 0;
  for (int at = 0; at < count(); ++at) {
    if (at == besides || !ready(at)) continue;
    const double found = hope(at);
    if (found < kTried || (best >= 0 && found <= highest)) continue;
    best = at;
    highest = found;
  }
  return best;
}

// The best, else the cheap candidate, if it is affordable, else plain decoding.
int Auto::next() {
  int found = best_candidate();
  for (int at = 0; at < count() && found < 0; ++at)
    if (candidates_[size_t(at)].cheap && ready(at) && !looks_on(at)) found = at;
  return found;
}

// Makes a candidate if it is its first turn, and lets its control begin if it has not begun this text.
Control& Auto::made(int which) {
  Candidate& one = candidates_[size_t(which)];
  if (!one.made.control) {
    one.made = one.make();
    one.made.control->begin(seeded_);
  }
  begun_.insert(which);
  return *one.made.control;
}

// Makes a candidate the active one, and lets its control begin again if it returns.
void Auto::enter(int which) {
  const bool returns = begun_.count(which) && !candidates_[size_t(which)].cheap;
  Control& found = made(which);
  if (returns) found.begin(seeded_);
  found.set_eager(standing(which).failed);
  controls_.assign(first_.size(), nullptr);
  controls_.push_back(&found);
  drafters_ = first_;
  drafters_.push_back(candidates_[size_t(which)].made.drafter);
}

// Puts a candidate in use.  Those that needed to read the text from its beginning are out.
void Auto::take(int which) {
  in_use_ = {};
  in_use_.which = which;
  for (int at = 0; at < count(); ++at)
    if (candidates_[size_t(at)].from_start && at != which) out_.insert(at);
  controls_.assign(first_.size(), nullptr);
  drafters_ = first_;
}

}  // namespace edgespec
