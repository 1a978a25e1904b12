// Where the time of passes goes: counted for `edgespec bench --profile`, off otherwise.
#pragma once
#include <chrono>

#include "layout.h"
#include "program.h"

namespace edgespec {

enum Part { kMatrices = 0, kAttentionPart = 1, kHead = 2, kRest = 3, kParts = 4 };

struct Counted {
  double seconds = 0;
  double bytes = 0;  // of weights, or of keys and values, that are read
  double macs = 0;   // multiply-adds
};

// Whether passes count; asked once a pass.
bool is_profiling();
// Adds a finished pass to what edgespec_profile_read gives.
void add_profile(const Counted (&parts)[kParts], double seconds);

// The parts of one pass.  Phases follow one another, so the time between two calls belongs to one part.
class Stopwatch {
 public:
  Stopwatch() : on_(is_profiling()), begun_(now()), last_(begun_) {}
  bool on() const { return on_; }
  void ended(Part part) { parts_[part].seconds += lap(); }
  void counted(Part part, double bytes, double macs) {
    parts_[part].bytes += bytes;
    parts_[part].macs += macs;
  }
  void finish() const { add_profile(parts_, std::chrono::duration<double>(last_ - begun_).count()); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point now() const { return on_ ? Clock::now() : Clock::time_point(); }
  double lap() {
    const auto before = last_;
    last_ = Clock::now();
    return std::chrono::duration<double>(last_ - before).count();
  }

  bool on_;
  Clock::time_point begun_, last_;
  Counted parts_[kParts];
};

}  // namespace edgespec
