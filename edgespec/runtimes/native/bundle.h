// A bundle's folder: what its manifest (edgespec.json) says of the models that native operators run, and those models.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "codec.h"
#include "drawing.h"
#include "heads.h"
#include "hidden_state.h"
#include "json.h"

namespace edgespec {

// Throws std::invalid_argument: it is no tree of at most kMostNodes guesses.
void check_branch(const std::vector<int64_t>& branch);

struct ModelPart {
  std::string graph;  // its file, a path
  int64_t context = 0, vocab = 0, extra_rows = 0;
  std::vector<int64_t> head;  // the tokens of a cut LM head's columns; empty: it is not cut
  int32_t attention = EDGESPEC_ATTENTION_EXACT;
  std::string attention_name;  // of a default that the C interface does not offer; else empty
};

struct MethodPart {
  int64_t guesses = 4;
  SkipSet skip;
  std::vector<int64_t> branch;
  int64_t head_rows = 0;         // tokens, the first ones, that a draft model's head scores in usual texts; 0: all
  double predicted_speedup = 0;  // on the exporting machine; 0: not measured
  bool measured = false;         // whether the export measured its rates
  Rates rates;                   // acceptance by position, as published or as the export measured it
  Confidence confidence;         // of the guesses of a self-draft
  std::optional<double> draft_cost, first_cost;
  bool at_once = false;  // drafting takes the same time for any number of guesses
  HeadGroup heads;
  HeadRanks ranks;
};

}  // namespace edgespec

struct edgespec_bundle {
  // cache: bytes for weights of the target that are read when a pass needs them, 0: all are mapped.  hosted: the caller
  // runs the passes, and no graph is opened.  Throws Failure, std::invalid_argument: there is no such bundle, or it has
  // no graphs of native operators.
  edgespec_bundle(const std::string& folder, int32_t threads, uint64_t cache = 0, bool hosted = false);

  const std::string folder;
  const bool hosted, streamed;
  std::unique_ptr<edgespec::Codec> codec;  // null: there is none
  edgespec::ModelPart target_part, draft_part, drafter_part;
  edgespec::OpenedModel target, draft, drafter;  // null where there is none; drafter: of the target's hidden states
  edgespec::BlockPart block;                     // of the drafter
  std::map<std::string, edgespec::MethodPart> methods;
  std::map<std::string, std::string> elsewhere;  // methods of the manifest that cannot run here -> why, what to do
  // The methods that auto chooses from with their predicted speeds over plain decoding, the fastest first; n-grams
  // last, where nothing predicts their gain.
  std::vector<std::pair<std::string, double>> candidates() const;
  std::string architecture;    // of the target
  std::set<int32_t> adapters;  // numbers of those that were added to the target
  std::string weights;         // SHA-256 of those of the target; empty: the manifest does not say
  std::vector<int64_t> stops;  // tokens that end a text
  edgespec::CostModel::Points
      verify;         // times of passes by rows on the exporting machine; empty: not known, or it was busy
  bool busy = false;  // that machine had other work
  std::atomic<int64_t> users{1};

  void release() {
    if (--users == 0) delete this;
  }
};
