// Whole passes: rows, threads, slots, trees, moves, KV formats.
#include "selftest.h"

namespace edgespec {
namespace {

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// A decoder of two layers with sizes that fill neither tiles nor blocks.
struct Model {
  static constexpr int kHidden = 96, kHeads = 4, kKv = 2, kDim = 24, kRotary = 20, kInner = 80, kVocab = 100;
  static constexpr int kPositions = 2048, kLayers = 2;
  std::vector<Array<uint8_t>> weights;
  Program program;

  explicit Model(const std::string& kind, uint64_t seed) : random_(seed) {
    const bool channels = kind == "c8";
    const int table = matrix(kVocab, kHidden), cos = angles(false), sin = angles(true);
    const std::string form = channels ? "c8" : "q4";
    std::string text = "floats 0 96\nfloats 1 96\nfloats 2 80\nacts 0 96\nacts 1 96\nacts 2 80\nacts 3 96\n";
    text += "embed w=" + std::to_string(table) + " kind=q4 n=100 k=96 out=0\n";
    for (int layer = 0; layer < kLayers; ++layer) {
      text += "gate index=" + std::to_string(2 * layer) + " skip=5\n";
      text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=" + form + " out=0\n";
      text +=
          "heads act=0 w=" + std::to_string(matrix((kHeads + 2 * kKv) * round_up(kDim, kTile), kHidden, kind, kDim)) +
          " kind=" + kind + " k=96 bias=" + vector((kHeads + 2 * kKv) * kDim) +
          " dim=24 heads=4 kv=2 rotary=20 cos=" + std::to_string(cos) + " sin=" + std::to_string(sin) +
          " qnorm=" + (layer ? vector(kDim) : "-1") + " knorm=" + (layer ? vector(kDim) : "-1") +
          " eps=1e-5 layer=" + std::to_string(layer) + " scale=0.2\n";
      text +=
          "attend out=1 layer=" + std::to_string(layer) + " heads=4 kv=2 dim=24 window=" + (layer ? "0" : "90") + "\n";
      text += "quantize x=1 k=96 kind=" + form + " out=1\n";
      text += "linear act=1 w=" + std::to_string(matrix(kHidden, kHeads * kDim, kind)) + " kind=" + kind +
              " n=96 k=96 out=0 add=1\n";
      text += "gate index=" + std::to_string(2 * layer + 1) + " skip=" + (channels ? "4" : "3") + "\n";
      text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=" + form + " out=0\n";
      text += "glu act=0 gate=" + std::to_string(matrix(kInner, kHidden, kind)) +
              " up=" + std::to_string(matrix(kInner, kHidden, kind)) + " kind=" + kind + " n=80 k=96 out=2\n";
      if (channels) text += "quantize x=2 k=80 kind=c8 out=2\n";
      text += "linear act=2 w=" + std::to_string(matrix(kHidden, kInner, kind)) + " kind=" + kind +
              " n=96 k=80 out=0 add=1\n";
    }
    text += "quantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=q4 out=3 rows=1\n";
    text += "logits act=3 w=" + std::to_string(table) + " kind=q4 n=100 k=96\n";
    program = Program::parse(text);
  }

 private:
  // A packed matrix; rows beyond head_dim in each head are zero.
  int matrix(int n, int k, const std::string& name = "q4", int dim = 0) {
    const Kind kind = name == "q4" ? kQ4 : name == "q8" ? kQ8 : kC8;
    Array<uint8_t> packed(packed_bytes(kind, n, k));
    for (int t = 0; t < tiles_of(n); ++t) {
      auto tile = make_tile(random_, kind, k);
      for (int c = 0; c < kTile; ++c) {
        const int row = t * kTile + c, padded = round_up(dim, kTile);
        if (dim ? row % padded >= dim : row >= n) clear(tile.get(), kind, k, c);
      }
      std::copy(tile.begin(), tile.end(), packed.get() + t * tile.size());
    }
    return keep(std::move(packed));
  }
  static void clear(uint8_t* tile, Kind kind, int k, int column) {
    if (kind == kC8) {
      std::memset(tile + size_t(blocks_of(k)) * 512 + size_t(column) * 4, 0, 4);
      return;
    }
    for (int block = 0; block < blocks_of(k); ++block)
      std::memset(tile + size_t(block / 2) * (kind == kQ4 ? 576 : 1088) + block % 2 * 32 + column * 2, 0, 2);
  }
  std::string vector(int n) {
    Array<uint8_t> bytes(size_t(n) * 4);
    for (int i = 0; i < n; ++i) put(bytes, i, random_.uniform(0.5f, 1.5f));
    return std::to_string(keep(std::move(bytes)));
  }
  int angles(bool sine) {
    Array<uint8_t> bytes(size_t(kPositions) * kRotary / 2 * 4);
    for (int p = 0; p < kPositions; ++p)
      for (int i = 0; i < kRotary / 2; ++i) {
        const double angle = p * std::pow(1e4, -2.0 * i / kRotary);
        put(bytes, size_t(p) * kRotary / 2 + i, static_cast<float>(sine ? std::sin(angle) : std::cos(angle)));
      }
    return keep(std::move(bytes));
  }
  static void put(const Array<uint8_t>& bytes, size_t i, float x) { std::memcpy(bytes.get() + i * 4, &x, 4); }
  int keep(Array<uint8_t> bytes) {
    weights.push_back(std::move(bytes));
    return static_cast<int>(weights.size()) - 1;
  }

