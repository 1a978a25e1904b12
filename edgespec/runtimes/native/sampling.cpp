#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <limits>
#include <numeric>
#include <string>

#include "guarded.h"

namespace edgespec {
namespace {

constexpr int64_t kFirstNucleus = 64;  // candidates that top-p sorts first, then 16 times more
// in a support of more tokens, those this many nats below the best are considered only if their noise is large
constexpr size_t kMany = 4096;
constexpr double kNear = 8;
constexpr double kMostBias = 1e30, kLeastFactor = 1e-6, kMostFactor = 1e6, kMostPenalty = 2;

void expect(bool fits, const char* name, double value, const char* range) {
  if (!fits) refuse(std::string(name) + " " + std::to_string(value) + ": expected " + range);
}

bool within(double value, double least, double most) { return value >= least && value <= most; }

// Ascending: indices of the `most` largest, and of what ties with the last.
template <class Number>
std::vector<int64_t> top(const Number* values, int64_t count, int64_t most) {
  std::vector<int64_t> found;
  if (most >= count) {
    found.resize(size_t(count));
    std::iota(found.begin(), found.end(), int64_t(0));
    return found;
  }
  std::vector<Number> sorted(values, values + count);
  std::nth_element(sorted.begin(), sorted.begin() + (most - 1), sorted.end(), std::greater<Number>());
  const Number least = sorted[size_t(most - 1)];
  for (int64_t i = 0; i < count; ++i)
    if (values[i] >= least) found.push_back(i);
  return found;
}

// Ascending: indices of the fewest of a row that hold `top_p` of the mass.
std::vector<int64_t> nucleus(const std::vector<float>& row, double temperature, double top_p) {
  const int64_t count = int64_t(row.size());
  const float best = *std::max_element(row.begin(), row.end());
  const float divisor = std::max(static_cast<float>(std::min<double>(temperature, FLT_MAX)), FLT_MIN);
  double total = 0;
  for (float value : row) total += std::exp((value - best) / divisor);
  const double wanted = top_p * total;
  for (int64_t size = kFirstNucleus;; size *= 16) {
    std::vector<int64_t> order = top(row.data(), count, size * 2 < count ? size : count);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    double mass = 0;
    size_t kept = 0;
    while (kept < order.size() && !(mass >= wanted && kept))
      mass += std::exp((double(row[order[kept++]]) - double(best)) / temperature);
    if (mass >= wanted || int64_t(order.size()) == count) {
      order.resize(kept);
      std::sort(order.begin(), order.end());
      return order;
    }
  }
}

}  // namespace

void Sampling::check(int64_t vocab) const {
  const double most = std::numeric_limits<double>::max();
  expect(within(temperature, 0, most), "temperature", temperature, "a number >= 0 (0 = greedy)");
  expect(top_k >= 0, "top_k", double(top_k), "an integer >= 0 (0 = off)");
  expect(top_p > 0 && top_p <= 1, "top_p", top_p, "0 < top_p <= 1 (1 = off)");
  expect(within(min_p, 0, 1), "min_p", min_p, "0 <= min_p <= 1 (0 = off)");
  expect(within(repetition_penalty, kLeastFactor, kMostFactor), "repetition_penalty", repetition_penalty,
         "a number from 0.000001 to 1000000");
  for (const auto& [name, value] :
       {std::pair{"presence_penalty", presence_penalty}, std::pair{"frequency_penalty", frequency_penalty}})
    expect(within(value, -kMostPenalty, kMostPenalty), name, value, "a number from -2 to 2 (0 = off)");
  for (const auto& [token, added] : bias) {
    if (token < 0 || token >= vocab)
      refuse("a bias of token " + std::to_string(token) + ": the vocabulary has " + std::to_string(vocab));
    expect(within(added, -kMostBias, kMostBias) || added == -HUGE_VAL, "bias", added, "a number up to 1e30, or -inf");
  }
}

// ---- the text before a row -----------------------------------------------------------------------------------------

void Prefix::begin(const std::vector<int64_t>& text, int64_t vocab) {
  text_ = &text;
  path_.clear();
  times_.assign(size_t(vocab), 0);
  written_times_.assign(size_t(vocab), 0);
  different_.clear();
  written_.clear();
  length_ = 0;
  prompt_ = int64_t(text.size());
  for (int64_t token : text) count(token);
}

void Prefix::count(int64_t token) {
  ++length_;
  if (times_.empty()) return;
  if (!times_[size_t(token)]++) different_.push_back(token);
  if (length_ > prompt_ && !written_times_[size_t(token)]++) written_.push_back(token);
}

void Prefix::push(int64_t guess) {
  path_.push_back(guess);
  count(guess);
}

void Prefix::pop() {
  const int64_t token = path_.back();
  path_.pop_back();
  --length_;
  if (times_.empty()) return;
  if (!--times_[size_t(token)]) different_.pop_back();
  if (!--written_times_[size_t(token)]) written_.pop_back();  // guesses come after the prompt
}

// ---- distributions -------------------------------------------------------------------------------------------------

double Chances::of(int64_t token) const {
  const auto at = std::lower_bound(ids.begin(), ids.end(), token);
  return at != ids.end() && *at == token ? probs[size_t(at - ids.begin())] : 0;
}

Chances Support::chances() const {
  Chances found{ids, std::vector<double>(ids.size())};
  const double best = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (size_t i = 0; i < ids.size(); ++i) total += found.probs[i] = std::exp(logits[i] - best);
  for (double& p : found.probs) p /= total;
  return found;
}

int64_t Support::draw(const Noise& noise, int64_t position, uint64_t stream) const {
  const uint64_t state = noise.state(position, stream);
  double far = -HUGE_VAL;
  uint64_t least = 0;  // bits that a token below `far` needs
  if (ids.size() > kMany) {
    far = *std::max_element(logits.begin(), logits.end()) - kNear;
    double beaten = -HUGE_VAL;
    for (size_t i = 0; i < ids.size(); ++i)
      if (logits[i] >= far) beaten = std::max(beaten, logits[i] + gumbel_of(Noise::bits(state, ids[i])));
    least = static_cast<uint64_t>((std::exp(-std::exp(far - beaten)) - 1e-9) / kUnit);
  }
  size_t best = ids.size();
  double most = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint64_t bits = Noise::bits(state, ids[i]);
    if (logits[i] < far && bits < least) continue;
    const double value = logits[i] + gumbel_of(bits);
    if (best < ids.size() && !(value > most)) continue;
    best = i;
    most = value;
  }
  return ids[best];
}

