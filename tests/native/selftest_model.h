// A small model and what runs passes on it, for the parts that test whole passes.
#pragma once
#include "selftest.h"

namespace edgespec {

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what); }

// A decoder of two layers with sizes that fill neither tiles nor blocks.
struct Model {
  static constexpr int kHidden = 96, kHeads = 4, kKv = 2, kDim = 24, kRotary = 20, kInner = 80, kVocab = 100, kCut = 40;
  static constexpr int kPositions = 2048, kLayers = 2;
  enum Gate { kEmbed = 2 * kLayers, kLoad, kStore, kLm, kGroup, kPlane = kGroup + 3, kGates };
  std::vector<Array<uint8_t>> weights;
  Program program;

  explicit Model(const std::string& kind, uint64_t seed) : random_(seed) {
    const bool channels = kind == "c8";
    const int table = matrix(kVocab, kHidden), cos = angles(false), sin = angles(true);
    const std::string form = kKinds[kKinds[kind_named(kind)].acts].name;
    std::string text = "floats 0 96\nfloats 1 96\nfloats 2 80\nacts 0 96\nacts 1 96\nacts 2 80\nacts 3 96\n";
    text += "gate index=4 skip=1\nembed w=" + std::to_string(table) +
            " kind=q4 n=100 k=96 out=0 scale=1.5 positions=" + positions() + "\n";
    text += "gate index=5 skip=1\nload out=0 k=96\n";
    for (int layer = 0; layer < kLayers; ++layer) {
      text += layer ? normed_attention(kind, form, cos, sin) : plain_attention(kind, form, cos, sin);
      text += "gate index=" + std::to_string(2 * layer + 1) + " skip=" + (channels ? "4" : "3") + "\n";
      text += "quantize x=0 norm=" + vector(kHidden) + (layer ? " center=1 beta=" + vector(kHidden) : "") +
              " eps=1e-5 k=96 kind=" + form + " out=0\n";
      text += "glu act=0 " + named("gate", kInner, kHidden, kind) + " " + named("up", kInner, kHidden, kind) +
              " kind=" + kind + " n=80 k=96 out=2 fn=" + (layer ? "gelu_tanh" : "silu") + "\n";
      if (channels) text += "quantize x=2 k=80 kind=c8 out=2\n";
      text += "linear act=2 " + named("w", kHidden, kInner, kind) + " kind=" + kind + " n=96 k=80 out=0 add=1\n";
    }
    const std::string norm = vector(kHidden), last = "x=0 norm=" + norm + " eps=1e-5 k=96 ";
    text += "gate index=6 skip=1\nstore x=0 k=96\n";
    text += "gate index=7 skip=2\nquantize " + last + "kind=q4 out=3 rows=1\n";
    text += "logits act=3 w=" + std::to_string(table) + " kind=q4 n=100 k=96 scale=0.5 cap=20 bias=" + vector(kVocab) +
            "\n";

    // three heads over the LM head; three with separate LM heads; two by way of a narrower layer
    text += "floats 3 96\nfloats 4 288\nfloats 5 96\nfloats 6 192\n";
    const std::string wide = "norm " + last + "out=3 rows=1\nquantize x=3 k=96 kind=" + form +
                             " out=0 rows=2\nlinear act=0 " + named("w", 3 * kHidden, kHidden, kind) + " kind=" + kind +
                             " n=288 k=96 out=4 rows=1 bias=" + vector(3 * kHidden) +
                             "\nactivate x=4 k=288 fn=gelu rows=1\nsplit x=4 base=3 n=96 times=3 out=5\n";
    text += "gate index=8 skip=7\n" + wide + "quantize x=5 k=96 kind=q4 out=3 rows=2 times=3\n";
    text += "logits act=3 w=" + std::to_string(table) + " kind=q4 n=100 k=96 times=3\n";
    text += "gate index=9 skip=11\n" + wide;
    for (int head = 0; head < 3; ++head) {
      const std::string first = " first=" + std::to_string(head) + "\n";
      text += "quantize x=5 k=96 kind=q4 out=3 rows=2" + first;
      text += "logits act=3 w=" + std::to_string(matrix(kCut, kHidden)) + " kind=q4 n=40 k=96" + first;
    }
    text += "gate index=10 skip=8\nquantize " + last + "kind=" + form + " out=0 rows=1\n";
    text += "linear act=0 " + named("w", kInner, kHidden, kind) + " kind=" + kind +
            " n=80 k=96 out=2 rows=1\nsilu x=2 k=80\nquantize x=2 k=80 kind=" + form + " out=2 rows=2\n";
    text += "linear act=2 " + named("w", 2 * kHidden, kInner, kind) + " kind=" + kind +
            " n=192 k=80 out=6 rows=1\nsplit x=6 n=96 times=2 out=5\n";
    text += "quantize x=5 k=96 kind=q4 out=3 rows=2 times=2\nlogits act=3 w=" + std::to_string(matrix(kCut, kHidden)) +
            " kind=q4 n=40 k=96 times=2 cap=9\n";
    program = Program::parse(text);
  }

