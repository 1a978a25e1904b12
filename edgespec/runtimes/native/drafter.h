// The hooks that the loop calls to have the next tokens guessed, as edgespec/decoding/drafter.py.
#pragma once
#include <cstdint>
#include <vector>

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
};

// A drafter never owns a loop over rounds.  What it throws costs the request its drafter, and not its text.
class Drafter {
 public:
  virtual ~Drafter() = default;
  virtual const char* name() const = 0;
  virtual void begin(const Request& request) = 0;
  // Guesses what follows the request's tokens, `budget` >= 1 deep at most.
  virtual Proposal propose(const Request& request, int64_t budget) = 0;
  virtual uint64_t nanoseconds() const { return 0; }  // in passes of the drafter's model
  // Learns what was accepted of a proposal, as it was cut; of an empty one where another drafter's was verified.
  virtual void observe(const Proposal&, const Verdict&) {}
};

}  // namespace edgespec
