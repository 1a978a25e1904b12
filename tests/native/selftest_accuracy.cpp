// Errors against double precision.
#include "selftest.h"

namespace edgespec {
namespace {

// The largest of what is offered, by name.
class Worst {
 public:
  void offer(const std::string& name, double error) {
    double& known = worst_[name];
    if (!(error <= known)) known = error;  // a NaN stays
  }
  void print() const {
    const char* comma = "{";
    for (const auto& [name, error] : worst_) {
      if (std::isfinite(error))
        std::printf("%s\"%s\": %.6g", comma, name.c_str(), error);
      else
        std::printf("%s\"%s\": 1e999", comma, name.c_str());
      comma = ", ";
    }
    std::printf("}\n");
  }

 private:
  std::map<std::string, double> worst_;
};

// Element [column, i] of a tile, as layout.h defines it; for kP8 only the high plane's.
double weight_at(const uint8_t* tile, Kind kind, int k, int column, int i) {
  const int block = i / kBlock, at = i % kBlock;
  if (takes_floats(kind)) return float_at(kind, tile, size_t(i) * kTile + column);
  if (is_ggml(kind)) return ggml_weight(kind, tile, k, i, column);  // tests/export compare them with ggml's own
  if (kind == kC8) {
    float scale;
    std::memcpy(&scale, tile + size_t(blocks_of(k)) * 512 + size_t(column) * 4, 4);
    return (tile[size_t(block) * 512 + at / 4 * 64 + column * 4 + at % 4] - 128) * double(scale);
  }
  // blocks that share two scales come after two rows of them
  const int together = kKinds[kind].size / 16;
  const size_t payload = kind == kQ8 ? 512 : 256;
  const uint8_t* first = tile + size_t(block / together) * (64 + together * payload);
  const uint8_t* q = first + 64 + block % together * payload;
  uint16_t half;
  std::memcpy(&half, first + block % together / (together / 2) * 32 + column * 2, 2);
  int number;
  if (kind != kQ8) {
    const uint8_t byte = q[at % 16 / 4 * 64 + column * 4 + at % 4];
    number = (at < 16 ? byte & 15 : byte >> 4) - 8;
    if (kind == kP8) return (16 * number + 7.5) * double(half_to_float(half));
  } else {
    number = q[at / 4 * 64 + column * 4 + at % 4] - 128;
  }
  return number * double(half_to_float(half));
}

void accuracy_linear(const Kernels& kernels, Random random, Worst& worst) {
  for (int kind = kQ4; kind <= kF32; ++kind)
    for (const int least : {64, 100, 896, 4864})
      for (const int rows : {1, 5}) {
        const int k = whole(static_cast<Kind>(kind), least);
        const bool floats = takes_floats(static_cast<Kind>(kind));
        const auto tile = make_tile(random, static_cast<Kind>(kind), k);
        const int blocks = blocks_of(k);
        Floats x = normals(random, size_t(rows) * k), y(size_t(rows) * kTile);
        Array<Act> acts(size_t(rows) * blocks);
        for (int r = 0; r < rows; ++r)
          kernels.quantize(x.get() + size_t(r) * k, k, static_cast<Kind>(kind), acts.get() + r, rows);
        for (Act& act : acts)
          if (kind == kP8) act.offset = offset_of_high(act.offset);
        kernels.linear[kind](tile.get(), k, floats ? static_cast<const void*>(x.get()) : acts.get(), rows, y.get(),
                             kTile, kTile);
        for (int r = 0; r < rows; ++r)
          for (int c = 0; c < kTile; ++c) {
            double sum = 0, size = 0;
            for (int i = 0; i < k; ++i) {
              const Act& act = acts[size_t(i / kBlock) * rows + r];
              const double by = floats ? x[size_t(r) * k + i] : act.q[i % kBlock] * double(act.scale);
              const double product = weight_at(tile.get(), static_cast<Kind>(kind), k, c, i) * by;
              sum += product;
              size += std::fabs(product);
            }
            worst.offer(std::string("linear_") + kKinds[kind].name, std::fabs(y[size_t(r) * kTile + c] - sum) / size);
          }
        if (floats || kind == kP8) continue;
        for (int r = 0; r < rows; ++r)
          for (int i = 0; i < k; ++i) {  // in steps: half of one, and a little
            const Act& act = acts[size_t(i / kBlock) * rows + r];
            worst.offer("quantize", std::fabs(x[size_t(r) * k + i] / double(act.scale) - act.q[i % kBlock]));
          }
        for (size_t i = 0; i < acts.size(); ++i) {
          int sum = 0;
          for (const int8_t q : acts[i].q) sum += q;
          if (acts[i].offset != -8 * sum) worst.offer("quantize", NAN);
        }
      }
}

void accuracy_functions(const Kernels& kernels, Random random, Worst& worst) {
  for (int i = 0; i < 400; ++i) {
    Floats s(16);
    double sum = 0;
    for (float& v : s) v = random.uniform(i % 2 ? -80.f : -10.f, 0.f);
    const Floats x(s.size());
    std::copy(s.begin(), s.end(), x.begin());
    const float none = 0;
    float total = 0;
    kernels.exponentials(s.get(), 0, 16, 1, &none, &total);
    for (int c = 0; c < 16; ++c) {
      const double exact = std::exp(double(x[c]));
      sum += exact;
      if (x[c] < -60)  // weighs nothing
        worst.offer("exponential_none", std::fabs(s[c]));
      else
        worst.offer(x[c] >= -10 ? "exponential" : "exponential_small", std::fabs(s[c] - exact) / exact);
    }
    worst.offer("exponential_sum", std::fabs(total - sum) / sum);
  }
  for (const int n : {16, 128, 512}) {  // as attention does it: hidden ones weigh nothing, the others sum to 1
    Floats s = normals(random, n, 4.f);
    for (int i = 0; i < n; i += 3) s[i] = -3e38f;
    const Floats x(s.size());
    std::copy(s.begin(), s.end(), x.begin());
    float largest = 0, sum = 0;
    kernels.largest(s.get(), 0, n, 1, &largest);
    kernels.exponentials(s.get(), 0, n, 1, &largest, &sum);
    double exact = 0;
    for (int i = 0; i < n; ++i) exact += x[i] > -1e30f ? std::exp(double(x[i]) - largest) : 0;
    for (int i = 0; i < n; ++i) {
      const double p = x[i] > -1e30f ? std::exp(double(x[i]) - largest) / exact : 0;
      worst.offer("softmax", std::fabs(s[i] / double(sum) - p));
    }
  }
  for (const float scale : {0.1f, 3.f, 20.f}) {
    const int n = 1024;
    const Floats gate = normals(random, n, scale), up = normals(random, n), weight = normals(random, n);
    Floats y(n);
    kernels.glu[kSilu](gate.get(), up.get(), n, y.get());
    for (int i = 0; i < n; ++i) {
      const double exact = gate[i] / (1 + std::exp(-double(gate[i]))) * up[i];
      if (gate[i] > -10)
        worst.offer("glu", std::fabs(y[i] - exact) / std::fabs(exact));
      else
        worst.offer("glu_small", std::fabs(y[i] - exact));
    }
    kernels.norm(gate.get(), n, weight.get(), 1e-6f, y.get());
    double squares = 0;
    for (const float v : gate) squares += double(v) * v;
    for (int i = 0; i < n; ++i) {
      const double exact = gate[i] / std::sqrt(squares / n + 1e-6) * weight[i];
      worst.offer("norm", std::fabs(y[i] - exact) / std::fabs(exact));
    }
    Array<uint16_t> half(n);
    kernels.to_half(gate.get(), n, half.get());
    for (int i = 0; i < n; ++i)  // in halves of the last place of a normal number
      worst.offer("to_half", std::fabs(half_to_float(half[i]) - double(gate[i])) /
                                 std::max(std::fabs(double(gate[i])), 0x1p-14) * 2048);
  }
}

double exact_fn(int fn, double x) {
  if (fn == kGelu) return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
  if (fn == kGeluTanh) return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
  if (fn == kSigmoid) return 1 / (1 + std::exp(-x));
  if (fn == kSwigluOai) return 2 * std::min(x, 7.) / (1 + std::exp(-1.702 * std::min(x, 7.)));  // of up = 1
  return fn == kRelu ? std::max(x, 0.) : std::max(x, 0.) * std::max(x, 0.);
}

void accuracy_steps(const Kernels& kernels, Random random, Worst& worst) {
  constexpr int kCount = 4096;
  const Floats ones(kCount);
  std::fill(ones.begin(), ones.end(), 1.f);
  for (const float scale : {1e-3f, 0.5f, 3.f, 30.f}) {
    const Floats x = normals(random, kCount, scale);
    Floats y(kCount);
    for (int fn = kGelu; fn < kFns; ++fn) {
      kernels.glu[fn](x.get(), ones.get(), kCount, y.get());
      for (int i = 0; i < kCount; ++i) {  // below 0 nearly nothing is left: absolute
        const double exact = exact_fn(fn, x[i]), error = std::fabs(y[i] - exact);
        worst.offer(std::string(kFnNames[fn]) + (x[i] > 0 ? "" : "_below"), x[i] > 0 ? error / exact : error);
      }
    }
    constexpr float kNumbers[] = {0.7f, 1.1f, 0.5f};
    std::copy(x.begin(), x.end(), y.begin());
    kernels.xielu(y.get(), kCount, kNumbers);
    for (int i = 0; i < kCount; ++i) {
      const double v = x[i], low = std::min(v, 0.), high = std::max(v, 0.);
      const double exact = 0.7f * high * high + 1.1f * (std::expm1(low) - low) + 0.5 * v;
      worst.offer("xielu", std::fabs(y[i] - exact) / std::max(std::fabs(exact), std::fabs(v)));
    }
    for (const float cap : {0.5f, 30.f}) {
      std::copy(x.begin(), x.end(), y.begin());
      kernels.softcap(y.get(), kCount, cap);
      for (int i = 0; i < kCount; ++i) {
        const double exact = cap * std::tanh(double(x[i]) / cap);
        worst.offer("softcap", exact ? std::fabs(y[i] - exact) / std::fabs(exact) : std::fabs(y[i]));
      }
    }
    Floats z(kCount);
    double sum = 0, squares = 0;
    for (float& v : x) sum += v += 10 * scale;
    for (const float v : x) squares += (v - sum / kCount) * (v - sum / kCount);
    const double deviation = std::sqrt(squares / kCount);
    kernels.center(x.get(), kCount, z.get());
    for (int i = 0; i < kCount; ++i) worst.offer("center", std::fabs(z[i] - (x[i] - sum / kCount)) / deviation);
    kernels.norm(z.get(), kCount, nullptr, 0.f, y.get());  // a layer norm, in two passes
    for (int i = 0; i < kCount; ++i) worst.offer("layer_norm", std::fabs(y[i] - (x[i] - sum / kCount) / deviation));
  }
  for (const float x : {HUGE_VALF, 3e38f, -3e38f, -HUGE_VALF}) {  // nothing overflows
    Floats y(kTile);
    std::fill(y.begin(), y.end(), x);
    kernels.softcap(y.get(), kTile, 30.f);
    worst.offer("softcap_large", std::fabs(y[3] - (x > 0 ? 30 : -30)));
    if (std::isinf(x)) continue;
    std::fill(y.begin(), y.end(), x);
    for (int fn = kGelu; fn < kFns; ++fn) {
      Floats z(kTile);
      kernels.glu[fn](y.get(), ones.get(), kTile, z.get());
      if (fn != kSigmoid && fn != kSwigluOai && (fn != kRelu2 || x < 0))
        worst.offer("functions_large", x > 0 ? std::fabs(z[3] - x) : std::fabs(z[3]));
    }
  }
  Floats y(kTile);
  for (int c = 0; c < kTile; ++c) y[c] = c % 2 ? NAN : 1.f;  // NaN stays NaN
  kernels.softcap(y.get(), kTile, 30.f);
  for (int c = 0; c < kTile; ++c) worst.offer("softcap_nan", std::isnan(y[c]) == (c % 2 == 1) ? 0 : 1);
}

void accuracy_attention(const Kernels& kernels, Random random, Worst& worst) {
  for (const int dim : {16, 64, 128}) {
    const int count = 3;
    const Floats x = normals(random, size_t(count) * dim);
    for (int format = kKvF32; format <= kKvNomad2; ++format) {
      const int sub = format == kKvNomad2 ? 2 : 1, subs = dim / sub;
      const auto block = make_block(random, static_cast<KvFormat>(format), dim);
      const Floats codebook = normals(random, size_t(dim) * 16);
      Array<int8_t> q8(size_t(count) * dim);
      Array<uint8_t> lut(size_t(count) * dim * 16);
      std::vector<Query> queries;
      for (int i = 0; i < count; ++i) {
        Query q = {x.get() + size_t(i) * dim,       q8.get() + size_t(i) * dim, 1.f, 0.f, 0,
                   lut.get() + size_t(i) * dim * 16};
        if (format == kKvInt8 || format == kKvInt4)
          q.scale = kernels.quantize_query(q.f, dim, q8.get() + size_t(i) * dim, &q.minus_sum);
        if (format >= kKvNomad1)
          kernels.lookup_table(codebook.get(), q.f, dim, sub, lut.get() + size_t(i) * dim * 16, &q.scale, &q.bias);
        queries.push_back(q);
      }
      Floats out(size_t(count) * kKvBlock);
      kernels.score(static_cast<KvFormat>(format), block.get(), dim, 0, 8, queries.data(), count, out.get(), kKvBlock,
                    0);
      for (int i = 0; i < count; ++i)
        for (int token = 0; token < kKvBlock; ++token) {
          const int tile = token / 16, c = token % 16;
          double sum = 0, size = 0;
          for (int d = 0; d < dim; ++d) {
            double key = 0, by = x[size_t(i) * dim + d];
            if (format == kKvF32) {
              float v;
              std::memcpy(&v, &block[((size_t(tile) * dim + d) * 16 + c) * 4], 4);
              key = v;
            } else if (format == kKvF16) {
              uint16_t v;
              std::memcpy(&v, &block[((size_t(tile) * dim + d) * 16 + c) * 2], 2);
              key = half_to_float(v);
            } else if (format == kKvInt8) {
              float scale;
              std::memcpy(&scale, &block[size_t(kKvBlock) * dim + token * 4], 4);
              key = (block[(size_t(tile) * dim + d / 4 * 4) * 16 + c * 4 + d % 4] - 128) * double(scale);
              by = queries[i].q8[d] * double(queries[i].scale);
            } else if (format == kKvInt4) {
              const uint8_t byte = block[size_t(tile) * dim * 8 + d / 8 * 64 + c * 4 + d % 4];
              key = d % 8 < 4 ? byte & 15 : byte >> 4;
              by = queries[i].q8[d] * double(queries[i].scale);
            } else {
              const uint8_t byte = block[size_t(d / sub) * 64 + (token % 32) * 2 + token % 64 / 32];
              key = codebook[size_t(d) * 16 + (token < 64 ? byte & 15 : byte >> 4)];
            }
            sum += key * by;
            size += std::fabs(key * by);
          }
          const double error = std::fabs(out[size_t(i) * kKvBlock + token] - sum);
          // nomad: in steps of the table, of which each look-up may be half of one off
          worst.offer(std::string("score_") + kFormatNames[format],
                      error / (format >= kKvNomad1 ? subs * queries[i].scale : size));
        }
    }
    for (int i = 0; i < count; ++i) {
      Array<int8_t> q(dim);
      int32_t minus_sum;
      const float scale = kernels.quantize_query(x.get() + size_t(i) * dim, dim, q.get(), &minus_sum);
      for (int d = 0; d < dim; ++d)
        worst.offer("quantize_query", std::fabs(x[size_t(i) * dim + d] / double(scale) - q[d]));
    }
    for (int format = kKvF32; format <= kKvInt8; ++format) {
      const auto values = make_block(random, static_cast<KvFormat>(format), dim, true);
      Floats p(size_t(count) * kKvBlock), out(size_t(count) * dim);
      for (float& v : p) v = random.uniform(0.f, 1.f);
      kernels.weigh(static_cast<KvFormat>(format), values.get(), dim, 0, kKvBlock, p.get(), kKvBlock, count, out.get(),
                    0);
      for (int i = 0; i < count; ++i)
        for (int d = 0; d < dim; ++d) {
          double sum = 0, size = 0;
          for (int n = 0; n < kKvBlock; ++n) {
            double value;
            if (format == kKvF32) {
              float v;
              std::memcpy(&v, &values[(size_t(n) * dim + d) * 4], 4);
              value = v;
            } else if (format == kKvF16) {
              uint16_t v;
              std::memcpy(&v, &values[(size_t(n) * dim + d) * 2], 2);
              value = half_to_float(v);
            } else {
              float scale;
              std::memcpy(&scale, &values[size_t(kKvBlock) * dim + n * 4], 4);
              value = static_cast<int8_t>(values[size_t(n / 4) * dim * 4 + d * 4 + n % 4]) * double(scale);
            }
            sum += value * p[size_t(i) * kKvBlock + n];
            size += std::fabs(value * p[size_t(i) * kKvBlock + n]);
          }
          worst.offer(std::string("weigh_") + kFormatNames[format], std::fabs(out[size_t(i) * dim + d] - sum) / size);
        }
    }
  }
}

void accuracy_delta(const Kernels& kernels, Random random, Worst& worst) {
  constexpr int kDim = 128;
  const Floats from = normals(random, kDim * kTile), q = normals(random, kDim), k = normals(random, kDim, 0.1f),
               v = normals(random, kTile), a = normals(random, kTile, 4.f), rate = normals(random, kTile), zeros(kTile);
  Floats to(kDim * kTile), out(kTile), decay(kTile), beta(kTile), positive(kTile);
  for (int c = 0; c < kTile; ++c) positive[c] = std::fabs(rate[c]);
  kernels.decays(a.get(), a.get(), zeros.get(), positive.get(), kTile, decay.get(), beta.get());
  kernels.delta(from.get(), to.get(), kDim, q.get(), k.get(), v.get(), 0.75f, 0.5f, out.get());
  for (int c = 0; c < kTile; ++c) {
    const double exact = std::exp(-double(positive[c]) * std::log1p(std::exp(double(a[c]))));
    worst.offer("decays", std::fabs(decay[c] - exact));
    worst.offer("decays", std::fabs(beta[c] - 1 / (1 + std::exp(-double(a[c])))));
    double known = 0, read = 0, size = 0;
    for (int i = 0; i < kDim; ++i) known += 0.75 * from[i * kTile + c] * k[i];
    for (int i = 0; i < kDim; ++i) {
      const double state = 0.75 * from[i * kTile + c] + 0.5 * k[i] * (v[c] - known);
      read += state * q[i];
      size += std::fabs(state * q[i]);
    }
    worst.offer("delta", std::fabs(out[c] - read) / size);
  }
}

}  // namespace

void print_accuracy(const Kernels& kernels) {
  Worst worst;
  accuracy_linear(kernels, Random(4), worst);
  accuracy_functions(kernels, Random(5), worst);
  accuracy_attention(kernels, Random(6), worst);
  accuracy_steps(kernels, Random(8), worst);
  accuracy_delta(kernels, Random(9), worst);
  worst.print();
}

}  // namespace edgespec
