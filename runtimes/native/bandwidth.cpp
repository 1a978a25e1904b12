// How fast this machine reads memory: what decoding's speed is compared with.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Reads `count` words from each of `streams` places far apart, a cache line from each in turn.
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

}  // namespace

// GB/s of the best of `repeats` reads of `bytes` by `threads` threads of `streams` streams each.
extern "C" __attribute__((visibility("default"))) double edgespec_read_bandwidth(size_t bytes, int threads, int streams,
                                                                                 int repeats) {
  const size_t words = bytes / 8 / threads * threads;
  const std::unique_ptr<uint64_t[]> data(new uint64_t[words]);
  std::memset(data.get(), 1, words * 8);
  double best = 0;
  std::atomic<uint64_t> sink{0};
  for (int repeat = 0; repeat < repeats; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<double> seconds(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
      pool.emplace_back([&, t] {
        ++ready;
        while (ready < threads) std::this_thread::yield();
        const auto start = Clock::now();
        sink += read(data.get() + words / threads * t, words / threads, streams);
        seconds[t] = std::chrono::duration<double>(Clock::now() - start).count();
      });
    double slowest = 0;
    for (int t = 0; t < threads; ++t) {
      pool[t].join();
      slowest = seconds[t] > slowest ? seconds[t] : slowest;
    }
    const double rate = static_cast<double>(words) * 8 / slowest / 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}
