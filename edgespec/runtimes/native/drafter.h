// The hooks that the loop calls to have the next tokens guessed, as edgespec/decoding/drafter.py.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "control.h"
#include "proposal.h"
#include "target.h"

namespace edgespec {

// A request as its drafters see it; it outlives its rounds.
struct Request {
  const std::vector<int64_t>& tokens;  // committed; the last one, the pending token, is not in the target's slot
  const Sampling& sampling;
  const Noise& noise;
  Prefix& prefix;  // the tokens; it is as it was after a proposal
  const Reading& reading;
  bool reproducible = false;  // its seed decides the text together with how much is guessed
};

using LeastGain = std::function<double(int64_t depth)>;

// Hidden states of rows that the text keeps.
struct Seen {
  const float* hidden = nullptr;  // [rows, columns]; null: no drafter wanted them
  int32_t columns = 0;            // the residual stream after the last layer, and then auxiliary ones
  int32_t rows = 0;
  std::vector<int64_t> tokens;  // [rows] that were chosen from them, the pending one last; of a prompt: none
};

// A drafter never owns a loop over rounds.  What it throws costs the request its drafter, and not its text.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const char* name() const = 0;
  virtual void begin(const Request& request) = 0;
  virtual DrafterFacts facts() const { return {}; }
  // [budget + 1]: rows of the pass over its next proposal, cut at each depth.
  virtual std::vector<int64_t> rows(int64_t budget) const {
    std::vector<int64_t> found;
    for (int64_t depth = 0; depth <= budget; ++depth) found.push_back(1 + depth);
    return found;
  }
  // Guesses what follows the request's tokens, `budget` >= 1 deep at most.  least_gain: a drafter that stops early does
  // so where a guess more is expected to gain fewer tokens than this of the depth; empty: it does not.
  virtual Proposal propose(const Request& request, int64_t budget, const LeastGain& least_gain) = 0;
  virtual bool caught_up() const { return true; }     // whether its last proposal took its usual time
  virtual uint64_t nanoseconds() const { return 0; }  // in passes of the drafter's model
  virtual bool benchmark_step() { return false; }     // runs one draft step, to be timed; false: there is no such step
  // Whether it reads the target's auxiliary hidden states, also those of the prompt: a row for each token.
  virtual bool wants_states() const { return false; }
  virtual int64_t known() const { return 0; }  // tokens of the prompt whose states it needs no more
  // Takes states of the prompt from its token `first` on.
  virtual void absorb(const Request&, int64_t first, const Seen&) { (void)first; }
  virtual bool wants_hidden() const { return false; }  // whether the target's passes give hidden states
  // Learns what was accepted of a proposal, as it was cut; of an empty one where another drafter's was verified.
  virtual void observe(const Proposal&, const Verdict&, const Seen&) {}
};

}  // namespace edgespec
