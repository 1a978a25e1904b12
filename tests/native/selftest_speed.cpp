// How fast passes multiply by matrices, beside what memory and dot products allow (benchmarks/device.py).
#include <sys/utsname.h>

#include <fstream>

#include "selftest_timing.h"

namespace edgespec {
namespace {

using Shape = std::pair<int, int>;  // [n, k]

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
    Array<uint8_t> kv(1 << 12);
    PassInputs in;
    in.kv = kv.get();
    in.kv_bytes = kv.bytes();
    in.slots = 1;
    for (const auto& w : weights_) in.weights.push_back({w.get(), w.bytes()});
    return timed(program_, in, scratch_, 0, rows, threads);
  }

  size_t bytes = 0;
  int64_t products = 0;  // of one row

 private:
  std::vector<Array<uint8_t>> weights_;
  Program program_;
  Scratch scratch_;
};

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
  print_formats(kinds, times);
  std::printf("}}\n");
}

}  // namespace edgespec