int64_t draw(const Chances& p, double u) {
  double total = 0;
  for (double one : p.probs) total += one;
  double mass = 0;
  int64_t last = p.ids.front();
  for (size_t i = 0; i < p.ids.size(); ++i) {
    mass += p.probs[i];
    if (mass > u * total) return p.ids[i];
    if (p.probs[i] > 0) last = p.ids[i];
  }
  return last;
}

int64_t argmax(const float* row, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(row[i])) return i;
    if (row[i] > row[best]) best = i;
  }
  return best;
}

// The highest logit, and the logarithm of the sum of exponentials above it.
static std::pair<float, double> normalizer(const float* logits, int64_t columns) {
  const float best = *std::max_element(logits, logits + columns);
  double total = 0;
  for (int64_t i = 0; i < columns; ++i) total += std::exp(logits[i] - best);
  return {best, std::log(total)};
}

double log_softmax_at(const float* logits, int64_t columns, int64_t token) {
  const auto [best, total] = normalizer(logits, columns);
  return double(logits[token] - best) - total;
}

std::vector<std::pair<int64_t, double>> likely_tokens(const float* logits, int64_t columns, int64_t most) {
  const auto [best, total] = normalizer(logits, columns);
  const std::vector<double> wide(logits, logits + columns);
  std::vector<std::pair<int64_t, double>> found;
  for (int64_t token : best_of(wide.data(), columns, most))
    found.emplace_back(token, double(logits[token] - best) - total);
  return found;
}

