// Shared code of the parts that measure time: lists of words, medians, and one pass by several threads.
#pragma once
#include <atomic>
#include <chrono>

#include "selftest_model.h"

extern "C" double edgespec_read_bandwidth(size_t bytes, int threads, int streams, int repeats);  // roofs.cpp
extern "C" double edgespec_dot_rate(int64_t rounds, int threads, int repeats);

namespace edgespec {

// "a,b" and the like.
inline std::vector<std::string> parts(const std::string& text, char between = ',') {
  std::vector<std::string> found;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(between, at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// Milliseconds of a pass of a chain of rows after `depth` tokens; `in` lacks only the plan.
inline double timed(const Program& program, PassInputs in, Scratch& scratch, int depth, int rows, int threads) {
  std::vector<int64_t> plan(size_t(6) * rows);
  for (int r = 0; r < rows; ++r) {
    const int64_t fields[] = {r % 16, depth + r, 0, depth, r - 1, depth + r};  // as PassInputs says
    for (int line = 0; line < 6; ++line) plan[size_t(line) * rows + r] = fields[line];
  }
  in.plan = plan.data();
  in.rows = rows;
  Pass pass(program, kernels(), in, {}, scratch);
  Team<Pass> team(pass);
  std::atomic<int> here{0};
  std::atomic<bool> all_here{false};
  std::chrono::steady_clock::time_point start;
  const auto start_together = [&] {
    if (++here < threads) {
      while (!all_here) std::this_thread::yield();
    } else {  // the last sets the clock: the first may sleep through what the others do
      start = std::chrono::steady_clock::now();
      all_here = true;
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t)
    others.emplace_back([&] {
      start_together();
      team.join();
    });
  start_together();
  team.join();
  const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
  for (std::thread& t : others) t.join();
  team.finish();
  return taken.count();
}

using Times = std::map<std::string, std::map<int, std::vector<double>>>;  // by format and rows

// Medians by rows, as JSON: {"1": .., "8": ..}.
inline void print_medians(const std::map<int, std::vector<double>>& times) {
  const char* between = "{";
  for (const auto& [rows, all] : times) {
    std::printf("%s\"%d\": %.6f", between, rows, median(all));
    between = ", ";
  }
  std::printf("}");
}

// Medians by format and rows, as JSON: {"NAME": {"bytes": .., "products": .., "ms": {"1": ..}}, ..}, and "held_ms" like
// "ms" where there are such.  Of a format, `bytes` are read by a pass and `products` are multiply-adds of one row.
template <class Measured>
void print_formats(const std::map<std::string, Measured>& formats, Times& times, Times held = {}) {
  const char* between = "";
  for (const auto& [name, one] : formats) {
    std::printf("%s\"%s\": {\"bytes\": %zu, \"products\": %lld, \"ms\": ", between, name.c_str(), one.bytes,
                static_cast<long long>(one.products));
    print_medians(times[name]);
    if (held.count(name)) {
      std::printf(", \"held_ms\": ");
      print_medians(held[name]);
    }
    std::printf("}");
    between = ", ";
  }
}

}  // namespace edgespec
