// Drafters of heads next to the LM head, as edgespec/drafters/heads.py and edgespec/formulas/tree.py.
#pragma once
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "drafter.h"

namespace edgespec {

using HeadPath = std::vector<int32_t>;               // rank of each head's guess, from the root down
using HeadRanks = std::vector<std::vector<double>>;  // [head][rank]: share of positions where that guess is right

// The `most` nodes that are accepted most often, the best first, each with its chance: every beginning is a tree.
std::vector<std::pair<HeadPath, double>> grow_tree(const HeadRanks& ranks, size_t most);
// The tree of the highest predicted speed; none where no tree helps.  v: time of a pass over n rows, in plain passes.
// heads: that of computing the heads.
std::vector<HeadPath> best_tree(const HeadRanks& ranks, const std::function<double(int64_t)>& v, double heads);
// A chain of the first guesses.
std::vector<HeadPath> head_chain(size_t length);

// A group of the target's heads.
struct HeadGroup {
  int32_t number = 0;           // among the target's groups
  int32_t count = 0;            // heads
  std::vector<int64_t> tokens;  // of the columns of a cut LM head; empty: it is not cut
};

class Medusa : public Drafter {
 public:
  // group: outlives this.  cycles: passes that refine a chain, which is then as long as the budget.
  Medusa(NativeTarget& target, const HeadGroup& group, const char* name, std::vector<HeadPath> paths,
         int64_t cycles = 0);

  const char* name() const override { return name_; }
  DrafterFacts facts() const override;
  bool wants_hidden() const override { return true; }
  std::vector<int64_t> rows(int64_t budget) const override;
  bool benchmark_step() override;
  void begin(const Request&) override { hidden_.clear(); }  // the first round has none yet and is plain
  Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) override;
  void observe(const Proposal& proposal, const Verdict& verdict, const Seen& seen) override;

 private:
  struct Best {
    std::vector<int64_t> ids;   // [count, top]
    std::vector<float> values;  // [count, top]
  };
  Best best(int32_t top) const;
  Proposal block(int64_t pending, int64_t budget) const;

  NativeTarget& target_;
  const HeadGroup& group_;
  const char* name_;
  std::vector<HeadPath> paths_;  // parents before children, the likelier sibling first
  std::vector<int32_t> parents_;
  int64_t cycles_;
  int32_t top_ = 1;
  bool chain_ = true;
  std::vector<float> hidden_;  // of the row that chose the pending token
};

}  // namespace edgespec