  Random random_;
};

struct Format {
  KvFormat keys, codes, values;
  bool read_codes;
  int ring;
  std::string name() const {
    return std::string(kFormatNames[keys]) + "/" + kFormatNames[codes] + "/" + kFormatNames[values] +
           (read_codes ? " read by codes" : "") + (ring ? " with recent keys" : "");
  }
};

struct Row {
  int64_t token, position, slot, visible, parent, place;
};

using Logits = std::vector<float>;  // of one row

// The cache of some slots and what it takes to run passes on it.
class Runner {
 public:
  Runner(const Model& model, const Format& format, int slots, int tokens)
      : model_(model), format_(format), slots_(slots) {
    layout_.keys = format.keys;
    layout_.codes = format.codes;
    layout_.values = format.values;
    layout_.layers = Model::kLayers;
    layout_.heads = Model::kKv;
    layout_.dim = round_up(Model::kDim, kTile);
    layout_.ring = format.ring;
    layout_.window = format.ring ? 16 : 0;
    layout_.sinks = format.ring ? 4 : 0;
    bytes_ = layout_.header_bytes() + layout_.block_bytes() * ((tokens + kKvBlock - 1) / kKvBlock);
    kv_ = std::make_unique<Array<uint8_t>>(bytes_ * slots);
    Random random(99);
    for (const KvFormat f : {format.keys, format.codes}) {
      const size_t floats = CodeTables::floats(f, layout_.dim);
      tables_.push_back(normals(random, floats * Model::kLayers * Model::kKv));
      if (f == kKvInt4)  // scales, then zero points, of what keys look like
        for (size_t i = 0; i < tables_.back().size(); ++i)
          tables_.back()[i] = i % floats < floats / 2 ? random.uniform(0.1f, 0.5f) : random.uniform(-4.f, -1.f);
      if (floats) code_tables_.of[f] = tables_.back().get();
    }
  }

  // Logits of all rows; `top` results are checked against them on the way.
  std::vector<Logits> run(const std::vector<Row>& rows, int threads, const std::vector<int64_t>& moves = {},
                          int gates_off = 0) {
    const int n = static_cast<int>(rows.size()), vocab = Model::kVocab;
    std::vector<int64_t> plan(size_t(6) * n), heads(n);
    for (int r = 0; r < n; ++r) {
      const Row& row = rows[r];
      const int64_t fields[] = {row.token, row.position, row.slot, row.visible, row.parent, row.place};
      for (int line = 0; line < 6; ++line) plan[size_t(line) * n + r] = fields[line];
      heads[r] = r;
    }
    bool gates[2 * Model::kLayers];
    for (int i = 0; i < 2 * Model::kLayers; ++i) gates[i] = !(gates_off >> i & 1);
    PassInputs in;
    in.plan = plan.data();
    in.rows = in.heads = n;
    in.head_rows = heads.data();
    in.gates = gates;
    in.gate_count = 2 * Model::kLayers;
    in.moves = moves.data();
    in.move_count = static_cast<int>(moves.size() / 3);
    in.kv = kv_->get();
    in.slots = slots_;
    in.kv_bytes = bytes_;
    in.layout = layout_;
    in.read_codes = format_.read_codes;
    in.tables = code_tables_;
    for (const auto& w : model_.weights) in.weights.push_back({w.get(), w.bytes()});
    Floats logits(size_t(n) * vocab);
    PassOutputs out;
    out.logits = logits.get();
    go(in, out, threads);

    // again, for the best of each row only: everything is written as it was
    constexpr int kTop = 3;
    Array<int64_t> ids(size_t(n) * kTop);
    Floats values(size_t(n) * kTop);
    in.top = kTop;
    in.move_count = 0;
    out = {nullptr, ids.get(), values.get()};
    go(in, out, threads);
    std::vector<Logits> result;
    for (int r = 0; r < n; ++r) {
      result.emplace_back(logits.get() + size_t(r) * vocab, logits.get() + size_t(r + 1) * vocab);
      const Logits& row = result.back();
      std::vector<int64_t> order(vocab);
      for (int i = 0; i < vocab; ++i) {
        order[i] = i;
        if (!std::isfinite(row[i])) fail("a logit is not finite: " + format_.name());
      }
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
      for (int i = 0; i < kTop; ++i)
        if (ids[size_t(r) * kTop + i] != order[i] || values[size_t(r) * kTop + i] != row[order[i]])
          fail("the best tokens of row " + std::to_string(r) + " of " + std::to_string(n) +
               " are not those of its logits");
    }
    return result;
  }

  void wipe() { std::memset(kv_->get(), 0, kv_->bytes()); }