 private:
  // Llama's: a norm before the matrices, with a window.
  std::string plain_attention(const std::string& kind, const std::string& form, int cos, int sin) {
    std::string text = "gate index=0 skip=5\nquantize x=0 norm=" + vector(kHidden) + " eps=1e-5 k=96 kind=" + form +
                       " out=0\nheads act=0 " +
                       named("w", (kHeads + 2 * kKv) * round_up(kDim, kTile), kHidden, kind, kDim) + " kind=" + kind +
                       " k=96 bias=" + vector((kHeads + 2 * kKv) * kDim) +
                       " dim=24 heads=4 kv=2 rotary=20 cos=" + std::to_string(cos) + " sin=" + std::to_string(sin) +
                       " eps=1e-5 layer=0 scale=0.2\nattend out=1 layer=0 heads=4 kv=2 dim=24 window=90\n";
    text += "quantize x=1 k=96 kind=" + form + " out=1\n";
    return text + "linear act=1 " + named("w", kHidden, kHeads * kDim, kind) + " kind=" + kind +
           " n=96 k=96 out=0 add=1\n";
  }
  // Norms of whole projections and after the output, a small window, capped scores.
  std::string normed_attention(const std::string& kind, const std::string& form, int cos, int sin) {
    std::string text = "floats 7 96\nfloats 8 48\nfloats 9 48\nfloats 10 96\nfloats 11 48\n";
    text += "gate index=2 skip=11\nquantize x=0 k=96 kind=" + form + " out=0\n";
    const int widths[] = {kHeads * kDim, kKv * kDim, kKv * kDim};
    for (int i = 0; i < 3; ++i)
      text += "linear act=0 " + named("w", widths[i], kHidden, kind) + " kind=" + kind +
              " n=" + std::to_string(widths[i]) + " k=96 out=" + std::to_string(7 + i) + "\n";
    text += "norm x=7 norm=" + vector(widths[0]) + " eps=1e-5 k=96 out=10\n";
    text += "norm x=8 norm=" + vector(widths[1]) + " eps=1e-5 k=48 out=11\n";
    text += "heads qx=10 kx=11 vx=9 dim=24 heads=4 kv=2 rotary=20 cos=" + std::to_string(cos) +
            " sin=" + std::to_string(sin) + " qnorm=" + vector(kDim) + " knorm=" + vector(kDim) +
            " eps=1e-5 layer=1 scale=0.2\nattend out=1 layer=1 heads=4 kv=2 dim=24 window=7 cap=3\n";
    text += "quantize x=1 k=96 kind=" + form + " out=1\nlinear act=1 " + named("w", kHidden, kHeads * kDim, kind) +
            " kind=" + kind + " n=96 k=96 out=7\n";
    return text + "norm x=7 norm=" + vector(kHidden) + " center=1 beta=" + vector(kHidden) +
           " eps=1e-5 k=96 out=0 add=1\n";
  }

