// Drafting without a model, as edgespec/drafters/ngram.py: tokens that followed the same context earlier in this text,
// or in texts that a store was built of, are likely to follow again.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "drafter.h"
#include "mapping.h"

namespace edgespec {

constexpr int kLongestGram = 4;  // tokens of the longest key

// A store of `edgespec ngram build` (edgespec/drafters/ngram_stores.py), mapped.  Its checksums are not compared.
class NGramStore {
 public:
  // Throws std::invalid_argument: not a store, damaged, or of another vocabulary.
  NGramStore(const std::string& path, int64_t vocab);

  struct Hit {
    int32_t n;  // tokens that matched, 0: none
    int64_t token;
    int32_t seen;  // how often it followed
  };
  // The token after the longest known end of a text, if it followed in at least a `share` of the cases.
  Hit likely(const int64_t* tail, size_t count, double share) const;

 private:
  Mapping file_;
  size_t entries_ = 0;
  int64_t vocab_;
};

// Drafts from a text that the caller expects, as edgespec/drafters/predicted.py: an edited file is mostly unchanged.
class Predicted : public Drafter {
 public:
  // prompt: tokens before the text.
  Predicted(std::vector<int64_t> expected, int64_t prompt)
      : expected_(std::move(expected)), prompt_(prompt), read_(prompt) {}

  const char* name() const override { return "predicted"; }
  void begin(const Request&) override {}
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;

 private:
  int64_t found(const int64_t* last) const;

  std::vector<int64_t> expected_;
  int64_t prompt_, read_;
  int64_t at_ = 0;    // index of the next guess; -1: not known
  int64_t last_ = 0;  // where it was last
};

class NGram : public Drafter {
 public:
  explicit NGram(const NGramStore* store) : store_(store) {}

  const char* name() const override { return "ngram"; }
  void begin(const Request& request) override;
  DrafterFacts facts() const override;
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;

 private:
  using Key = std::array<uint32_t, kLongestGram>;  // the last token first
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Followed {
    int64_t last;                                   // index after its most recent occurrence
    int64_t seen = 1;                               // how often its only continuation followed
    std::vector<std::pair<int64_t, int64_t>> more;  // once a second one did: all, and how often, as they came
  };
  struct Match {
    int n = 0;                                          // tokens, 0: there is none
    std::array<const Followed*, kLongestGram> known{};  // of each key's length to this one, less 1
  };

  void follow(const std::vector<int64_t>& tokens, size_t known);
  void push(int64_t token);
  Match match(const std::vector<int64_t>& tail) const;
  int64_t likely(const Match& found) const;
  Proposal from_store(int beyond, int64_t budget) const;
  std::vector<int64_t> end(size_t count) const;

  const NGramStore* store_;
  std::vector<int64_t> text_;
  std::array<std::unordered_map<Key, Followed, Hash>, kLongestGram> index_;  // by length of the key, less 1
};

}  // namespace edgespec