std::vector<int64_t> best_of(const double* values, int64_t count, int64_t most) {
  std::vector<int64_t> found = top(values, count, most);
  found.erase(std::remove_if(found.begin(), found.end(), [&](int64_t i) { return !(values[i] > -HUGE_VAL); }),
              found.end());
  std::stable_sort(found.begin(), found.end(), [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  if (int64_t(found.size()) > most) found.resize(size_t(most));
  return found;
}

void refuse_logits() {
  throw Failure(EDGESPEC_BROKEN, "expected finite logits, got NaN, +inf or nothing but -inf: the model is damaged");
}

// ---- a row ---------------------------------------------------------------------------------------------------------

const float* Adjusted::row(const float* logits, int64_t columns, const Prefix& prefix) {
  if (!sampling_.adjusts()) return logits;
  changed_.assign(logits, logits + columns);
  for (const auto& [token, added] : sampling_.bias)
    if (token < columns) changed_[size_t(token)] += static_cast<float>(added);
  const auto factor = static_cast<float>(sampling_.repetition_penalty);
  if (sampling_.repetition_penalty != 1)
    for (int64_t token : prefix.different()) {
      if (token >= columns) continue;
      float& score = changed_[size_t(token)];
      score = score < 0 ? score * factor : score / factor;
    }
  if (sampling_.counts())
    for (int64_t token : prefix.written())
      if (token < columns)
        changed_[size_t(token)] -=
            static_cast<float>(sampling_.presence_penalty + sampling_.frequency_penalty * prefix.times(token));
  if (!sampling_.mask) return changed_.data();
  allowed_.assign(size_t(columns), 1);
  sampling_.mask(prefix, changed_.data(), columns, allowed_.data());
  bool any = false;
  for (int64_t i = 0; i < columns && !any; ++i) any = allowed_[size_t(i)] && changed_[size_t(i)] != -HUGE_VALF;
  // a row of a draft that has no token which is allowed stays as it is: its guess will be refused
  for (int64_t i = 0; i < columns && any; ++i)
    if (!allowed_[size_t(i)]) changed_[size_t(i)] = -HUGE_VALF;
  return changed_.data();
}

int64_t Adjusted::likeliest(const float* logits, int64_t columns, const Prefix& prefix) {
  const float* row = this->row(logits, columns, prefix);
  const int64_t best = argmax(row, columns);
  if (!std::isfinite(row[best])) refuse_logits();
  return best;
}

Support Adjusted::support(const float* logits, int64_t columns, const Prefix& prefix) {
  const float* whole = row(logits, columns, prefix);
  const int64_t best = argmax(whole, columns);  // a NaN wins, so looking at the winner is enough
  if (!std::isfinite(whole[best])) refuse_logits();
  if (sampling_.greedy()) return {{best}, {0}};
  std::vector<int64_t> ids = top(whole, columns, sampling_.top_k ? sampling_.top_k : columns);
  std::vector<float> kept(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) kept[i] = whole[ids[i]];
  if (sampling_.top_p < 1) {
    const std::vector<int64_t> inside = nucleus(kept, sampling_.temperature, sampling_.top_p);
    for (size_t i = 0; i < inside.size(); ++i) {
      ids[i] = ids[size_t(inside[i])];
      kept[i] = kept[size_t(inside[i])];
    }
    ids.resize(inside.size());
    kept.resize(inside.size());
  }
  Support found;
  const double least = sampling_.min_p > 0 ? std::log(sampling_.min_p) : -HUGE_VAL;
  for (size_t i = 0; i < ids.size(); ++i) {
    // shifted before it is divided: a tiny temperature must not overflow
    const double scaled = (double(kept[i]) - double(whole[best])) / sampling_.temperature;
    if (!(scaled >= least)) continue;
    found.ids.push_back(ids[i]);
    found.logits.push_back(scaled);
  }
  return found;
}

}  // namespace edgespec
