// Speed of reading keys and values after a long text, compared with the memory's limit (benchmarks/device.py).
#include "selftest_timing.h"

namespace edgespec {
namespace {

// Attention of some layers and nothing else, over keys and values that are made up.
class Attention {
 public:
  Attention(KvFormat format, int heads, int kv, int dim, int layers, int depth, int rows) : depth_(depth) {
    const auto number = [](int n) { return std::to_string(n); };
    const int wide = std::max(heads * dim, 64);  // what the head reads
    const std::string width = number(wide),
                      sizes = " heads=" + number(heads) + " kv=" + number(kv) + " dim=" + number(dim);
    std::string text =
        "floats 0 " + width + "\nfloats 1 " + width + "\nacts 0 64\nembed w=0 kind=r32 n=16 k=" + width + " out=0\n";
    for (int layer = 0; layer < layers; ++layer)
      text += "heads qx=0 kx=0 vx=0 rotary=" + number(dim) + " cos=1 sin=1 eps=1e-5 scale=0.1 layer=" + number(layer) +
              sizes + "\nattend out=1 layer=" + number(layer) + sizes + "\n";
    // a decoder must have a head
    text += "quantize x=0 k=64 kind=f32 out=0 rows=1\nlogits act=0 w=2 kind=f32 n=16 k=64\n";
    program_ = Program::parse(text);
    Random random(6);
    keep(normals(random, size_t(16) * wide));
    keep(Floats(size_t(depth + rows) * dim / 2));
    weights_.emplace_back(packed_bytes(kF32, 16, 64));

    layout_.keys = layout_.values = format;
    layout_.layers = layers;
    layout_.heads = kv;
    layout_.dim = round_up(dim, kTile);
    const int blocks = (depth + rows + kKvBlock - 1) / kKvBlock;
    kv_ = std::make_unique<Array<uint8_t>>(layout_.header_bytes() + layout_.block_bytes() * blocks);
    const auto keys = make_block(random, format, layout_.dim), values = make_block(random, format, layout_.dim, true);
    const Cache cache(kv_->get(), layout_);
    for (int block = 0; block < blocks; ++block)
      for (int layer = 0; layer < layers; ++layer)
        for (int head = 0; head < kv; ++head) {
          std::copy(keys.begin(), keys.end(), cache.keys(block, layer, head));
          std::copy(values.begin(), values.end(), cache.values(block, layer, head));
        }
    bytes = layout_.block_bytes() * depth / kKvBlock;
    products = int64_t(2) * layers * heads * dim * depth;
  }

  // Milliseconds of a pass.
  double time(int rows, int threads) {
    PassInputs in;
    in.kv = kv_->get();
    in.kv_bytes = kv_->bytes();
    in.slots = 1;
    in.layout = layout_;
    for (const auto& w : weights_) in.weights.push_back({w.get(), w.bytes()});
    return timed(program_, in, scratch_, depth_, rows, threads);
  }

  size_t bytes = 0;
  int64_t products = 0;  // of one row, of queries with keys and of weights with values

 private:
  void keep(const Floats& numbers) {
    weights_.emplace_back(numbers.bytes());
    std::memcpy(weights_.back().get(), numbers.get(), numbers.bytes());
  }

  int depth_;
  KvLayout layout_;
  std::vector<Array<uint8_t>> weights_;
  std::unique_ptr<Array<uint8_t>> kv_;
  Program program_;
  Scratch scratch_;
};

}  // namespace

void print_attention(int threads, int turns, int layers, int megabytes, const std::string& rows, int depth,
                     const std::string& heads) {
  const auto sizes = parts(heads, 'x'), counts = parts(rows);
  int most = 0;
  for (const std::string& count : counts) most = std::max(most, std::stoi(count));
  std::map<std::string, Attention> formats;
  for (const KvFormat format : {kKvF16, kKvInt8})
    formats.emplace(kFormatNames[format], Attention(format, std::stoi(sizes[0]), std::stoi(sizes[1]),
                                                    std::stoi(sizes[2]), layers, depth, most));
  double bandwidth = 0;
  Times times;
  for (int turn = -1; turn < turns; ++turn) {  // the first is not counted
    bandwidth = std::max(bandwidth, edgespec_read_bandwidth(size_t(megabytes) << 20, threads, turn & 1 ? 4 : 1, 1));
    for (auto& [name, one] : formats)
      for (const std::string& count : counts) {
        const double ms = one.time(std::stoi(count), threads);
        if (turn >= 0) times[name][std::stoi(count)].push_back(ms);
      }
  }
  std::printf("{\"isa\": \"%s\", \"threads\": %d, \"read_gb_s\": %.6g, \"formats\": {", kernels().name, threads,
              bandwidth);
  print_formats(formats, times);
  std::printf("}}\n");
}

}  // namespace edgespec
