// Parts of a model: layers run separately, hidden states out and in, groups of heads.
#include "selftest_model.h"

namespace edgespec {
namespace {

using Gate = Model::Gate;
constexpr KvFormat kExact = kKvF16;

Given layers(Runner& runner, const std::vector<Row>& rows, int first, int last, const std::vector<Logits>& hidden,
             int threads) {
  Wanted wanted;
  for (int gate = 2 * first; gate < 2 * last; ++gate) wanted.gates.push_back(gate);
  wanted.gates.insert(wanted.gates.end(), {hidden.empty() ? Gate::kEmbed : Gate::kLoad, Gate::kStore});
  wanted.hidden = hidden;
  return runner.run(rows, threads, wanted);
}

void pass_layers(Runner& runner, int tokens, const std::string& name) {
  Wanted all = Wanted::plain(tokens);
  all.gates.push_back(Gate::kStore);
  runner.wipe();
  const Given expected = runner.run(chain(0, tokens), 3, all);
  for (int split = 0; split <= Model::kLayers; ++split) {
    runner.wipe();
    for (int from = 0; from < tokens; from += 7) {  // the front one row at a time, the back all at once
      const int n = std::min(7, tokens - from);
      std::vector<Logits> front;
      for (int i = 0; i < n; ++i) {
        std::vector<Row> row = chain(from + i, 1);
        front.push_back(layers(runner, row, 0, split, {}, 1).hidden[0]);
      }
      Wanted wanted = Wanted::plain(n);
      wanted.gates.clear();
      for (int gate = 2 * split; gate < 2 * Model::kLayers; ++gate) wanted.gates.push_back(gate);
      wanted.gates.insert(wanted.gates.end(), {Gate::kLoad, Gate::kStore, Gate::kLm});
      wanted.hidden = front;
      std::vector<Row> rows = chain(from, n);
      for (Row& row : rows) row.token = -5;  // not read
      const Given given = runner.run(rows, 3, wanted);
      for (int i = 0; i < n; ++i) {
        const std::string what = name + ", resumed after " + std::to_string(split) + " layers, row ";
        same(expected.hidden[from + i], given.hidden[i], what + std::to_string(from + i));
        same(expected.logits[from + i], given.logits[i], what + std::to_string(from + i));
      }
    }
  }
}

void pass_heads(Runner& runner, int tokens, const std::string& name) {
  constexpr int kCounts[] = {3, 3, 2};
  runner.wipe();
  const auto hidden = layers(runner, chain(0, tokens), 0, Model::kLayers, {}, 2).hidden;
  for (int group = 0; group < 3; ++group) {
    const int count = kCounts[group];
    Wanted one;
    one.gates = {Gate::kLoad, Gate::kGroup + group};
    one.heads = {0};
    std::vector<std::vector<Logits>> expected;  // [row][head]
    const Row nowhere{-1, 0, 0, 0, -1, 0};
    for (int r = 0; r < tokens; ++r) {
      one.hidden = {hidden[r]};
      expected.push_back(runner.run({nowhere}, 1, one).logits);
      if (static_cast<int>(expected.back().size()) != count) fail(name + ": another number of heads");
    }
    for (const int n : {2, 15, 16, 17, tokens}) {
      Wanted some;
      some.gates = one.gates;
      some.hidden.assign(hidden.begin(), hidden.begin() + n);
      for (int r = n - 1; r >= 0; r -= 2) some.heads.insert(some.heads.end(), {r, n - 1});  // any order, some twice
      const auto logits = runner.run(std::vector<Row>(n, nowhere), 1 + n % 4, some).logits;
      const size_t rows = some.heads.size();
      for (size_t i = 0; i < rows * count; ++i)
        same(expected[some.heads[i % rows]][i / rows], logits[i],
             name + ", group " + std::to_string(group) + ", " + std::to_string(n) + " rows, line " + std::to_string(i));
    }
    Wanted none = one;
    none.heads.clear();
    if (!runner.run({nowhere}, 2, none).logits.empty()) fail(name + ": heads of no row");
  }
}

void refused(Runner& runner, const Wanted& wanted, const std::string& why) {
  try {
    runner.run(chain(0, 3), 1, wanted);
  } catch (const std::invalid_argument& problem) {
    if (std::string(problem.what()).find(why) == std::string::npos) fail("refused for another reason: " + why);
    return;
  }
  fail("not refused: " + why);
}

}  // namespace

void pass_parts(const Model& model, const std::string& kind) {
  Runner runner(model, {kExact, kKvNone, kExact, false, 0}, 1, 128);
  pass_layers(runner, 33, kind);
  pass_heads(runner, 40, kind);

  Wanted wanted = Wanted::plain(3);
  wanted.gates.push_back(Gate::kGroup);
  refused(runner, wanted, "rows do not fit together");
  wanted.gates = {Gate::kLm};
  refused(runner, wanted, "neither gate is on");
  wanted.gates = {Gate::kLoad, Gate::kLm};
  refused(runner, wanted, "expected [3, 96]");
  wanted.hidden.assign(2, Logits(Model::kHidden));
  refused(runner, wanted, "expected [3, 96]");
}

}  // namespace edgespec