  // A matrix by the key of its step, of two planes with the low one.
  std::string named(const std::string& key, int n, int k, const std::string& kind, int dim = 0) {
    std::string text = key + "=" + std::to_string(matrix(n, k, kind, dim));
    if (kind_named(kind) != kP8) return text;
    Array<uint8_t> low(tiles_of(n) * low_bytes(k));
    for (uint8_t& byte : low) byte = static_cast<uint8_t>(random_.next());
    text += (key == "w" ? " low=" : " " + key + "low=") + std::to_string(keep(std::move(low)));
    return key == "up" ? text : text + " plane=" + std::to_string(kPlane);
  }
  // A packed matrix; rows beyond head_dim in each head are zero.
  int matrix(int n, int k, const std::string& name = "q4", int dim = 0) {
    const Kind kind = kind_named(name);
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
    for (int i = 0; i < k && takes_floats(kind); ++i) {
      const size_t each = kKinds[kind].bits / 8;
      std::memset(tile + (size_t(i) * kTile + column) * each, 0, each);
    }
    if (!in_blocks(kind)) return;
    for (int i = 0; i < blocks_of(k); ++i)  // scales of a row
      std::memset(tile + i / 2 * pair_bytes(kind) + i % 2 * 32 + column * 2, 0, 2);
  }
  std::string vector(int n) {
    Array<uint8_t> bytes(size_t(n) * 4);
    for (int i = 0; i < n; ++i) put(bytes, i, random_.uniform(0.5f, 1.5f));
    return std::to_string(keep(std::move(bytes)));
  }
  std::string positions() {
    Array<uint8_t> bytes(size_t(kPositions) * kHidden * 4);
    for (size_t i = 0; i < bytes.size() / 4; ++i) put(bytes, i, random_.uniform(-1.f, 1.f));
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

// Options of a pass, without its rows.
struct Wanted {
  std::vector<int> gates;      // that are on
  std::vector<int64_t> heads;  // rows that reach an LM head
  std::vector<Logits> hidden;  // the residual stream to begin with
  std::vector<int64_t> moves;

  static Wanted plain(int rows, int gates_off = 0) {
    Wanted wanted;
    for (int i = 0; i < 2 * Model::kLayers; ++i)
      if (!(gates_off >> i & 1)) wanted.gates.push_back(i);
    wanted.gates.insert(wanted.gates.end(), {Model::kEmbed, Model::kLm});
    for (int r = 0; r < rows; ++r) wanted.heads.push_back(r);
    return wanted;
  }
};

struct Given {
  std::vector<Logits> logits, hidden;
};

// The cache of some slots, and the inputs to run passes on it.  Blocks of a pool are in a shuffled order.
class Runner {
 public:
  bool high = false;  // of two planes only the high one is read

  Runner(const Model& model, const Format& format, int slots, int tokens, bool pool = false)
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
    const int blocks = (tokens + kKvBlock - 1) / kKvBlock;
    layout_.table = pool ? blocks : 0;
    bytes_ = (pool ? layout_.slot_bytes() : layout_.header_bytes()) + layout_.block_bytes() * blocks;
    kv_ = std::make_unique<Array<uint8_t>>(bytes_ * slots);
    wipe();
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

  std::vector<Logits> run(const std::vector<Row>& rows, int threads, const std::vector<int64_t>& moves = {},
                          int gates_off = 0) {
    Wanted wanted = Wanted::plain(static_cast<int>(rows.size()), gates_off);
    wanted.moves = moves;
    return run(rows, threads, wanted).logits;
  }

  // `top` results are checked against all logits on the way: a NaN is the best of all.
  Given run(const std::vector<Row>& rows, int threads, const Wanted& wanted, bool finite = true) {
    const int n = static_cast<int>(rows.size());
    std::vector<int64_t> plan(size_t(6) * n);
    for (int r = 0; r < n; ++r) {
      const Row& row = rows[r];
      const int64_t fields[] = {row.token, row.position, row.slot, row.visible, row.parent, row.place};
      for (int line = 0; line < 6; ++line) plan[size_t(line) * n + r] = fields[line];
    }
    bool gates[Model::kGates] = {};
    for (const int gate : wanted.gates) gates[gate] = true;
    gates[Model::kPlane] = !high;
    Floats start(wanted.hidden.size() * Model::kHidden);
    for (size_t r = 0; r < wanted.hidden.size(); ++r)
      std::copy(wanted.hidden[r].begin(), wanted.hidden[r].end(), start.get() + r * Model::kHidden);
    PassInputs in;
    in.plan = plan.data();
    in.rows = n;
    in.head_rows = wanted.heads.data();
    in.heads = static_cast<int>(wanted.heads.size());
    in.hidden = start.get();
    in.hidden_rows = static_cast<int64_t>(wanted.hidden.size());
    in.hidden_width = Model::kHidden;
    in.gates = gates;
    in.gate_count = Model::kGates;
    in.moves = wanted.moves.data();
    in.move_count = static_cast<int>(wanted.moves.size() / 3);
    in.kv = kv_->get();
    in.slots = slots_;
    in.kv_bytes = bytes_;
    in.layout = layout_;
    in.read_codes = format_.read_codes;
    in.tables = code_tables_;
    for (const auto& w : model_.weights) in.weights.push_back({w.get(), w.bytes()});
    const Active active = model_.program.active(gates, Model::kGates);
    const int lines = active.logits * in.heads, columns = active.columns;
    Floats logits(size_t(lines) * columns), hidden(active.hidden ? size_t(n) * active.hidden : 0);
    PassOutputs out;
    out.logits = logits.get();
    out.hidden = hidden.get();
    go(in, out, threads);

    // again, for the best of each row only: everything is written as it was
    constexpr int kTop = 3;
    Array<int64_t> ids(size_t(lines) * kTop);
    Floats values(size_t(lines) * kTop);
    in.top = kTop;
    in.move_count = 0;
    out = {nullptr, ids.get(), values.get(), hidden.get()};
    go(in, out, threads);
    Given given;
    for (int r = 0; r < n && active.hidden; ++r)
      given.hidden.emplace_back(hidden.get() + size_t(r) * active.hidden, hidden.get() + size_t(r + 1) * active.hidden);
    for (int r = 0; r < lines; ++r) {
      given.logits.emplace_back(logits.get() + size_t(r) * columns, logits.get() + size_t(r + 1) * columns);
      const Logits& row = given.logits.back();
      std::vector<int64_t> order(columns);
      for (int i = 0; i < columns; ++i) {
        order[i] = i;
        if (finite && !std::isfinite(row[i])) fail("a logit is not finite: " + format_.name());
      }
      const auto key = [&](int64_t i) { return std::isnan(row[i]) ? HUGE_VALF : row[i]; };
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return key(a) > key(b); });
      if (std::isnan(row[order[0]])) {
        if (!std::isnan(values[size_t(r) * kTop])) fail("a NaN is not the best of its row: " + format_.name());
        continue;
      }
      for (int i = 0; i < kTop; ++i)
        if (ids[size_t(r) * kTop + i] != order[i] || values[size_t(r) * kTop + i] != row[order[i]])
          fail("the best tokens of row " + std::to_string(r) + " of " + std::to_string(lines) +
               " are not those of its logits");
    }
    return given;
  }

