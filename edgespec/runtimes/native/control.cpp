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
constexpr size_t kPending = 8;                 // proposals of a cheap drafter that wait for the text to judge them
constexpr double kLeast = 0.01, kMost = 0.99;  // bounds of a prior rate
constexpr double kLike = 8, kDecay = 0.99;     // of confidence: guesses that its prior counts as

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

// The length of the highest predicted speed; 0 where none exceeds what is required.
Best best_length(const Rates& rates, const std::vector<double>& costs, double required) {
  Best found{0, required, 0};
  double total = 1, chance = 1;
  for (size_t length = 1; length < costs.size(); ++length) {
    chance *= rates[std::min(length, rates.size()) - 1];
    total += chance;
    const double speed = total / costs[length];
    found.highest = std::max(found.highest, speed);
    if (speed > found.speed) found = {int64_t(length), speed, found.highest};
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
  decision_ = {};
  unverified_.clear();
  looks_ = {};
}

int64_t Control::choose(const std::vector<int64_t>& rows, double required) {
  required_ = required;
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
    std::vector<int64_t> rows;
    for (int64_t depth = 0; depth <= budget; ++depth) rows.push_back(1 + std::min(depth, count));
    decision_ = decide(bucket, rows);
    kept = std::min(decision_.length, count);
    if (!kept) {
      unverified_.push_back({int64_t(text.size()), guesses, bucket});
      if (unverified_.size() > kPending) unverified_.erase(unverified_.begin());
    }
  }
  if (!kept) look(1, 1);
  return kept;
}

double Control::promised(const std::vector<int64_t>& rows) {
  if (facts_.cheap) return 1;
  const auto [length, speed] = best(bucket(known_->bucket), prices(rows));
  return length ? std::max(speed, 1.0) : 1;
}

// Adds what a round of a cheap drafter gave.
void Control::look(double tokens, double steps) {
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
  found.length = std::min(kProbe, int64_t(costs.size()) - 1);
  found.probing = found.length > 0;
  for (size_t n = 1; n < costs.size() && found.probing; ++n)  // else guesses could not gain if all were accepted
    found.promising = found.promising || double(n + 1) / costs[n] > required_;
  return found;
}

// The length of the highest predicted speed, and the speed.
std::pair<int64_t, double> Control::best(Bucket& record, const std::vector<double>& costs) {
  const Rates& mine = rates(record);
  if (!facts_.stops || costs.size() == 1) {
    Best found = best_length(mine, costs, required_);
    const double highest = found.highest;
    if (!found.length && highest > kClose * required_)  // near plain decoding: what is not known well is tried
      found = best_length(hopeful(mine, record.weight, record.evidence), costs, required_);
    return {found.length, found.length ? found.speed : highest};
  }
  // the time to risk, and the measured speed of rounds, for a drafter that decides when to stop
  const double speed = pace(record, costs).speed();
  return {speed > required_ ? int64_t(costs.size()) - 1 : 0, speed};
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
    if (facts_.cheap) look(round.right + 1, price);
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
    if (one.right == most && most < count)
      left.push_back(std::move(one));
    else
      learn(one.bucket, int(one.right), int(std::min(one.right + 1, count)));
  }
  unverified_ = std::move(left);
}

}  // namespace edgespec
