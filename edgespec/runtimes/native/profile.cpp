#include "profile.h"

#include <atomic>
#include <mutex>

#include "pass.h"
#include "visible.h"

namespace edgespec {
namespace {

std::atomic<bool> g_on{false};
std::mutex g_mutex;
Counted g_parts[kParts];
double g_seconds = 0;
int64_t g_passes = 0;

Part part_of(Op op) {
  switch (op) {
    case Op::kHeads:
    case Op::kLinear:
    case Op::kExperts:
    case Op::kGlu: return kMatrices;
    case Op::kAttend: return kAttentionPart;
    case Op::kLogits: return kHead;
    default: return kRest;
  }
}

}  // namespace

bool is_profiling() { return g_on.load(std::memory_order_relaxed); }

void add_profile(const Counted (&parts)[kParts], double seconds) {
  const std::lock_guard<std::mutex> lock(g_mutex);
  for (int i = 0; i < kParts; ++i) {
    g_parts[i].seconds += parts[i].seconds;
    g_parts[i].bytes += parts[i].bytes;
    g_parts[i].macs += parts[i].macs;
  }
  g_seconds += seconds;
  ++g_passes;
}

// A phase begins: `step` with these chunks, after serial steps, which count as the rest.
void Pass::count_phase() {
  watch_.ended(kRest);
  if (!step_) return watch_.finish();
  if (merging_) return;
  const Step& s = *step_;
  const int rows = count(s);
  const auto bytes_of = [&](int k, Kind kind) {  // of a tile
    const bool low = kind == kP8 && !s.high_alone(in_.gates, kind);
    return static_cast<double>(tile_bytes(kind, k) + (low ? low_bytes(k) : 0));
  };
  const auto matrix = [&](Part part, int tiles) {
    watch_.counted(part, static_cast<double>(tiles) * bytes_of(s.k, s.kind),
                   static_cast<double>(tiles) * kTile * s.k * rows);
  };
  switch (s.op) {
    case Op::kHeads:
      if (s.qx < 0) matrix(kMatrices, s.made() * (dim_ / kTile));
      return;
    case Op::kLinear: return matrix(kMatrices, tiles_of(s.n));
    case Op::kExperts: {  // only those that some row was sent to
      const bool first = mixing_ == 1;
      const double bytes = first ? bytes_of(s.k, s.kind) : bytes_of(s.n, s.downkind);
      const double tiles = first ? 2 * tiles_of(s.n) : mixing_ == 3 ? tiles_of(s.k) : 0;
      watch_.counted(kMatrices, static_cast<double>(experts_.size()) * tiles * bytes,
                     tiles * kTile * (first ? s.k : s.n) * rows * s.heads);
      return;
    }
    case Op::kGlu: return matrix(kMatrices, (s.up < 0 ? 1 : 2) * tiles_of(s.n));
    case Op::kLogits: return matrix(kHead, tiles_of(s.n));
    case Op::kAttend:
      for (const Group& group : groups_) {
        const double tokens = static_cast<double>(group.end - group.begin);
        watch_.counted(kAttentionPart, tokens * s.kv * static_cast<double>(layout(s).head_bytes(s.layer)) / kKvBlock,
                       tokens * group.count * s.heads * dim_ * 2);
      }
      return;
    default: return;
  }
}

int Pass::open(int members) {
  if (!watch_.on()) return next_phase(members);
  watch_.ended(step_ ? part_of(step_->op) : kRest);
  const int chunks = next_phase(members);
  count_phase();
  return chunks;
}

}  // namespace edgespec

// Counts passes from now on, from nothing, or stops counting.
EDGESPEC_EXPORT void edgespec_profile(int on) {
  using namespace edgespec;
  const std::lock_guard<std::mutex> lock(g_mutex);
  for (Counted& part : g_parts) part = {};
  g_seconds = 0;
  g_passes = 0;
  g_on = on != 0;
}

// Writes out [2 + 3 * 4]: passes, their seconds, then seconds, bytes and multiply-adds of matrices, attention, LM heads
// and the rest.
EDGESPEC_EXPORT void edgespec_profile_read(double* out) {
  using namespace edgespec;
  const std::lock_guard<std::mutex> lock(g_mutex);
  *out++ = static_cast<double>(g_passes);
  *out++ = g_seconds;
  for (const Counted& part : g_parts) {
    *out++ = part.seconds;
    *out++ = part.bytes;
    *out++ = part.macs;
  }
}
