// Guesses of a drafter, and the verdict on them, as edgespec/decoding/proposal.py.
#pragma once
#include <cstdint>
#include <vector>

#include "sampling.h"

namespace edgespec {

// Guessed tokens after the pending token, parents before children; none is plain decoding.
struct Proposal {
  std::vector<int64_t> tokens;   // [n]
  std::vector<int32_t> parents;  // [n], -1: the pending token; empty: a chain
  std::vector<Chances> probs;    // [n], the distribution q that each was sampled from; empty: they are deterministic
  bool replacement = true;       // whether siblings were sampled with replacement
  int bucket = 0;                // how sure the drafter is: control keeps one record of acceptance for each

  int32_t size() const { return static_cast<int32_t>(tokens.size()); }
  bool empty() const { return tokens.empty(); }
  bool chain() const { return parents.empty(); }
  int32_t parent(int32_t node) const { return chain() ? node - 1 : parents[size_t(node)]; }
  int32_t depth(int32_t node) const;  // nodes from the pending token to it, itself included
  int32_t deepest() const;            // depth of the deepest node
  std::vector<int32_t> children(int32_t node) const;
  // Depths whose guess was tested, given the accepted path: its own, and that of a rejected one.
  int32_t tested(const std::vector<int32_t>& path) const;
  // Counts the tokens on the path to a node, itself included.
  void push_path(int32_t node, Pushed& pushed) const;
  // The tokens that would have followed an accepted path: in a tree the drafter's first choices.
  std::vector<int64_t> rejected(const std::vector<int32_t>& path) const;
  // Cuts nodes deeper than `budget`, and all nodes below a token that ends the text.
  void cut(int64_t budget, const std::vector<int64_t>& stops);
};

struct Verdict {
  std::vector<int32_t> path;  // accepted nodes, from the pending token down
  int64_t next = -1;          // the token after them
};

}  // namespace edgespec
