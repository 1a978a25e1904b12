// Drafters of a small decoder that is conditioned on hidden states of the target, as edgespec/drafters/hidden_state.py:
// EAGLE-3 (arXiv 2503.01840), layers for multi-token prediction (arXiv 2412.19437), and DFlash (arXiv 2602.06036). They
// draw chains.
//
// Row i of the drafter's cache is of token i + 1 and of the target's states at token i.  So n tokens and the states of
// all tokens except the pending one make n - 1 rows, and the last one guesses.  Later steps use the drafter's own
// guesses and hidden states, and their rows are dropped after the round.
//
// DFlash has a row for every token, of the target's states alone.  All guesses come from one pass over the pending
// token and rows of a mask, which see each other.
#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "drawing.h"

namespace edgespec {

// A block of guesses.
struct BlockPart {
  int64_t rows = 0;     // that the drafter was trained with, the pending token's included; 0: it draws no blocks
  int64_t mask = 0;     // token of the rows where guesses will be
  bool anchor = false;  // the row of the pending token also guesses
};

class HiddenStateDrafter : public DrawingDrafter {
 public:
  // drafter: its own text.  vocab: of the drafter.  head: the tokens of the columns of its cut LM head, empty: it
  // is not.  Throws std::invalid_argument: it does not belong to this target.
  HiddenStateDrafter(NativeTarget& target, NativeTarget& drafter, std::string name, int64_t vocab,
                     const std::vector<int64_t>& head, BlockPart block = {});

  const char* name() const override { return name_.c_str(); }
  uint64_t nanoseconds() const override { return drafter_.nanoseconds(); }
  bool wants_states() const override { return true; }
  int64_t known() const override { return at_ + owed(); }
  bool caught_up() const override { return caught_up_; }
  DrafterFacts facts() const override;
  bool benchmark_step() override;
  void begin(const Request& request) override;
  void absorb(const Request& request, int64_t first, const Seen& seen) override;
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;
  void observe(const Proposal& proposal, const Verdict& verdict, const Seen& seen) override;

 protected:
  Row step(const Request& request, int64_t guess, bool best) override;

 private:
  int64_t owed() const { return int64_t(states_.size()) / width_; }  // rows of states_
  int64_t rows() const { return drafter_.length(); }
  void add(const Seen& seen, int64_t from);
  void settle(int64_t least);
  Row at(int32_t row, bool best);
  void guess_block(int64_t pending, int64_t length, bool best);
  int64_t guesses() const { return block_.rows - !block_.anchor; }
  std::vector<float> inputs(const int64_t* tokens, int64_t count, const float* states, int64_t columns);

  NativeTarget &target_, &drafter_;
  const std::string name_;
  const int64_t vocab_;
  const std::vector<int64_t>& head_;
  const int64_t columns_, hidden_, width_;  // of an input row, of an embedding, and of the target's states in a row
  const BlockPart block_;
  const int64_t deferred_;   // rows that are left to the pass that guesses
  edgespec_result found_{};  // of the last pass that guesses
  int32_t next_ = 0;         // row of a block's next guess
  int64_t length_ = 0;       // most guesses of the proposal
  // Invariant: the cache holds the rows before at_, or one more, and states_ those of row at_ and all after it, up to
  // the row before the pending token.
  std::vector<int64_t> tokens_;  // committed, the pending one last
  int64_t at_ = 0;
  std::vector<float> states_;
  bool sound_ = false;  // nothing failed since the cache was right
  bool caught_up_ = true;
  std::vector<float> own_;     // the drafter's hidden state of its last row
  std::vector<float> spread_;  // a row over the vocabulary of a cut LM head
  std::unordered_map<int64_t, std::vector<float>> embeddings_;
};

}  // namespace edgespec
