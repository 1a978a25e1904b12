// Drafters that sample their guesses from logits, as edgespec/drafters/sampling_drafts.py: a draft model, and the
// target itself with less of its weights.
#pragma once
#include <cstdint>
#include <vector>

#include "drafter.h"

namespace edgespec {

constexpr int64_t kMostNodes = 64;  // of a tree of guesses

class DrawingDrafter : public Drafter {
 protected:
  // The output of a draft after a token: its logits, or only the likeliest token and its logit.
  struct Row {
    const float* logits = nullptr;
    int64_t columns = 0;  // tokens from there on cannot be guessed
    int64_t best = -1;
    float value = 0;
  };

  // Runs the draft after one more guess, -1: after the committed tokens.  best: only the likeliest token is needed.
  virtual Row step(const Request& request, int64_t guess, bool best) = 0;

  // Samples up to `length` guesses, one after the other.  Throws Failure: damaged logits.
  // weak: whether none should follow a guess of this unadjusted probability; it is asked for each but the last.
  Proposal draw_chain(const Request& request, int64_t length, const std::function<bool(double)>& weak = {});
};

// A separate small model (arXiv 2211.17192, 2302.01318), whose slot follows the committed tokens by their longest
// common prefix.  It draws chains, or trees: `branch` is how many children each first choice has, or with several
// numbers those of a full tree by depth.
class DraftModel : public DrawingDrafter {
 public:
  // vocab: of the target.  own_vocab: of the draft.  head: the tokens of the columns of a cut LM head, empty: it is
  // not.  head_rows: tokens, the first ones, that the head scores while the text consists of them (arXiv 2502.14856),
  // 0: all.
  DraftModel(Target& model, int64_t vocab, int64_t own_vocab, const std::vector<int64_t>& head,
             std::vector<int64_t> branch, int64_t head_rows);

  const char* name() const override { return "speculative"; }
  uint64_t nanoseconds() const override { return model_.nanoseconds(); }
  std::vector<int64_t> rows(int64_t budget) const override;
  bool benchmark_step() override;
  bool caught_up() const override { return caught_up_; }
  void begin(const Request& request) override;
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;

 protected:
  Row step(const Request& request, int64_t guess, bool best) override;

 private:
  bool is_unknown(const std::vector<int64_t>& tokens, int64_t from) const;
  bool is_usual(const std::vector<int64_t>& tokens) const;
  Proposal draw_tree(const Request& request, int64_t length);
  std::vector<Row> level(const Request& request, const std::vector<int32_t>& nodes, const Proposal& tree,
                         size_t levels);
  edgespec_result feed(const Request& request, int64_t guess, bool keeps_last, bool best);
  Row row(const edgespec_result& found, int32_t at, std::vector<float>& spread) const;

  Target& model_;
  int64_t vocab_, own_vocab_;
  const std::vector<int64_t>& head_;
  std::vector<int64_t> branch_;
  int short_;    // tokens of the short head, 0: there is none
  int columns_;  // that the next passes score, 0: all
  bool caught_up_ = true;
  int64_t common_ = 0;                      // tokens of this request that the slot is known to begin with
  std::vector<std::vector<float>> spread_;  // rows over the vocabulary of a cut LM head
};

// The parts of the target that a self-draft leaves out (arXiv 2309.08168), and of which it reads only the high planes
// of int8 weights.
struct SkipSet {
  std::vector<int64_t> attention, mlp, high_attention, high_mlp;  // layers
  bool high_head = false;
  int64_t head_rows = 0;  // tokens, the first ones, that the LM head scores; 0: all
};

class SelfDraft : public DrawingDrafter {
 public:
  // confidence: of its guesses; it outlives this.
  SelfDraft(NativeTarget& target, const SkipSet& skip, Confidence& confidence);

  const char* name() const override { return "self-spec"; }
  DrafterFacts facts() const override { return {false, true, {}}; }
  bool benchmark_step() override;
  void begin(const Request& request) override;
  void observe(const Proposal& proposal, const Verdict& verdict, const Seen& seen) override;
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;

 protected:
  Row step(const Request& request, int64_t guess, bool best) override;

 private:
  Row run(int64_t token, int64_t offset, bool best);

  NativeTarget& target_;
  std::unique_ptr<bool[]> gates_;
  int columns_;
  Confidence& learned_;     // of all texts
  const Confidence first_;  // as it was given
  Confidence own_;          // of a reproducible text
  Confidence* confidence_;
  std::vector<double> sure_;  // draft probabilities of the last guesses
  int64_t offset_ = 0;
};

}  // namespace edgespec
