// A NaN or an infinity in one activation is not lost on its way: it makes every later logit NaN or infinite.
#include <limits>

#include "selftest_model.h"

namespace edgespec {
namespace {

constexpr int kTokens = 3;
const float kNone = std::nanf(""), kInfinite = std::numeric_limits<float>::infinity();

// Makes a column of a packed matrix give `bad`: one activation of every row.
class Spoilt {
 public:
  Spoilt(uint8_t* matrix, Kind kind, int k, int column, float bad) {
    uint8_t* tile = matrix + size_t(column / kTile) * tile_bytes(kind, k);
    if (kind == kC8) {
      at_ = tile + size_t(blocks_of(k)) * 512 + size_t(column % kTile) * 4;
      std::memcpy(kept_, at_, 4);
      std::memcpy(at_, &bad, 4);
    } else {  // the scale of the first block
      const uint16_t half = float_to_half(bad);
      at_ = tile + size_t(column % kTile) * 2;
      std::memcpy(kept_, at_, 4);
      std::memcpy(at_, &half, 2);
    }
  }
  ~Spoilt() { std::memcpy(at_, kept_, 4); }

 private:
  uint8_t *at_, kept_[4];
};

void activations(const Kernels& kernels) {
  Random random(5);
  for (const int least : {16, 33, 64, 100})
    for (int kind = kQ4; kind <= kF32; ++kind) {
      const int k = whole(static_cast<Kind>(kind), least);
      const auto tile = make_tile(random, static_cast<Kind>(kind), k);
      for (int at = 0; at < k; ++at)
        for (const float bad : {kNone, -kNone, kInfinite, -kInfinite}) {
          constexpr int kRows = 3;
          Floats x = normals(random, size_t(kRows) * k), y(size_t(kRows) * kTile);
          x[size_t(k) + at] = bad;
          Array<Act> acts(size_t(kRows) * blocks_of(k));
          for (int r = 0; r < kRows; ++r)
            kernels.quantize(x.get() + size_t(r) * k, k, static_cast<Kind>(kind), acts.get() + r, kRows);
          kernels.linear[kind](tile.get(), k,
                               takes_floats(static_cast<Kind>(kind)) ? static_cast<const void*>(x.get()) : acts.get(),
                               kRows, y.get(), kTile, kTile);
          for (int i = 0; i < kRows * kTile; ++i)
            if (std::isfinite(y[i]) == (i / kTile == 1))
              fail(std::string(kernels.name) + ", " + kKinds[kind].name + ", k " + std::to_string(k) + ": number " +
                   std::to_string(at) + " is " + std::to_string(bad) + ", and row " + std::to_string(i / kTile) +
                   " gives " + std::to_string(y[i]));
        }
    }
  Act act[2];
  for (int at = 0; at < 2 * kBlock; ++at) {
    Floats x = normals(random, 2 * kBlock);
    x[at] = kNone;
    kernels.quantize_blocks(x.get(), 2, act);
    if (std::isnan(act[0].scale) != (at < kBlock) || std::isnan(act[1].scale) == (at < kBlock))
      fail(std::string(kernels.name) + ": a NaN of a block is not that of its scale");
  }
}

// Every matrix of the model, a column of it at a time.
void columns(Model& model, const Format& format, const std::string& name) {
  Runner runner(model, format, 1, 128);
  const Wanted wanted = Wanted::plain(kTokens);
  bool gates[Model::kGates] = {};
  for (const int gate : wanted.gates) gates[gate] = true;
  const auto expected = runner.run(chain(0, kTokens), 1, wanted).logits;
  const auto logits_of = [&](const Step& s, int matrix, int column, float bad) {
    const Spoilt spoilt(model.weights[matrix].get(), s.kind, s.k, column, bad);
    return runner.run(chain(0, 2 * kTokens), 1, Wanted::plain(2 * kTokens), false).logits;
  };
  const auto spoil = [&](const Step& s, int matrix, int column, float bad) {
    const auto logits = logits_of(s, matrix, column, bad);
    const auto later = runner.run(chain(0, kTokens), 1, wanted).logits;  // over what the others have left
    for (int r = 0; r < kTokens; ++r) same(expected[r], later[r], name + ", after a text of numbers that are none");
    for (const Logits& row : logits)
      for (size_t i = 0; i < row.size(); ++i)
        if (std::isfinite(row[i]) && (s.op != Op::kLogits || i == size_t(column)))
          fail(name + ": weight " + std::to_string(matrix) + ", column " + std::to_string(column) + " is " +
               std::to_string(bad) + ", and logit " + std::to_string(i) + " finite");
  };
  model.program.each(gates, [&](const Step& s) {
    if (s.op == Op::kHeads && s.w >= 0) {  // a query, a key, a value
      const int padded = round_up(s.dim, kTile);
      for (const int column : {3, s.heads * padded + 5, (s.heads + s.kv) * padded + padded + 2})
        for (const float bad : {kNone, kInfinite}) spoil(s, s.w, column, bad);
    } else if (s.op == Op::kLinear || s.op == Op::kGlu) {
      for (const int matrix : {s.w, s.gate, s.up})
        if (matrix >= 0)
          for (const int column : {0, s.n - 1}) spoil(s, matrix, column, kNone);
      spoil(s, s.op == Op::kLinear ? s.w : s.up, s.n / 2, s.n == Model::kHidden ? kInfinite : kNone);
    } else if (s.op == Op::kLogits) {
      for (const int column : {0, 21, s.n - 1}) spoil(s, s.w, column, kNone);
    }
  });
}

}  // namespace

void numbers() {
  for (const char* isa : kIsas)
    if (const Kernels* kernels = kernels_named(isa)) activations(*kernels);
  const Format formats[] = {{kKvF32, kKvNone, kKvF32, false, 0},     {kKvF16, kKvNone, kKvF16, false, 0},
                            {kKvInt8, kKvNone, kKvInt8, false, 64},  {kKvInt4, kKvNone, kKvInt8, false, 0},
                            {kKvNomad1, kKvNone, kKvF16, false, 64}, {kKvNomad2, kKvNone, kKvInt8, false, 0}};
  for (const char* kind : {"q4", "q8", "c8"}) {
    Model model(kind, 4);
    for (const Format& format : formats)
      if (kind[0] == 'q' || format.keys == kKvF16) columns(model, format, std::string(kind) + ", " + format.name());
  }
}

}  // namespace edgespec
