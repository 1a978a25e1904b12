// Speed of products with matrices, compared with the limits of memory and dot products (benchmarks/device.py).
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "selftest_timing.h"

namespace edgespec {
namespace {

using Shape = std::pair<int, int>;  // [n, k]

// As many addresses as a matrix has, all of them the same few pages: what is read there comes from the second cache,
// and all else (addresses to translate, instructions) is as with weights in memory.
class Held {
 public:
  Held(Kind kind, size_t bytes) {
    constexpr int kTogether = 8 * kBlock;  // every kind repeats from here on, but those of files: scales follow codes
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t period = is_ggml(kind) ? 16 * page : std::lcm(tile_bytes(kind, kTogether), page);
    int k = kTogether;
    while (tile_bytes(kind, k) < period) k += kTogether;
    Random random(5);
    const auto piece = make_tile(random, kind, k);
    bytes_ = (bytes / period + 1) * period;
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::tmpfile(), std::fclose);
    if (!file || std::fwrite(piece.get(), 1, period, file.get()) != period || std::fflush(file.get()))
      throw std::runtime_error("no temporary file for weights that stay in the caches");
    start_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bool mapped = start_ != MAP_FAILED;
    for (size_t at = 0; mapped && at < bytes_; at += period)
      mapped = mmap(static_cast<uint8_t*>(start_) + at, period, PROT_READ, MAP_SHARED | MAP_FIXED, fileno(file.get()),
                    0) != MAP_FAILED;
    if (!mapped) throw std::runtime_error("no mapping for weights that stay in the caches");
  }
  Held(const Held&) = delete;
  ~Held() { munmap(start_, bytes_); }

  const void* get() const { return start_; }

 private:
  void* start_;
  size_t bytes_;
};

// Matrices of some layers, one after the other, each with the quantization of what it multiplies.
class Layers {
 public:
  Layers(Kind kind, const std::vector<Shape>& shapes, int layers, bool high = false) : both_(!high) {
    Random random(5);
    int most = kTile, widest = 2 * kBlock;
    for (const auto& [n, k] : shapes) {
      most = std::max(most, n);
      widest = std::max(widest, k);
    }
    const std::string width = std::to_string(widest), name = kKinds[kind].name, form = kKinds[kKinds[kind].acts].name;
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
        if (kind == kP8) {
          text.insert(text.size() - 1, " plane=0 low=" + std::to_string(weights_.size()));
          weights_.emplace_back(tiles_of(n) * low_bytes(k));
          for (uint8_t& byte : weights_.back()) byte = static_cast<uint8_t>(random.next());
          bytes += both_ ? weights_.back().size() : 0;
        }
        products += int64_t(n) * k;
      }
    // a decoder must have a head
    text += "quantize x=0 k=64 kind=f32 out=0 rows=1\nlogits act=0 w=" + std::to_string(weights_.size()) +
            " kind=f32 n=16 k=64\n";
    weights_.emplace_back(packed_bytes(kF32, 16, 64));
    program_ = Program::parse(text);
    size_t largest = 0;
    for (size_t i = 1; i + 1 < weights_.size(); ++i) largest = std::max(largest, weights_[i].bytes());
    held_ = std::make_unique<Held>(kind, largest);
  }

  // Milliseconds of a pass; held: of one whose weights come from the second cache.
  double time(int rows, int threads, bool held) {
    Array<uint8_t> kv(1 << 12);
    PassInputs in;
    in.kv = kv.get();
    in.kv_bytes = kv.bytes();
    in.slots = 1;
    in.gates = &both_;
    in.gate_count = 1;
    for (const auto& w : weights_) in.weights.push_back({w.get(), w.bytes()});
    for (size_t i = 1; held && i + 1 < in.weights.size(); ++i) in.weights[i].data = held_->get();
    return timed(program_, in, scratch_, 0, rows, threads);
  }

  size_t bytes = 0;
  int64_t products = 0;  // of one row

 private:
  bool both_;                            // planes of kP8
  std::vector<Array<uint8_t>> weights_;  // an embedding, the matrices, the head
  std::unique_ptr<Held> held_;
  Program program_;
  Scratch scratch_;
};

// Whether rows of these matrices are whole groups of one of ggml's types.
bool fits(Kind kind, const std::vector<Shape>& shapes) {
  return is_ggml(kind) && std::all_of(shapes.begin(), shapes.end(),
                                      [&](const Shape& shape) { return shape.second % ggml(kind).group == 0; });
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
  for (int kind = kQ4; kind < kF32; ++kind)
    if (in_blocks(static_cast<Kind>(kind)) || fits(static_cast<Kind>(kind), shapes))
      kinds.emplace(kKinds[kind].name, Layers(static_cast<Kind>(kind), shapes, layers));
  kinds.emplace("p8 high", Layers(kP8, shapes, layers, true));
  double bandwidth = 0, dots = 0;
  Times times, held;
  for (int turn = -1; turn < turns; ++turn) {  // the first is not counted
    bandwidth = std::max(bandwidth, edgespec_read_bandwidth(size_t(megabytes) << 20, threads, turn & 1 ? 4 : 1, 1));
    dots = std::max(dots, edgespec_dot_rate(int64_t(megabytes) << 11, threads, 1));
    for (auto& [name, kind] : kinds)
      for (const std::string& row : parts(rows)) {
        const double ms = kind.time(std::stoi(row), threads, false),
                     at_least = kind.time(std::stoi(row), threads, true);
        if (turn < 0) continue;
        times[name][std::stoi(row)].push_back(ms);
        held[name][std::stoi(row)].push_back(at_least);
      }
  }
  std::printf("{\"isa\": \"%s\", \"threads\": %d, \"read_gb_s\": %.6g, \"dots_gmac_s\": %.6g, \"formats\": {",
              kernels().name, threads, bandwidth, dots);
  print_formats(kinds, times, held);
  std::printf("}}\n");
}

}  // namespace edgespec
