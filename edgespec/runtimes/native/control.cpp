#include "control.h"

#include <algorithm>
#include <cmath>

namespace edgespec {
namespace {

constexpr double kPrior = 0.5;                 // acceptance where nothing is known
constexpr int kWait = 16, kLongestWait = 128;  // plain rounds before a probe; doubled while probes fail
constexpr int kRest = 8;                       // rounds that skip a costly drafter that is not worth asking
constexpr size_t kMostBuckets = 64;
constexpr double kKeep = 0.97, kKeepLearned = 0.998;  // what a round leaves of the weight of older ones
constexpr double kWeight = 16, kWeightLearned = 16;   // guesses that learned and given rates count as
constexpr double kAssumed = 3;                        // the same of rates that were never measured
constexpr double kHope = 0.75, kClose = 0.85;         // standard deviations added to rates this close to plain decoding
constexpr double kPace = 48;                          // plain steps that the prior of a pace counts as
constexpr int64_t kProbe = 2;                         // guesses of a probe
constexpr int kStreak = 6;                            // probes in a row, while all their guesses are accepted
constexpr size_t kPending = 8;               // proposals of a cheap drafter that wait for the text to judge them
constexpr double kCredit = 2.5, kFull = 10;  // plain steps of a budget, at first and at most
constexpr double kLeastBudget = 0.5;         // without which trying again is pointless
constexpr int64_t kAgain = 96, kLongestAgain = 4096;
constexpr Pace kPlainPace{1, 1};
constexpr double kLooks = 16;                  // plain steps that what is assumed of looks counts as
constexpr double kLeast = 0.01, kMost = 0.99;  // bounds of a prior rate
constexpr double kLike = 8, kDecay = 0.99;     // of confidence: guesses that its prior counts as

// Rows of a pass by the guesses that are verified, of which a chain has `count`.
std::vector<int64_t> rows_of(int64_t count, int64_t budget) {
  std::vector<int64_t> rows;
  for (int64_t depth = 0; depth <= budget; ++depth) rows.push_back(1 + std::min(depth, count));
  return rows;
}

Rates hopeful(const Rates& rates, double weight, const Evidence& evidence) {
  Rates found;
  for (size_t at = 0; at < rates.size(); ++at) {
    const double seen = weight + (at < evidence.tested.size() ? evidence.tested[at] : 0);
    found.push_back(std::min(rates[at] + kHope * std::sqrt(rates[at] * (1 - rates[at]) / seen), kMost));
  }
  return found;
}

struct Best {
  int64_t length;
  double speed, highest;  // of any length
};

// The length of the highest predicted speed; 0 where none exceeds what is required.  limit: plain steps that a round
// may lose if all its guesses are wrong.
Best best_length(const Rates& rates, const std::vector<double>& costs, double required, double limit = HUGE_VAL) {
  Best found{0, required, 0};
  double total = 1, chance = 1;
  for (size_t length = 1; length < costs.size(); ++length) {
    chance *= rates[std::min(length, rates.size()) - 1];
    total += chance;
    const double speed = total / costs[length];
    found.highest = std::max(found.highest, speed);
    if (speed > found.speed && costs[length] - 1 <= limit) found = {int64_t(length), speed, found.highest};
  }
  return found;
}

template <class T>
T* find_in(std::vector<std::pair<int, T>>& all, int number) {
  const auto at = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.first == number; });
  return at == all.end() ? nullptr : &at->second;
}

}  // namespace

// ---- estimates
// -------------------------------------------------------------------------------------------------------

void Evidence::learn(int right, int tested_now, double keep) {
  const size_t length = std::max(tested.size(), size_t(tested_now));
  tested.resize(length);
  accepted.resize(length);
  for (size_t at = 0; at < length; ++at) {
    tested[at] = keep * tested[at] + (int(at) < tested_now);
    accepted[at] = keep * accepted[at] + (int(at) < right);
  }
}

void Pace::add(double more, double time, double keep) {
  tokens = keep * tokens + more;
  steps = keep * steps + time;
}

Pace Pace::with(const Pace& prior, double weight) const { return {tokens + weight * prior.speed(), steps + weight}; }

double best_speed(const Rates& rates, const std::vector<double>& costs) { return best_length(rates, costs, 1).highest; }

