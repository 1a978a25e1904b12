// What a step of a program must say, looked at line by line while it is read.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "program.h"

namespace edgespec {
namespace program_text {
namespace {

constexpr int kMaxGates = 1 << 16, kMaxTimes = 1 << 10;

void require(const std::string& line, bool good, const char* what) {
  if (!good) fail(line, what);
}

// Options that a step does not know are not passed over in silence.
void check_options(const std::string& line, const Step& s) {
  const bool norms = s.op == Op::kQuantize || s.op == Op::kNorm, logits = s.op == Op::kLogits,
             embeds = s.op == Op::kEmbed, blends = s.op == Op::kBlend;
  require(line, norms || (s.beta < 0 && !s.center), "beta or center out of place");
  require(line, s.center <= 1, "expected center 0 or 1");
  require(line, s.beta < 0 || s.norm >= 0, "beta without norm");
  require(line, embeds || s.positions < 0, "positions out of place");
  require(line,
          embeds || logits || blends || (s.op == Op::kNorm && s.add) || s.op == Op::kRoute || s.op == Op::kHeads ||
              s.op == Op::kDelta || s.scale == 1,
          "scale out of place");
  require(line, s.op == Op::kHeads || std::isfinite(s.scale), "expected a finite scale");
  require(line,
          blends || s.op == Op::kExperts || s.op == Op::kGlu || s.op == Op::kActivate || s.op == Op::kMultiply ||
              s.fn == kSilu || (s.op == Op::kRoute && s.fn == kSigmoid),
          "fn out of place");
  require(line, s.fn != kXielu || s.op == Op::kActivate, "fn out of place");
  require(line, s.op != Op::kActivate || (s.fn == kXielu) == (s.w >= 0), "expected w for xielu alone");
  require(line, s.op == Op::kHeads || (!s.late && s.growth < 0), "late or growth out of place");
  const bool delta = s.op == Op::kDelta;
  require(line, s.op == Op::kConvolve || delta || !s.length, "length out of place");
  require(line, delta || (s.z < 0 && s.a < 0 && s.b < 0 && s.rate < 0), "z, a, b or rate out of place");
  require(line, s.late <= 1, "expected late 0 or 1");
  const bool places = s.op == Op::kLoad || s.op == Op::kStore || (s.op == Op::kNorm && s.n);
  require(line, places || !s.at, "at out of place");
  require(line, s.at <= kMaxWidth, "at out of range");
  require(line, s.op == Op::kGate || s.other < 0, "other out of place");
  require(line, s.op == Op::kHeads || (!s.shared && s.vnorm < 0), "shared or vnorm out of place");
  require(line, s.shared <= 1 && (!s.shared || (s.qx < 0 && s.knorm < 0 && s.vnorm < 0)), "expected queries alone");
  require(line, s.op == Op::kAttend || logits || s.cap == 0, "cap out of place");
  require(line, s.cap >= 0 && std::isfinite(s.cap), "expected a cap of at least 0");
  require(line, s.op == Op::kHeads || (s.qx < 0 && s.kx < 0 && s.vx < 0), "qx, kx or vx out of place");
  require(line, (s.qx < 0) == (s.kx < 0) && (s.qx < 0) == (s.vx < 0), "expected all of qx, kx and vx, or none");
}

}  // namespace

[[noreturn]] void fail(const std::string& line, const std::string& why) {
  constexpr size_t kShown = 300;
  throw std::invalid_argument("edgespec program: " + why + ": '" + line.substr(0, kShown) +
                              (line.size() > kShown ? "...'" : "'"));
}

void check(const std::string& line, const Program& p, const Step& s) {
  const auto floats = [&](int id, int width) {
    require(line, id >= 0 && id < int(p.floats.size()) && p.floats[id] >= width, "no such buffer, or too narrow");
  };
  const auto acts = [&](int id, int width) {
    require(line, id >= 0 && id < int(p.acts.size()) && p.acts[id] >= width, "no such activations, or too narrow");
  };
  const auto matrix = [&] {
    require(line, s.n > 0 && s.n <= kMaxWidth && s.k > 0 && s.k <= kMaxWidth, "expected n and k");
  };
  require(line,
          s.heads <= kMaxCount && s.kv <= kMaxCount && s.layer <= kMaxCount && s.index <= kMaxGates &&
              s.k <= kMaxWidth && s.n <= kMaxWidth && s.dim <= kMaxHeadDim && s.rotary <= kMaxHeadDim,
          "number out of range");
  require(line, s.other <= kMaxGates, "number out of range");
  require(line, s.kind <= kF32 || s.op == Op::kEmbed || s.op == Op::kBlend, "rows can only be looked up");
  require(line, s.times >= 1 && s.times <= kMaxTimes && s.first <= kMaxTimes, "times or first out of range");
  const bool picks = s.op == Op::kQuantize || s.op == Op::kNorm || s.op == Op::kLinear || s.op == Op::kActivate;
  const bool repeats = s.op == Op::kLogits || s.op == Op::kSplit || s.op == Op::kBlend || s.op == Op::kExperts ||
                       s.op == Op::kRoute || s.op == Op::kMultiply || (s.op == Op::kQuantize && s.rows == 2);
  require(line, s.rows == 0 || (picks && s.rows == 1) || (repeats && s.op == Op::kQuantize), "rows out of place");
  require(line, repeats || (s.times == 1 && s.first == 0), "times or first out of place");
  check_options(line, s);
  switch (s.op) {
    case Op::kEmbed:
      matrix();
      require(line, s.kind != kR8 || s.bias >= 0, "expected bias: the scales of the rows");
      require(line, s.w >= 0, "expected w");
      floats(s.out, s.k);
      break;
    case Op::kGate: break;
    case Op::kLoad:
    case Op::kStore:
      require(line, s.k > 0, "expected k");
      floats(s.op == Op::kLoad ? s.out : s.x, s.k);
      break;
    case Op::kNorm:
      require(line, s.k > 0 && (s.norms() || s.n) && s.x != s.out, "expected k, norm, and out beside x");
      require(line, s.add <= 1, "expected add 0 or 1");
      require(line, !s.n || (s.at <= s.n - s.k && !s.add), "expected at + k within n, and no add");
      floats(s.x, s.k);
      floats(s.out, std::max(s.n, s.k));
      break;
    case Op::kActivate:
      require(line, s.k > 0, "expected k");
      floats(s.x, s.k);
      break;
    case Op::kBlend:
      require(line, s.n > 0 && s.k > 0 && s.k <= kMaxWidth / s.times && s.first < s.times,
              "expected n, k, times, first");
      require(line, s.w >= 0 && (s.kind == kR32 || (s.kind == kR8 && s.bias >= 0)),
              "expected rows: w, and bias for r8");
      require(line, s.x != s.base, "expected base beside x");
      floats(s.x, s.k);
      floats(s.base, s.k);
      break;
    case Op::kRoute:
      require(line, s.k > 0 && s.k <= s.n && s.n <= kMaxTimes && s.add <= 1, "expected k of n, at most 1024");
      require(line, s.first < s.k && s.times == 1, "expected first below k");
      floats(s.x, s.n);
      floats(s.out, 2 * s.k);
      require(line, s.x != s.out, "expected out beside x");
      break;
    case Op::kExperts:
      require(line, s.gate >= 0 && s.up >= 0 && s.w >= 0 && s.first == 0, "expected gate, up and w");
      require(line, s.n > 0 && s.k > 0 && s.n % kBlock == 0 && s.k % kTile == 0, "expected n and k of whole tiles");
      require(line, s.n <= kMaxWidth / s.times && s.k <= kMaxWidth / s.times, "number out of range");
      require(line, s.heads > 0 && s.heads <= s.times && s.add <= 1 && s.x != s.out, "expected heads of times");
      acts(s.act, s.k);
      floats(s.x, 2 * s.heads);
      floats(s.out, s.k);
      break;
    case Op::kSplit:
      require(line, s.n > 0 && s.n <= kMaxWidth / s.times && s.first == 0, "expected n, and times as often");
      require(line, s.x != s.out && s.base != s.out, "expected out beside x and base");
      floats(s.x, s.n * s.times);
      if (s.base >= 0) floats(s.base, s.n);
      floats(s.out, s.n);
      break;
    case Op::kQuantize:
      require(line, s.k > 0, "expected k");
      floats(s.x, s.k);
      acts(s.out, s.k);
      break;
    case Op::kHeads:
      require(line, s.qx >= 0 || (s.w >= 0 && s.k > 0), "expected w and k, or qx, kx and vx");
      require(line, s.heads > 0 && s.kv > 0 && s.heads % s.kv == 0, "expected heads, and kv that divide them");
      require(line, s.dim > 0 && s.dim <= kMaxHeadDim && s.rotary <= s.dim && s.rotary % 2 == 0,
              "head size out of range");
      require(line, s.rotary == 0 || (s.cos >= 0 && s.sin >= 0), "expected cos and sin");
      if (s.qx < 0) {
        acts(s.act, s.k);
      } else {
        floats(s.qx, s.heads * s.dim);
        floats(s.kx, s.kv * s.dim);
        floats(s.vx, s.kv * s.dim);
      }
      break;
    case Op::kConvolve:
      require(line, s.k > 0 && s.k <= kMaxWidth / 3 && s.w >= 0 && s.x != s.out, "expected k, w, and out beside x");
      require(line, s.length > 1 && s.length <= kMaxTaps, "expected a length of 2 to 16");
      floats(s.x, 3 * s.k);
      floats(s.out, s.k);
      break;
    case Op::kDelta:
      require(line, s.heads > 0 && s.kv > 0 && s.heads % s.kv == 0, "expected heads, and kv that divide them");
      require(line, s.dim > 0 && s.dim % kTile == 0 && s.n > 0 && s.n <= kMaxHeadDim && s.n % kTile == 0,
              "expected dim and n that are multiples of 16");
      require(line, int64_t(s.heads) * s.dim * s.n <= kMaxWidth, "number out of range");
      require(line, s.k == 2 * s.kv * s.dim + s.heads * s.n, "expected k to be that of q, k and v");
      require(line, s.length > 1 && s.length <= kMaxTaps, "expected a length of 2 to 16");
      require(line, s.w >= 0 && s.bias >= 0 && s.rate >= 0 && s.spaces() == (s.norm < 0),
              "expected w, bias, rate, and norm or up");
      require(line, s.out != s.x && s.out != s.z && s.out != s.a && s.out != s.b, "expected out beside what is read");
      floats(s.x, s.k);
      floats(s.z, s.heads * s.n);
      floats(s.a, s.heads);
      if (!s.spaces()) floats(s.b, s.heads);
      floats(s.out, s.heads * s.n);
      break;
    case Op::kMultiply:
      require(line, s.k > 0 && s.x != s.out && s.k % s.times == 0 && !s.first, "expected k, and out beside x");
      floats(s.x, s.k / s.times);
      floats(s.out, s.k);
      break;
    case Op::kAttend:
      require(line, s.heads > 0 && s.kv > 0 && s.dim > 0, "expected heads");
      floats(s.out, s.heads * s.dim);
      break;
    case Op::kLinear:
      matrix();
      require(line, s.w >= 0, "expected w");
      acts(s.act, s.k);
      floats(s.out, s.n);
      break;
    case Op::kGlu:
      matrix();
      require(line, s.gate >= 0 && s.up >= 0, "expected gate and up");
      require(line, s.kind == kC8 || s.act != s.out, "expected out beside act");
      acts(s.act, s.k);
      s.kind == kC8 ? floats(s.out, s.n) : acts(s.out, s.n);
      break;
    case Op::kLogits:
      matrix();
      require(line, s.w >= 0, "expected w");
      acts(s.act, s.k);
      break;
  }
}

}  // namespace program_text
}  // namespace edgespec