  void wipe() {
    std::memset(kv_->get(), 0, kv_->bytes());
    for (int slot = 0; slot < slots_; ++slot)
      for (int block = 0; block < layout_.table; ++block)
        table(slot)[block] = (layout_.table - block) * slots_ - slot - 1;
  }

  // Table of the blocks of a slot of a pool.
  int32_t* table(int slot) {
    return reinterpret_cast<int32_t*>(kv_->get() + slot * layout_.slot_bytes() + layout_.header_bytes());
  }

  // A slot of a pool begins with what another one holds: whole blocks are referred to, the rest is copied.
  void copy_prefix_from(int slot, int other, int tokens) {
    const int whole = tokens / kKvBlock;
    std::memcpy(kv_->get() + slot * layout_.slot_bytes(), kv_->get() + other * layout_.slot_bytes(),
                layout_.header_bytes());
    std::copy_n(table(other), whole, table(slot));
    uint8_t* blocks = kv_->get() + slots_ * layout_.slot_bytes();
    if (tokens % kKvBlock)
      std::memcpy(blocks + table(slot)[whole] * layout_.block_bytes(),
                  blocks + table(other)[whole] * layout_.block_bytes(), layout_.block_bytes());
  }

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

inline int64_t token_at(int64_t position) { return (position * 37 + position / 7 * 11 + 5) % Model::kVocab; }

// Rows `from` to `from + n` of the sequence: the first has its visible tokens set, the others follow their parents.
inline std::vector<Row> chain(int64_t from, int n, int64_t slot = 0, int first_row = 0) {
  std::vector<Row> rows;
  for (int i = 0; i < n; ++i)
    rows.push_back({token_at(from + i), from + i, slot, from, i ? first_row + i - 1 : -1, from + i});
  return rows;
}

inline void same(const Logits& a, const Logits& b, const std::string& what) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::memcmp(&a[i], &b[i], sizeof a[i]))
      fail(what + ": logit " + std::to_string(i) + " is " + std::to_string(b[i]) + ", expected " +
           std::to_string(a[i]));
}

// Parts of the model against the whole; throws what differs.
void pass_parts(const Model& model, const std::string& kind);

}  // namespace edgespec