Rates posterior(const Rates& prior, double weight, const Evidence& evidence, size_t length) {
  Rates found;
  double moved = 0;
  for (size_t at = 0; at < length; ++at) {
    const double before = prior[std::min(at, prior.size() - 1)];
    double rate = std::min(std::max(before + moved, kLeast), kMost);
    if (at < evidence.tested.size()) rate = (evidence.accepted[at] + weight * rate) / (evidence.tested[at] + weight);
    moved = rate - before;
    found.push_back(rate);
  }
  return found;
}

double Standing::round_loss_limit() const { return budget >= kFull ? HUGE_VAL : std::max(budget / 2, 0.0); }

bool Standing::exhausted() const { return budget < kLeastBudget; }

void Standing::accrue(double share) {
  ++now;
  budget = std::min(budget + share, kFull);
}

void Standing::back_off() {
  failed = true;
  until = now + wait;
  wait = std::min(2 * wait, kLongestAgain);
}

void Standing::gain() {
  wait = kAgain;
  failed = false;
  gained = true;
}

void Standing::charge(double lost) { budget = std::max(std::min(budget - lost, kFull), -kCredit); }

Confidence::Confidence(const Rates& rates, double mean) : mean_(mean) {
  static constexpr double kGiven[] = {0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98};
  for (size_t i = 0; i < rates_.size(); ++i) rates_[i] = rates.size() == rates_.size() ? rates[i] : kGiven[i];
}

size_t Confidence::range(double probability) {
  return size_t(std::upper_bound(kBounds.begin(), kBounds.end(), probability) - kBounds.begin());
}

void Confidence::learn(double probability, bool accepted) {
  const size_t at = range(probability);
  rates_[at] += std::max(1 - kDecay, 1 / (double(seen_[at]) + kLike + 1)) * (accepted - rates_[at]);
  mean_ += std::max(1 - kDecay, 1 / (double(tested_) + kLike + 1)) * (accepted - mean_);
  ++seen_[at];
  ++tested_;
}

// ---- decisions
// -------------------------------------------------------------------------------------------------------

Control::Control(DrafterFacts facts, Learned& learned, int most, Rates prior)
    : facts_(std::move(facts)), learned_(learned), most_(most), prior_(std::move(prior)) {
  if (prior_.empty()) prior_ = {kPrior};
  given_ = prior_ != Rates{kPrior};
  begin(false);
}

void Control::begin(bool reproducible) {
  reproducible_ = reproducible;
  if (reproducible) own_ = {learned_.cost.given(), {}, {}, 0};
  known_ = reproducible ? &own_ : &learned_;
  costs_ = &known_->cost;
  buckets_.clear();
  priced_version_ = -1;
  rest_ = 0;
  required_ = 1;
  limit_ = HUGE_VAL;
  eager_ = false;
  decision_ = {};
  unverified_.clear();
  looks_ = {};
}

int64_t Control::choose(const std::vector<int64_t>& rows, double required, double limit) {
  required_ = required;
  limit_ = limit;
  decision_ = {};
  if (rest_) {
    decision_.resting = decision_.made = true;
    return 0;
  }
  if (facts_.cheap) return std::min(int64_t(rows.size()) - 1, most_);
  chosen_rows_ = rows;
  decision_ = decide(known_->bucket, rows);
  return decision_.length;
}

double Control::least_gain(int64_t depth) const {
  const double worth = std::max(decision_.speed, required_);
  const size_t at = size_t(depth);
  return worth * (steps(depth + 1, chosen_rows_[at + 1]) - steps(depth, chosen_rows_[at]));
}

int64_t Control::cut(const std::vector<int64_t>& guesses, int bucket, const std::vector<int64_t>& text,
                     int64_t budget) {
  judge(text);
  const int64_t count = int64_t(guesses.size());
  int64_t kept = 0;
  if (count) {
    decision_ = decide(bucket, rows_of(count, budget));
    kept = std::min(decision_.length, count);
    if (!kept) set_aside({int64_t(text.size()), guesses, bucket});
  }
  if (!kept) count_look(1, 1);
  return kept;
}

