// The program of a native node and its pass, from any bytes: nothing but std::invalid_argument and std::bad_alloc may
// come of it.  With libFuzzer (clang++ -fsanitize=fuzzer) it is driven by that; else it has a main of its own:
//
//   fuzz_program SEED COUNT FILE...    mutants of the files, which hold programs
#include <fstream>
#include <iostream>
#include <new>
#include <sstream>

#include "selftest.h"

namespace edgespec {
namespace {

constexpr size_t kMostBytes = size_t(1) << 24;  // of a program's buffers and weights: more shows nothing more

// Bytes that a step wants of a weight.
void want(std::vector<size_t>& sizes, int id, size_t bytes) {
  if (id < 0 || id > 4096) return;
  if (sizes.size() <= size_t(id)) sizes.resize(id + 1);
  sizes[id] = std::max(sizes[id], bytes);
}

std::vector<size_t> weight_sizes(const Program& program, int positions) {
  std::vector<size_t> sizes;
  for (const Step& s : program.steps) {
    const int columns = s.op == Op::kHeads ? (s.heads + (s.shared ? 0 : 2 * s.kv)) * round_up(s.dim, kTile) : s.n;
    for (const int id : {s.w, s.gate, s.up}) want(sizes, id, packed_bytes(s.kind, columns, s.k));
    for (const int id : {s.bias, s.upbias}) want(sizes, id, size_t(columns) * 4);
    for (const int id : {s.norm, s.beta}) want(sizes, id, size_t(s.k) * 4);
    for (const int id : {s.qnorm, s.knorm, s.vnorm}) want(sizes, id, size_t(s.dim) * 4);
    for (const int id : {s.cos, s.sin}) want(sizes, id, size_t(positions) * s.rotary * 2);
    want(sizes, s.positions, size_t(positions) * s.k * 4);
  }
  return sizes;
}

void run_pass(const Program& program, int rows, uint64_t seed) {
  constexpr int kPositions = 256;
  Random random(seed);
  PassInputs in;
  program.describe(in.layout);
  in.layout.keys = in.layout.values = random.below(2) ? kKvF16 : kKvInt8;
  in.kv_bytes = in.layout.header_bytes() + in.layout.block_bytes();
  const std::vector<size_t> sizes = weight_sizes(program, kPositions);
  size_t total = in.kv_bytes;
  for (const size_t size : sizes) total += size;
  for (const int width : program.floats) total += size_t(width) * 4 * 16;
  for (const int width : program.acts) total += size_t(width) * 4 * 16;
  if (total > kMostBytes || program.vocab > (1 << 16)) return;
  std::vector<Array<uint8_t>> weights;
  for (const size_t size : sizes) {
    weights.emplace_back(size);
    for (uint8_t& byte : weights.back()) byte = static_cast<uint8_t>(random.below(48));
    in.weights.push_back({weights.back().get(), size});
  }
  in.weights.resize(std::max<size_t>(in.weights.size(), program.weights > 4096 ? 0 : program.weights));
  Array<uint8_t> kv(in.kv_bytes);
  std::vector<int64_t> plan(size_t(6) * rows), heads(rows);
  for (int r = 0; r < rows; ++r) {
    const int64_t line[] = {random.below(4), r, 0, 0, r - 1, r};
    for (int i = 0; i < 6; ++i) plan[size_t(i) * rows + r] = random.below(40) ? line[i] : random.below(300) - 8;
    heads[r] = r;
  }
  std::unique_ptr<bool[]> gates(new bool[program.gates + 1]);
  for (int i = 0; i <= program.gates; ++i) gates[i] = random.below(8) != 0;
  std::vector<float> hidden(size_t(rows) * program.hidden, 0.25f);
  in.plan = plan.data();
  in.rows = rows;
  in.head_rows = heads.data();
  in.heads = random.below(3) ? rows : 0;
  in.hidden = hidden.data();
  in.hidden_rows = rows;
  in.hidden_width = program.hidden;
  in.gates = gates.get();
  in.gate_count = program.gates;
  in.kv = kv.get();
  in.slots = 1;
  in.top = random.below(3);
  const Active active = program.active(in.gates, in.gate_count);
  const size_t given = size_t(in.heads) * active.logits;
  if (given * active.columns > kMostBytes / 4) return;
  std::vector<float> logits(in.top ? 0 : given * active.columns), values(given * in.top),
      stream(size_t(rows) * active.hidden);
  std::vector<int64_t> ids(given * in.top);
  PassOutputs out;
  out.logits = logits.data();
  out.top_ids = ids.data();
  out.top_values = values.data();
  out.hidden = stream.data();
  Scratch scratch;
  Pass pass(program, kernels(), in, out, scratch);
  Team<Pass> team(pass);
  std::thread other([&] { team.join(); });
  team.join();
  other.join();
  team.finish();
}

}  // namespace
}  // namespace edgespec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace edgespec;
  try {
    const Program program = Program::parse(std::string(reinterpret_cast<const char*>(data), size));
    for (const int rows : {1, 17}) run_pass(program, rows, size * 31 + rows);
  } catch (const std::invalid_argument&) { return 0; } catch (const std::bad_alloc&) {
    return 0;
  }
  return 0;
}

#ifndef EDGESPEC_LIBFUZZER
namespace {

using edgespec::Random;

std::string mutated(std::string text, Random& random) {
  const char* numbers[] = {"-1",  "0",       "1",         "2",          "3",          "15",         "16",
                           "17",  "64",      "65",        "512",        "513",        "65536",      "16777216",
                           "999", "1048577", "536870911", "1073741824", "2147483647", "4294967297", "nan"};
  for (int turns = random.between(1, 4); turns && !text.empty(); --turns) {
    const size_t at = random.next() % text.size();
    const size_t begin = text.rfind('\n', at) == std::string::npos ? 0 : text.rfind('\n', at) + 1;
    const size_t end = std::min(text.find('\n', at), text.size());
    switch (random.below(6)) {
      case 0: text[at] = static_cast<char>(random.below(256)); break;
      case 1: text.erase(begin, end - begin + 1); break;
      case 2: text.insert(begin, text.substr(begin, end - begin) + "\n"); break;
      default: {  // a number of the line
        const size_t equals = text.find_first_of("= ", at);
        if (equals == std::string::npos) break;
        const size_t stop = std::min(text.find_first_of(" \n", equals + 1), text.size());
        text.replace(equals + 1, stop - equals - 1, numbers[random.below(21)]);
      }
    }
  }
  return text;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  Random random(std::strtoull(arguments[1], nullptr, 10));
  std::vector<std::string> seeds;
  for (int i = 3; i < count; ++i) {
    std::ifstream file(arguments[i], std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    seeds.push_back(text.str());
  }
  const long most = std::atol(arguments[2]);
  for (long i = 0; i < most; ++i) {
    const std::string& seed = seeds[static_cast<size_t>(random.below(static_cast<int>(seeds.size())))];
    const std::string text =
        i < static_cast<long>(seeds.size()) ? seeds[static_cast<size_t>(i)] : mutated(seed, random);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  }
  std::cout << "ok " << most << "\n";
}
#endif
