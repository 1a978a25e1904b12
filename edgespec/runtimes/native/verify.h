// Which guesses are accepted, as edgespec/decoding/verify.py: one function for chains and trees, deterministic and
// sampled guesses.  It is lossless.
#pragma once
#include "edgespec.h"
#include "proposal.h"

namespace edgespec {

// Verifies a proposal against the target's rows of a pass over it: row 0 follows the pending token, row i + 1 node i.
// prefix: the text; it is as it was afterwards.  Throws Failure: a row that was needed is damaged.
Verdict verify(const Proposal& proposal, const edgespec_result& rows, const Sampling& sampling, const Noise& noise,
               Prefix& prefix);

}  // namespace edgespec
