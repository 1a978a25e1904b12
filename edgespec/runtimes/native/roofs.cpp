// The machine's two roofs: how fast it reads memory, and how fast it multiplies bytes.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "kernels.h"
#include "visible.h"

namespace {

using Clock = std::chrono::steady_clock;

// Reads `count` words from `streams` distant places, one cache line from each in turn.
uint64_t read(const uint64_t* words, size_t count, int streams) {
  constexpr int kLine = 8;
  uint64_t sum[kLine] = {};
  const size_t stride = count / streams / kLine * kLine;
  for (size_t i = 0; i < stride; i += 4 * kLine)
    for (int s = 0; s < streams; ++s) {
      const uint64_t* line = words + s * stride + i;
      for (int l = 0; l < 4; ++l)
        for (int w = 0; w < kLine; ++w) sum[w] += line[l * kLine + w];
    }
  uint64_t all = 0;
  for (const uint64_t part : sum) all ^= part;
  return all;
}

// The best of `repeats` rates, each that of `threads` threads which begin together and do work(thread) units each.
template <class Function>
double best_rate(int threads, int repeats, Function work) {
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<double> seconds(threads), units(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        ++ready;
        while (ready < threads) std::this_thread::yield();
        const auto start = Clock::now();
        units[t] = work(t);
        seconds[t] = std::chrono::duration<double>(Clock::now() - start).count();
      });
    double slowest = 0, all = 0;
    for (int t = 0; t < threads; ++t) {
      pool[t].join();
      slowest = seconds[t] > slowest ? seconds[t] : slowest;
      all += units[t];
    }
    best = all / slowest > best ? all / slowest : best;
  }
  return best;
}

}  // namespace

// GB/s of the best of `repeats` reads of `bytes` by `threads` threads of `streams` streams each.
EDGESPEC_EXPORT double edgespec_read_bandwidth(size_t bytes, int threads, int streams, int repeats) {
  const size_t each = bytes / 8 / threads;
  const std::unique_ptr<uint64_t[]> data(new uint64_t[each * threads]);
  std::memset(data.get(), 1, each * threads * 8);
  std::atomic<uint64_t> sink{0};
  return 1e-9 * best_rate(threads, repeats, [&](int t) {
           sink += read(data.get() + each * t, each, streams);
           return static_cast<double>(each) * 8;
         });
}

// GMAC/s of the best of `repeats` runs of byte products in registers, `rounds` of them by each of `threads` threads.
EDGESPEC_EXPORT double edgespec_dot_rate(int64_t rounds, int threads, int repeats) {
  return 1e-9 * best_rate(threads, repeats, [&](int) { return static_cast<double>(edgespec::kernels().dots(rounds)); });
}