void Control::look(const std::vector<int64_t>& guesses, int number, const std::vector<int64_t>& text, int64_t budget) {
  judge(text);
  const int64_t count = int64_t(guesses.size());
  int64_t length = 0;
  if (count) {
    const std::vector<double>& costs = prices(rows_of(count, budget));
    length = best(bucket(number), costs).first;
    set_aside({int64_t(text.size()), guesses, number, length, costs[size_t(length)]});
  }
  if (!length) count_look(1, 1);
}

void Control::set_aside(Unverified one) {
  unverified_.push_back(std::move(one));
  if (unverified_.size() > kPending) unverified_.erase(unverified_.begin());
}

double Control::speed(const std::vector<int64_t>& rows) {
  if (facts_.cheap) return looks_.with(known_->pace.with(kPlainPace, kLooks), kLooks).speed();
  Bucket& record = bucket(known_->bucket);
  const std::vector<double>& costs = prices(rows);
  return facts_.stops ? pace(record, costs).speed() : best_length(rates(record), costs, 1).highest;
}

double Control::measured(int rows, double draft_ms, double pass_ms) const {
  if (pass_ms != 0) return learned_.cost.v(rows) * (1 + draft_ms / pass_ms);
  const double plain = learned_.cost.plain_ms();
  return draft_ms / (plain != 0 ? plain : 1);
}

double Control::promised(const std::vector<int64_t>& rows) {
  if (facts_.cheap) return 1;
  const auto [length, speed] = best(bucket(known_->bucket), prices(rows));
  return length ? std::max(speed, 1.0) : 1;
}

// Adds what a round of a cheap drafter gave.
void Control::count_look(double tokens, double steps) {
  looks_.add(tokens, steps, kKeep);
  known_->pace.add(tokens, steps, kKeepLearned);
}

Control::Decision Control::decide(int number, const std::vector<int64_t>& rows) {
  const std::vector<double>& costs = prices(rows);
  Bucket& record = bucket(number);
  Decision found;
  found.made = true;
  found.bucket = number;
  std::tie(found.best, found.speed) = best(record, costs);
  found.length = found.best;
  if (found.best) return found;
  if (record.waited < record.wait && (record.known || !record.evidence.empty())) return found;  // no probe is due
  // as many guesses as the round may lose
  found.length = std::min(kProbe, int64_t(costs.size()) - 1);
  while (found.length > 0 && costs[size_t(found.length)] - 1 > limit_) --found.length;
  found.probing = found.length > 0;
  for (size_t n = 1; n < costs.size() && found.probing; ++n)  // else guesses could not gain if all were accepted
    found.promising = found.promising || double(n + 1) / costs[n] > required_;
  return found;
}

// The length of the highest predicted speed, and the speed.
std::pair<int64_t, double> Control::best(Bucket& record, const std::vector<double>& costs) {
  const Rates& mine = rates(record);
  if (!facts_.stops || costs.size() == 1) {
    Best found = best_length(mine, costs, required_, limit_);
    const double highest = found.highest;
    if (!found.length && highest > kClose * required_)  // near plain decoding: what is not known well is tried
      found = best_length(hopeful(mine, record.weight, record.evidence), costs, required_, limit_);
    return {found.length, found.length ? found.speed : highest};
  }
  // the time to risk, and the measured speed of rounds, for a drafter that decides when to stop
  const double speed = pace(record, costs).speed();
  int64_t most = int64_t(costs.size()) - 1;
  while (most > 0 && costs[size_t(most)] - 1 > limit_) --most;
  return {speed > required_ ? most : 0, speed};
}

const Rates& Control::rates(Bucket& record) {
  if (record.rates.empty())
    record.rates = posterior(record.base, record.weight, record.evidence, size_t(std::max<int64_t>(most_, 1)));
  return record.rates;
}

Pace Control::pace(const Bucket& record, const std::vector<double>& costs) const {
  const double highest = best_length(record.base, costs, 1).highest;
  return record.pace.with(known_->pace.with({highest, 1}, kPace), kPace);
}

// The cost of each depth in plain steps, up to where the proposal ends.
const std::vector<double>& Control::prices(const std::vector<int64_t>& rows) {
  if (costs_->version() == priced_version_ && rows == priced_rows_) return prices_;
  priced_version_ = costs_->version();
  priced_rows_ = rows;
  prices_ = {1};
  for (size_t depth = 1; depth < rows.size() && rows[depth] != rows[depth - 1]; ++depth)
    prices_.push_back(steps(int64_t(depth), rows[depth]));
  return prices_;
}

