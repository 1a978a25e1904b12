// Control against Python's: rounds that Control of edgespec/control/adaptive.py decided on, decided on again.
//
//   control_replay FILE        exit 0: every decision is the same
#include <cmath>

#include "replays.h"

using namespace edgespec;

namespace {

// The first round that differs, or -1.
int replay(const Json& one) {
  DrafterFacts facts{one["cheap"].flag("cheap", false), one["stops"].flag("stops", false), {}};
  for (const auto& [bucket, known] : one["rates"].members()) facts.rates[std::stoi(bucket)] = rates(known);
  CostModel::Points verify;
  for (const auto& [rows, cost] : one["verify"].members()) verify[std::stoi(rows)] = cost.real("verify", 0);
  Learned learned{CostModel(verify, real(one, "draft")), {}, {}, 0};
  Control control(facts, learned, int(whole(one, "most")), rates(one["prior"]));
  std::vector<int64_t> text;
  int number = 0;
  for (const Json& round : one["rounds"].items()) {
    if (whole(round, "begins")) control.begin(one["reproducible"].flag("reproducible", false));
    const int64_t budget = std::min(whole(round, "budget"), control.most());
    std::vector<int64_t> rows;
    for (int64_t depth = 0; depth <= budget; ++depth) rows.push_back(1 + depth);
    for (int64_t token : round["text"].numbers("text")) text.push_back(token);
    int64_t length = control.choose(rows, real(round, "required"));
    const std::vector<int64_t> guesses = round["guesses"].numbers("guesses");
    const int bucket = int(whole(round, "bucket"));
    if (facts.cheap && length) length = control.cut(guesses, bucket, text, length);
    bool same = length == whole(round, "length");
    const std::vector<Json>& gains = round["gains"].items();
    for (size_t i = 0; i < gains.size() && same; ++i)
      same = std::fabs(control.least_gain(int64_t(i) + 1) - gains[i].real("gains", 0)) < 1e-9;
    if (!same) return number;
    Control::Result result;
    result.guesses = result.depth = int(whole(round, "verified"));
    result.guessed = result.guesses > 0;
    result.bucket = bucket;
    result.right = int(whole(round, "right"));
    result.tested = int(whole(round, "tested"));
    result.caught_up = whole(round, "caught_up") != 0;
    result.rows = result.guesses + 1;
    result.draft_ms = real(round, "draft_ms");
    result.pass_ms = real(round, "pass_ms");
    control.told(result);
    ++number;
  }
  return -1;
}

}  // namespace

int main(int, char** words) { return replay_all(words[1], replay); }
