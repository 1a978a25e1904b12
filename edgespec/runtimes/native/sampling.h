// From a row of logits to a token, as edgespec/decoding/sampling.py: the adjusted distribution, and sampling from it by
// the Gumbel-max trick.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "noise.h"

namespace edgespec {

class Prefix;

// How a request chooses tokens; its rules are applied in this order.
struct Sampling {
  std::vector<std::pair<int64_t, double>> bias;  // by token; -infinity forbids one
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  double temperature = 0;  // 0: greedy
  int64_t top_k = 0;       // 0: off
  double top_p = 1, min_p = 0;
  bool coupled = false, block = false;  // how sampled guesses are verified
  // Says which tokens may follow a prefix: a text and a path of guesses after it.  row: the logits there, after bias
  // and penalties.  allowed [columns]: to be set; all are 1.  It is asked for any prefix, in any order.
  std::function<void(const Prefix& prefix, const float* row, int64_t columns, uint8_t* allowed)> mask;

  bool greedy() const { return temperature == 0; }
  bool counts() const { return presence_penalty != 0 || frequency_penalty != 0; }
  bool counts_text() const { return repetition_penalty != 1 || counts(); }
  bool reads_text() const { return counts_text() || mask; }
  bool adjusts() const { return !bias.empty() || reads_text(); }
  bool plain_greedy() const { return greedy() && !adjusts(); }
  // Whether sampled guesses are verified by rejection sampling; else all of them by matching.
  bool rejects() const { return !greedy() && !coupled; }

  // Throws std::invalid_argument: a value outside its range, or a bias of a token outside the vocabulary.
  void check(int64_t vocab) const;
};

// The tokens before a row: the committed text, and the guesses on the path to the row, which are pushed and popped
// again.  Penalties read how often each token is among them.
class Prefix {
 public:
  // text: outlives this; what it has now is the prompt, of which only the repetition penalty counts tokens.  vocab: 0
  // where nothing reads counts.
  void begin(const std::vector<int64_t>& text, int64_t vocab);
  void commit(int64_t token) { count(token); }  // the newest token of the text
  void push(int64_t guess);
  void pop();

  const std::vector<int64_t>& text() const { return *text_; }
  const std::vector<int64_t>& path() const { return path_; }
  const std::vector<int64_t>& different() const { return different_; }          // tokens of both
  const std::vector<int64_t>& written() const { return written_; }              // the same after the prompt
  int32_t times(int64_t token) const { return written_times_[size_t(token)]; }  // after the prompt

 private:
  void count(int64_t token);

  const std::vector<int64_t>* text_ = nullptr;
  std::vector<int64_t> path_;
  std::vector<int32_t> times_, written_times_;  // [vocab]
  std::vector<int64_t> different_, written_;    // in the order in which they came
  int64_t length_ = 0, prompt_ = 0;
};

// Guesses of a prefix as long as it lives.
class Pushed {
 public:
  explicit Pushed(Prefix& prefix) : prefix_(prefix) {}
  ~Pushed() {
    for (; count_ > 0; --count_) prefix_.pop();
  }
  Pushed(const Pushed&) = delete;
  Pushed& operator=(const Pushed&) = delete;
  void push(int64_t token) {
    prefix_.push(token);
    ++count_;
  }

 private:
  Prefix& prefix_;
  int64_t count_ = 0;
};

// A distribution over some tokens.
struct Chances {
  std::vector<int64_t> ids;   // [k], ascending
  std::vector<double> probs;  // [k]

  double of(int64_t token) const;  // 0 where it is not among them
};

// The tokens that can be sampled.
struct Support {
  std::vector<int64_t> ids;    // [k], ascending
  std::vector<double> logits;  // [k], whose softmax are their probabilities

  Chances chances() const;
  int64_t draw(const Noise& noise, int64_t position, uint64_t stream) const;
};

// The first index of the largest; a NaN wins.
int64_t argmax(const float* row, int64_t count);

// The log-probability of a token under unadjusted logits.
double log_softmax_at(const float* logits, int64_t columns, int64_t token);

// The `most` likeliest tokens under unadjusted logits with their log-probabilities, the likeliest first.
std::vector<std::pair<int64_t, double>> likely_tokens(const float* logits, int64_t columns, int64_t most);

// Indices of the `most` largest, the largest first, the lowest on a tie; those of -infinity are left out.
std::vector<int64_t> best_of(const double* values, int64_t count, int64_t most);

// Throws Failure: `logits` of NaN, +infinity or nothing but -infinity.
[[noreturn]] void refuse_logits();

// Rows of logits as a request reads them, after bias, penalties and mask.
class Adjusted {
 public:
  explicit Adjusted(const Sampling& sampling) : sampling_(sampling) {}

  // The row itself where nothing changes it; valid until the next call.
  const float* row(const float* logits, int64_t columns, const Prefix& prefix);
  // The token that greedy decoding chooses.  Throws Failure.
  int64_t likeliest(const float* logits, int64_t columns, const Prefix& prefix);
  // Throws Failure.
  Support support(const float* logits, int64_t columns, const Prefix& prefix);

 private:
  const Sampling& sampling_;
  std::vector<float> changed_;
  std::vector<uint8_t> allowed_;
};

// A token by inversion of u in [0, 1); probabilities need not sum to 1.
int64_t draw(const Chances& p, double u);

}  // namespace edgespec