Control::Bucket& Control::bucket(int number) {
  if (Bucket* known = find_in(buckets_, number)) return *known;
  if (buckets_.size() == kMostBuckets) buckets_.erase(buckets_.begin());
  const Evidence* found = find_in(known_->evidence, number);
  const Evidence none, &seen = found ? *found : none;
  const auto expected = facts_.rates.find(number);
  const Rates& prior = expected == facts_.rates.end() ? prior_ : expected->second;
  Bucket made;
  made.base = posterior(prior, given_ ? kWeightLearned : kAssumed, seen,
                        std::max({prior.size(), seen.tested.size(), size_t(1)}));
  made.known = given_ || found;
  made.weight = made.known ? kWeight : kAssumed;
  made.wait = kWait;
  made.waited = eager_ ? kWait : 0;
  buckets_.emplace_back(number, std::move(made));
  return buckets_.back().second;
}

// ---- learning
// --------------------------------------------------------------------------------------------------------

void Control::told(const Result& round) {
  const Decision decision = decision_;
  decision_ = {};
  if (round.came) count(decision, round);
  if (round.guessed) {
    learn(round.bucket, round.right, round.tested);
    const double price = round.depth ? steps(round.depth, round.guesses + 1) : 1;
    if (facts_.cheap) count_look(round.right + 1, price);
    Bucket& record = bucket(round.bucket);
    if (facts_.stops) {
      record.pace.add(round.right + 1, price, kKeep);
      known_->pace.add(round.right + 1, price, kKeepLearned);
    }
    if (decision.probing) {
      if (round.tested == round.right && record.streak < kStreak) {
        record.waited = record.wait;
      } else {
        record.wait = std::min(2 * record.wait, kLongestWait);
        record.streak = 0;
      }
    }
  }
  if (reproducible_ || rest_) return;
  learned_.cost.observe_pass(round.rows, round.pass_ms);
  if (round.guessed && round.caught_up) learned_.cost.observe_draft(int(drafted(round.depth)), round.draft_ms);
}

void Control::count(const Decision& decision, const Result& round) {
  if (round.guessed && round.guesses) known_->bucket = round.bucket;
  if (decision.resting) {
    --rest_;
    return;
  }
  if (!decision.made) return;
  Bucket& record = bucket(decision.bucket);
  if (decision.best || record.drafting > 0) record.drafting = decision.best > 0;
  if (decision.best) {
    record.wait = kWait;
    record.waited = record.streak = 0;
  } else if (decision.probing) {
    record.waited = 0;
    record.streak += decision.promising ? 1 : kStreak;
  } else {
    rest_ = facts_.cheap ? 0 : std::max(std::min(kRest, record.wait - record.waited) - 1, 0);
    record.waited += 1 + rest_;
  }
}

// Adds verified guesses to the evidence of the text, and of all.
void Control::learn(int number, int right, int tested) {
  Bucket& record = bucket(number);
  record.evidence.learn(right, tested, kKeep);
  record.rates.clear();
  Evidence* known = find_in(known_->evidence, number);
  if (!known) {
    known_->evidence.push_back({number, {}});
    known = &known_->evidence.back().second;
  }
  known->learn(right, tested, kKeepLearned);
  if (known_->evidence.size() > kMostBuckets) known_->evidence.erase(known_->evidence.begin());
}

// Compares guesses that no pass verified with the text that followed.
void Control::judge(const std::vector<int64_t>& text) {
  std::vector<Unverified> left;
  for (Unverified& one : unverified_) {
    const int64_t count = int64_t(one.guesses.size()), most = std::min(count, int64_t(text.size()) - one.at);
    while (one.right < most && text[size_t(one.at + one.right)] == one.guesses[size_t(one.right)]) ++one.right;
    if (one.right == most && most < count) {
      left.push_back(std::move(one));
      continue;
    }
    learn(one.bucket, int(one.right), int(std::min(one.right + 1, count)));
    if (one.length) count_look(double(std::min(one.right, one.length) + 1), one.steps);
  }
  unverified_ = std::move(left);
}

}  // namespace edgespec
