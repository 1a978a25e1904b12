// Whole passes: rows, threads, slots, trees, moves, KV formats, blocks of a pool.
#include <stdexcept>
#include <utility>

#include "selftest_model.h"

namespace edgespec {
namespace {

// One row at a time, one thread: what everything is compared with.
std::vector<Logits> reference(Runner& runner, int tokens) {
  runner.wipe();
  std::vector<Logits> all;
  for (int i = 0; i < tokens; ++i) all.push_back(runner.run(chain(i, 1), 1)[0]);
  return all;
}

void pass_chunks(Runner& runner, const std::vector<Logits>& expected, int rows, int threads, const std::string& name) {
  runner.wipe();
  const int tokens = static_cast<int>(expected.size());
  for (int from = 0; from < tokens; from += rows) {
    const int n = std::min(rows, tokens - from);
    const auto logits = runner.run(chain(from, n), threads);
    for (int i = 0; i < n; ++i)
      same(expected[from + i], logits[i],
           name + ", " + std::to_string(rows) + " rows, " + std::to_string(threads) + " threads, token " +
               std::to_string(from + i));
  }
}

// Three slots in one pass, at different places of the sequence.
void pass_slots(Runner& runner, const std::vector<Logits>& expected, int threads, const std::string& name) {
  runner.wipe();
  const int last = static_cast<int>(expected.size());
  int at[3] = {0, 0, 0};
  for (int turn = 0; at[0] < last; ++turn) {
    std::vector<Row> rows;
    std::vector<int> positions;
    for (int slot = 0; slot < 3; ++slot) {
      const int n = std::min(last - at[slot], slot == 0 ? 13 : slot == 1 ? 5 : turn % 3 ? 1 : 0);
      const auto more = chain(at[slot], n, slot, static_cast<int>(rows.size()));
      rows.insert(rows.end(), more.begin(), more.end());
      for (int i = 0; i < n; ++i) positions.push_back(at[slot] + i);
      at[slot] += n;
    }
    const auto logits = runner.run(rows, threads);
    for (size_t r = 0; r < rows.size(); ++r)
      same(expected[positions[r]], logits[r],
           name + ", slot " + std::to_string(rows[r].slot) + " of several, token " + std::to_string(positions[r]));
  }
}

// A tree of proposals, whose rows are stored in any order: each has the bits of the chain of its ancestors, decoded one
// by one in order.  Then a branch is accepted by moving it there, and the sequence continues as if nothing had
// happened.
void pass_tree(Runner& runner, const std::vector<Logits>& expected, int start, int threads, const std::string& name) {
  constexpr int kBranch = 3, kAway = 7;
  const auto begin = [&] {
    runner.wipe();
    for (int from = 0; from < start; from += 40) runner.run(chain(from, std::min(40, start - from)), threads);
  };
  std::vector<Row> tree;
  const auto grow = [&](int64_t token, int parent, int64_t place) {
    const int64_t position = parent < 0 ? start : tree[parent].position + 1;
    tree.push_back({token, position, 0, start, parent, place});
    return static_cast<int>(tree.size()) - 1;
  };
  int wrong = -1, right = -1;
  std::vector<int> branch;
  for (int i = 0; i < kBranch; ++i) {
    wrong = grow((token_at(start + i) + 1) % Model::kVocab, wrong, start + i);
    right = grow(token_at(start + i), right, start + kAway - i);
    branch.push_back(right);
  }
  for (int i = 0; i < 9; ++i) grow(7 * i + 1, i % 2 ? wrong : branch[i % kBranch], start + 24 - i);

  begin();
  const auto all = runner.run(tree, threads);
  const std::string after = ", after " + std::to_string(start);
  for (int i = 0; i < kBranch; ++i)
    same(expected[start + i], all[branch[i]], name + after + ", branch of a tree, row " + std::to_string(i));
  begin();
  for (size_t leaf = 0; leaf < tree.size(); ++leaf) {
    std::vector<Row> path;
    for (int64_t row = static_cast<int64_t>(leaf); row >= 0; row = tree[row].parent)
      path.insert(path.begin(), tree[row]);
    Logits last;
    for (Row row : path) {
      row.place = row.visible = row.position;
      row.parent = -1;
      last = runner.run({row}, 1)[0];
    }
    same(last, all[leaf], name + after + ", node " + std::to_string(leaf) + " of a tree");
  }
  begin();
  runner.run(tree, threads);
  std::vector<int64_t> moves;
  for (int i = 0; i < kBranch; ++i) moves.insert(moves.end(), {0, start + kAway - i, start + i});
  const int next = start + kBranch;
  const auto logits = runner.run(chain(next, 12), threads, moves);
  for (int i = 0; i < 12; ++i)
    same(expected[next + i], logits[i], name + ", after moves, token " + std::to_string(next + i));
}

// Two slots continue from the beginning of a third, which itself continues.
void pass_shared(Runner& runner, const std::vector<Logits>& expected, int threads, const std::string& name) {
  constexpr int kCommon = kKvBlock + 5;
  const int left = std::min(11, static_cast<int>(expected.size()) - kCommon);
  runner.wipe();
  for (int from = 0; from < kCommon; from += 19) runner.run(chain(from, std::min(19, kCommon - from)), threads);
  for (const int slot : {1, 2}) runner.copy_prefix_from(slot, 0, kCommon);
  std::vector<Row> rows;
  for (int slot = 0; slot < 3; ++slot) {
    const auto more = chain(kCommon, left, slot, static_cast<int>(rows.size()));
    rows.insert(rows.end(), more.begin(), more.end());
  }
  const auto logits = runner.run(rows, threads);
  for (size_t r = 0; r < rows.size(); ++r)
    same(expected[rows[r].position], logits[r], name + ", shared blocks, slot " + std::to_string(rows[r].slot));

  for (const int32_t wrong : {-1, 1000, INT32_MIN, INT32_MAX}) {
    int32_t& entry = runner.table(1)[0];
    const int32_t right = std::exchange(entry, wrong);
    bool refused = false;
    try {
      runner.run(chain(kCommon, 1, 1), threads);
    } catch (const std::invalid_argument&) { refused = true; }
    if (!refused) fail(name + ": block " + std::to_string(wrong) + " is not refused");
    entry = right;
  }
}

}  // namespace

void passes(bool brief) {
  const int tokens = brief ? 72 : 150;
  const Format formats[] = {
      {kKvF32, kKvNone, kKvF32, false, 0},      {kKvF16, kKvNone, kKvF16, false, 0},
      {kKvInt8, kKvNone, kKvInt8, false, 0},    {kKvInt8, kKvNone, kKvF16, false, 64},
      {kKvInt4, kKvNone, kKvInt8, false, 64},   {kKvInt4, kKvNone, kKvF16, false, 0},
      {kKvNomad1, kKvNone, kKvInt8, false, 64}, {kKvNomad2, kKvNone, kKvF16, false, 64},
      {kKvNomad2, kKvNone, kKvF32, false, 0},   {kKvF16, kKvNomad2, kKvF16, true, 64},
      {kKvF16, kKvNomad1, kKvInt8, true, 0},    {kKvF32, kKvInt4, kKvF32, true, 64},
      {kKvF16, kKvInt4, kKvF16, false, 0},
  };
  int tried = 0;
  const auto check = [&](const Model& model, const Format& format, const std::string& kind,
                         const std::vector<int>& sizes, bool high = false) {
    Runner runner(model, format, 3, 2 * tokens), pool(model, format, 3, 2 * tokens, true);
    runner.high = pool.high = high;
    const auto expected = reference(runner, tokens);
    const std::string name = kind + ", " + format.name();
    for (const int rows : sizes) pass_chunks(runner, expected, rows, 1 + tried++ % 4, name);
    for (const int threads : {1, 3}) pass_slots(runner, expected, threads, name);
    for (const int start : {0, 29, 45, 125})
      if (start + 15 < tokens) pass_tree(runner, expected, start, 2, name);
    pass_slots(pool, expected, 3, name + ", a pool");
    pass_tree(pool, expected, tokens > 125 + 15 ? 125 : 29, 2, name + ", a pool");
    if (tokens > kKvBlock + 5) pass_shared(pool, expected, 2, name);
  };
  std::vector<int> every;
  for (int rows = 1; rows <= 40; ++rows) every.push_back(rows);
  const Model model("q4", 1);
  if (brief) {
    for (const int i : {0, 4, 9}) check(model, formats[i], "q4", {3, 40});
    Runner plain(model, formats[5], 1, 150), pool(model, formats[5], 3, 150, true);
    pass_shared(pool, reference(plain, 144), 2, "q4, " + formats[5].name());
    pass_parts(model, "q4");
    return;
  }
  for (const Format& format : formats)
    check(model, format, "q4",
          format.ring && format.values == kKvInt8 ? every : std::vector<int>{2, 3, 15, 16, 17, 33, 40});
  for (int kind = kQ8; kind < kF32; ++kind)
    if (!is_ggml(static_cast<Kind>(kind)))  // whose rows are whole groups: the hashes have their rows
      check(Model(kKinds[kind].name, 2), formats[1], kKinds[kind].name, {3, 16, 40});
  check(Model("p8", 2), formats[1], "p8, high planes alone", {3, 16, 40}, true);

  // long enough for several parts of a sequence that are merged
  Runner runner(model, formats[2], 1, 1700);
  const auto expected = [&] {
    std::vector<Logits> all;
    for (int from = 0; from < 1700; from += 20) {
      const auto more = runner.run(chain(from, 20), 1);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  pass_chunks(runner, expected, 40, 4, "long sequence");
  pass_chunks(runner, expected, 33, 2, "long sequence");
  for (int from = 1690; from < 1700; ++from)
    same(expected[from], runner.run(chain(from, 1), 3)[0], "long sequence, one row");

  // gates leave out what they should: the same for one row as for many
  Runner gated(model, formats[0], 1, 64);
  for (const int off : {1, 2, 12, 15}) {
    gated.wipe();
    const auto all = gated.run(chain(0, 20), 3, {}, off);
    gated.wipe();
    for (int i = 0; i < 20; ++i)
      same(all[i], gated.run(chain(i, 1), 1, {}, off)[0], "gates, token " + std::to_string(i));
  }
  for (int kind = kQ4; kind < kF32; ++kind)
    if (!is_ggml(static_cast<Kind>(kind))) pass_parts(Model(kKinds[kind].name, 3), kKinds[kind].name);
}

}  // namespace edgespec