 private:
  void go(const PassInputs& in, const PassOutputs& out, int threads) {
    Pass pass(model_.program, kernels(), in, out, scratch_);
    Team<Pass> team(pass);
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t) others.emplace_back([&] { team.join(); });
    team.join();
    for (std::thread& t : others) t.join();
  }

  const Model& model_;
  const Format format_;
  const int slots_;
  KvLayout layout_;
  size_t bytes_ = 0;
  std::unique_ptr<Array<uint8_t>> kv_;
  std::vector<Floats> tables_;
  CodeTables code_tables_;
  Scratch scratch_;
};

int64_t token_at(int64_t position) { return (position * 37 + position / 7 * 11 + 5) % Model::kVocab; }

// Rows `from` to `from + n` of the sequence: the first is told what it sees, the others follow their parents.
std::vector<Row> chain(int64_t from, int n, int64_t slot = 0, int first_row = 0) {
  std::vector<Row> rows;
  for (int i = 0; i < n; ++i)
    rows.push_back({token_at(from + i), from + i, slot, from, i ? first_row + i - 1 : -1, from + i});
  return rows;
}

void same(const Logits& a, const Logits& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof a[i]))
      fail(what + ": logit " + std::to_string(i) + " is " + std::to_string(b[i]) + ", expected " +
           std::to_string(a[i]));
}

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

// A tree of proposals: with the rest of it in the pass or only its own ancestors, a row sees the same.  Then a branch
// is accepted by moving it to where it belongs, and the sequence goes on as if nothing had happened.
void pass_tree(Runner& runner, const std::vector<Logits>& expected, int threads, const std::string& name) {
  // the branch in question lies 16 places on, in the same lanes and the same 32 tokens: only so are sums equal bit for
  // bit
  constexpr int kStart = 40, kBranch = 3, kAway = 16;
  const auto begin = [&] {
    runner.wipe();
    runner.run(chain(0, kStart), threads);
  };
  std::vector<Row> tree;
  const auto grow = [&](int64_t token, int parent, int64_t place) {
    const int64_t position = parent < 0 ? kStart : tree[parent].position + 1;
    tree.push_back({token, position, 0, kStart, parent, place});
    return static_cast<int>(tree.size()) - 1;
  };
  int wrong = -1, right = -1;
  std::vector<int> branch;
  for (int i = 0; i < kBranch; ++i) {
    wrong = grow((token_at(kStart + i) + 1) % Model::kVocab, wrong, kStart + i);
    right = grow(token_at(kStart + i), right, kStart + kAway + i);
    branch.push_back(right);
  }
  for (int i = 0; i < 9; ++i) grow(7 * i + 1, i % 2 ? wrong : branch[i % kBranch], kStart + 24 + i);

  begin();
  const auto all = runner.run(tree, threads);
  for (int i = 0; i < kBranch; ++i)
    same(expected[kStart + i], all[branch[i]], name + ", branch of a tree, row " + std::to_string(i));
  for (size_t leaf = 0; leaf < tree.size(); ++leaf) {
    std::vector<Row> path;
    for (int64_t row = static_cast<int64_t>(leaf); row >= 0; row = tree[row].parent)
      path.insert(path.begin(), tree[row]);
    for (size_t i = 0; i < path.size(); ++i) path[i].parent = static_cast<int64_t>(i) - 1;
    begin();
    same(runner.run(path, 1).back(), all[leaf], name + ", node " + std::to_string(leaf) + " of a tree");
  }
  begin();
  runner.run(tree, threads);
  std::vector<int64_t> moves;
  for (int i = 0; i < kBranch; ++i) moves.insert(moves.end(), {0, kStart + kAway + i, kStart + i});
  constexpr int kNext = kStart + kBranch;
  const auto logits = runner.run(chain(kNext, 12), threads, moves);
  for (int i = 0; i < 12; ++i)
    same(expected[kNext + i], logits[i], name + ", after moves, token " + std::to_string(kNext + i));
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
                         const std::vector<int>& sizes) {
    Runner runner(model, format, 3, 2 * tokens);
    const auto expected = reference(runner, tokens);
    const std::string name = kind + ", " + format.name();
    for (const int rows : sizes) pass_chunks(runner, expected, rows, 1 + tried++ % 4, name);
    for (const int threads : {1, 3}) pass_slots(runner, expected, threads, name);
    pass_tree(runner, expected, 2, name);
  };
  std::vector<int> every;
  for (int rows = 1; rows <= 40; ++rows) every.push_back(rows);
  const Model model("q4", 1);
  if (brief) {
    for (const int i : {0, 4, 9}) check(model, formats[i], "q4", {3, 40});
    return;
  }
  for (const Format& format : formats)
    check(model, format, "q4",
          format.ring && format.values == kKvInt8 ? every : std::vector<int>{2, 3, 15, 16, 17, 33, 40});
  for (const char* kind : {"q8", "c8"}) check(Model(kind, 2), formats[1], kind, {3, 16, 40});

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
}

}  // namespace edgespec
