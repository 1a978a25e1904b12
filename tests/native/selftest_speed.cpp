// How fast passes multiply by matrices, beside what memory and dot products allow (benchmarks/device.py).
#include <sys/utsname.h>

#include <atomic>
#include <chrono>
#include <fstream>

#include "selftest_model.h"

extern "C" double edgespec_read_bandwidth(size_t bytes, int threads, int streams, int repeats);  // roofs.cpp
extern "C" double edgespec_dot_rate(int64_t rounds, int threads, int repeats);

namespace edgespec {
namespace {

using Shape = std::pair<int, int>;  // [n, k]

std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> found;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    found.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return found;
}

// Matrices of some layers, one after the other, each with the quantization of what it multiplies.
class Layers {
 public:
  Layers(Kind kind, const std::vector<Shape>& shapes, int layers) {
    Random random(5);
    int most = kTile, widest = 2 * kBlock;
    for (const auto& [n, k] : shapes) {
      most = std::max(most, n);
      widest = std::max(widest, k);
    }
    const std::string width = std::to_string(widest), name = kKindNames[kind], form = kind == kQ4x64 ? name : "q4";
    std::string text = "floats 0 " + width + "\nacts 0 " + width + "\nfloats 1 " + std::to_string(most) +
                       "\nembed w=0 kind=r32 n=16 k=" + width + " out=0\n";
    weights_.emplace_back(size_t(16) * widest * 4);
    const Floats table = normals(random, size_t(16) * widest);
    std::memcpy(weights_[0].get(), table.get(), table.bytes());
    for (int layer = 0; layer < layers; ++layer)
      for (const auto& [n, k] : shapes) {
        const std::string size = " k=" + std::to_string(k);
        text += "quantize x=0" + size + " kind=" + form + " out=0\nlinear act=0 w=" + std::to_string(weights_.size()) +
                " kind=" + name + " n=" + std::to_string(n) + size + " out=1\n";
        const auto tile = make_tile(random, kind, k);
        weights_.emplace_back(packed_bytes(kind, n, k));
        for (size_t at = 0; at < weights_.back().size(); at += tile.size())
          std::memcpy(weights_.back().get() + at, tile.get(), tile.size());
        bytes += weights_.back().size();
        products += int64_t(n) * k;
      }
    // a decoder must have a head
    text += "quantize x=0 k=64 kind=f32 out=0 rows=1\nlogits act=0 w=" + std::to_string(weights_.size()) +
            " kind=f32 n=16 k=64\n";
    weights_.emplace_back(packed_bytes(kF32, 16, 64));
    program_ = Program::parse(text);
  }

  // Milliseconds of a pass.
  double time(int rows, int threads) {
    std::vector<int64_t> plan(size_t(6) * rows);
    for (int r = 0; r < rows; ++r) {
      const int64_t fields[] = {r % 16, r, 0, 0, r - 1, r};  // as PassInputs says
      for (int line = 0; line < 6; ++line) plan[size_t(line) * rows + r] = fields[line];
    }
    Array<uint8_t> kv(1 << 12);
    PassInputs in;
    in.plan = plan.data();
    in.rows = rows;
    in.kv = kv.get();
    in.kv_bytes = kv.bytes();
    in.slots = 1;
    for (const auto& w : weights_) in.weights.push_back({w.get(), w.bytes()});
    Pass pass(program_, kernels(), in, {}, scratch_);
    Team<Pass> team(pass);
    std::atomic<int> ready{0};
    const auto start_together = [&] {
      ++ready;
      while (ready < threads) std::this_thread::yield();
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; ++t)
      others.emplace_back([&] {
        start_together();
        team.join();
      });
    start_together();
    const auto start = std::chrono::steady_clock::now();
    team.join();
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    for (std::thread& t : others) t.join();
    team.finish();
    return taken.count();
  }

  size_t bytes = 0;
  int64_t products = 0;  // of one row

 private:
  std::vector<Array<uint8_t>> weights_;
  Program program_;
  Scratch scratch_;
};

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

}  // namespace

void print_processor() {
  std::map<std::string, int> cores;
  std::ifstream about("/proc/cpuinfo");
  for (std::string line; std::getline(about, line);)  // Arm's part number, or a name
    if (!line.compare(0, 8, "CPU part") || !line.compare(0, 10, "model name")) ++cores[line.substr(line.find(':') + 2)];
  utsname system{};
  uname(&system);
  std::printf("%s %s, %u cores", system.sysname, system.machine, std::thread::hardware_concurrency());
  for (const auto& [name, count] : cores) std::printf(", %d x %s", count, name.c_str());
  std::printf("\n");
}

void print_speed(int threads, int turns, int layers, int megabytes, const std::string& rows, const std::string& shape) {
  std::vector<Shape> shapes;
  for (const std::string& part : parts(shape))
    shapes.emplace_back(std::stoi(part), std::stoi(part.substr(part.find('x') + 1)));
  std::map<std::string, Layers> kinds;
  for (const Kind kind : {kQ4, kQ4x64, kQ8}) kinds.emplace(kKindNames[kind], Layers(kind, shapes, layers));
  double bandwidth = 0, dots = 0;
  std::map<std::string, std::map<int, std::vector<double>>> times;
  for (int turn = -1; turn < turns; ++turn) {  // the first is not counted
    bandwidth = std::max(bandwidth, edgespec_read_bandwidth(size_t(megabytes) << 20, threads, turn & 1 ? 4 : 1, 1));
    dots = std::max(dots, edgespec_dot_rate(int64_t(megabytes) << 11, threads, 1));
    for (auto& [name, kind] : kinds)
      for (const std::string& row : parts(rows)) {
        const double ms = kind.time(std::stoi(row), threads);
        if (turn >= 0) times[name][std::stoi(row)].push_back(ms);
      }
  }
  std::printf("{\"isa\": \"%s\", \"threads\": %d, \"read_gb_s\": %.6g, \"dots_gmac_s\": %.6g, \"formats\": {",
              kernels().name, threads, bandwidth, dots);
  const char* between = "";
  for (const auto& [name, kind] : kinds) {
    std::printf("%s\"%s\": {\"bytes\": %zu, \"products\": %lld, \"ms\": {", between, name.c_str(), kind.bytes,
                static_cast<long long>(kind.products));
    between = "";
    for (const auto& [row, all] : times[name]) {
      std::printf("%s\"%d\": %.6f", between, row, median(all));
      between = ", ";
    }
    std::printf("}}");
  }
  std::printf("}}\n");
}

}  // namespace edgespec
