// Untrusted bundles through the C interface: files that are cut off, or have other bytes, are rejected with a message,
// or run any request; nothing else happens.
//
//   damaged SEED COUNT FOLDER GRAPH...    COUNT changes of each graph and of its weights, written in FOLDER
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "edgespec.h"

namespace {

using Random = std::mt19937_64;
namespace fs = std::filesystem;

long opened = 0, passes = 0, refusals = 0;

int below(Random& random, int most) { return static_cast<int>(random() % static_cast<uint64_t>(most)); }

// Whether a call succeeded, or failed with a message.
bool fine(int status) {
  if (status == EDGESPEC_OK) return true;
  ++refusals;
  if (status != EDGESPEC_REFUSED && status != EDGESPEC_NO_MEMORY && status != EDGESPEC_NO_FILE) std::abort();
  if (std::strncmp(edgespec_error(), "edgespec", 8)) {
    std::cerr << "refused without a word of who: " << edgespec_error() << std::endl;
    std::abort();
  }
  return false;
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::string& data) {
  std::ofstream(path, std::ios::binary).write(data.data(), static_cast<std::streamsize>(data.size()));
}

// Changes digits, which leaves the encoding whole; any bytes; or the end.
std::string changed(std::string data, Random& random) {
  const int how = below(random, 8);
  if (how == 7) return data.substr(0, random() % data.size());
  for (int left = 1 + below(random, 3); left > 0; --left) {
    size_t at = random() % data.size();
    if (how < 5) {
      while (at < data.size() && (data[at] < '0' || data[at] > '9')) ++at;
      if (at < data.size()) data[at] = static_cast<char>('0' + below(random, 10));
    } else {
      data[at] = static_cast<char>(below(random, 256));
    }
  }
  return data;
}

// Numbers that callers may give, and some that they should not.
int64_t odd(Random& random, int64_t usual) {
  constexpr int64_t kOdd[] = {0, -1, 1, 127, 128, 129, INT32_MAX, INT64_MAX, INT64_MIN, int64_t(1) << 40};
  return below(random, 12) ? static_cast<int64_t>(random() % static_cast<uint64_t>(std::max<int64_t>(usual, 1)))
                           : kOdd[below(random, 10)];
}

void look(const edgespec_result& result, int rows) {  // the sanitizer sees what may be read
  double sum = 0;
  for (int i = 0; result.logits && i < result.rows * result.columns; ++i) sum += result.logits[i];
  for (int i = 0; result.ids && i < result.rows * result.top; ++i) sum += double(result.ids[i]) + result.values[i];
  for (int i = 0; result.hidden && i < rows * result.hidden_columns; ++i) sum += result.hidden[i];
  volatile double kept = sum;
  (void)kept;
}

// The node itself, given arrays of any size whose memory ends where they do.
void run_node(edgespec_model* model, Random& random) {
  std::vector<std::vector<uint8_t>> kept;
  const auto array = [&](int64_t rows, int64_t columns) {
    kept.emplace_back(size_t(rows * columns) * 8);
    for (uint8_t& byte : kept.back()) byte = below(random, 9) ? 0 : uint8_t(below(random, 256));
    return edgespec_array{below(random, 12) ? kept.back().data() : nullptr, rows, columns};
  };
  const int rows = 1 + below(random, 3);
  edgespec_array inputs[EDGESPEC_NODE_INPUTS], outputs[4];
  for (int i = 0; i < EDGESPEC_NODE_INPUTS; ++i)
    inputs[i] = array(i == EDGESPEC_NODE_PLAN ? 6 : 1, i == EDGESPEC_NODE_CONTROL ? 8 : below(random, 99));
  inputs[EDGESPEC_NODE_PLAN] = array(6, rows);
  inputs[EDGESPEC_NODE_ROWS] = array(1, below(random, rows + 1));
  inputs[EDGESPEC_NODE_MOVES] = array(below(random, 2), 3);
  for (edgespec_array& output : outputs) output = array(below(random, 9), below(random, 999));
  if (fine(edgespec_run(model, inputs, EDGESPEC_NODE_INPUTS, outputs, EDGESPEC_NODE_OUTPUTS))) ++passes;
}

void use(edgespec_model* model, Random& random) {
  run_node(model, random);
  edgespec_facts facts{};
  facts.size = sizeof facts;
  if (!fine(edgespec_describe(model, &facts))) return;
  edgespec_cache* cache = nullptr;
  const int slots = 1 + below(random, 2);
  if (!fine(
          edgespec_cache_open(model, slots, 1 + below(random, 200), below(random, 40) ? below(random, 4) : 4, &cache)))
    return;
  std::vector<int64_t> text(1 + size_t(below(random, 150)));
  for (int turn = 0; turn < 4; ++turn) {
    const bool strange = !below(random, 4);
    for (int64_t& token : text) token = strange ? odd(random, facts.vocab) : below(random, std::max(1, facts.vocab));
    const int slot = below(random, slots);
    fine(edgespec_prefill(cache, slot, text.data(), below(random, int(text.size()) + 1)));
    if (below(random, 2)) fine(edgespec_checkpoint(cache, slot));
    const int rows = 1 + below(random, std::min<int>(9, int(text.size())));
    std::vector<int32_t> parents(rows), in(rows, slot), kept;
    for (int i = 0; i < rows; ++i) parents[i] = below(random, 12) ? below(random, i + 1) - 1 : int32_t(odd(random, 9));
    edgespec_request request{};
    edgespec_result result{};
    request.size = sizeof request, result.size = sizeof result;
    request.rows = rows, request.tokens = text.data(), request.parents = parents.data(), request.slots = in.data();
    std::vector<uint8_t> gates(size_t(std::clamp(facts.gates, 0, 1 << 20)));
    for (uint8_t& gate : gates) gate = uint8_t(below(random, 2));
    if (!below(random, 3)) request.gates = gates.data();
    std::vector<float> inputs(size_t(rows) * size_t(std::clamp(facts.input_width, 0, 1 << 20)), .5f);
    if (!below(random, 3) && !inputs.empty()) request.inputs = inputs.data();
    request.logits = below(random, 4), request.top = int32_t(odd(random, 5)), request.hidden = below(random, 4);
    if (fine(edgespec_pass(cache, &request, &result))) {
      ++passes;
      look(result, rows);
    }
    for (int i = 0; i < rows; ++i)
      if (below(random, 3)) kept.push_back(below(random, 12) ? i : int32_t(odd(random, 9)));
    fine(edgespec_keep(cache, slot, kept.data(), int32_t(kept.size())));
    if (below(random, 2)) fine(edgespec_crop(cache, slot, odd(random, 160), nullptr));
    std::vector<float> hidden(size_t(rows) * size_t(std::clamp(facts.hidden, 0, 1 << 20)), -.25f);
    if (facts.groups && fine(edgespec_heads(cache, below(random, facts.groups + 1), hidden.data(), rows,
                                            int32_t(odd(random, 5)), &result)))
      look(result, 0);
  }
  edgespec_cache_close(cache);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 5) return 2;
  Random random(std::strtoull(arguments[1], nullptr, 10));
  const long most = std::atol(arguments[2]);
  const fs::path folder = arguments[3];
  for (int file = 4; file < count; ++file) {
    const fs::path graph = arguments[file];
    const std::string right = read(graph), weights = read(graph.parent_path() / "model.data");
    write(folder / "model.data", weights);
    for (long i = 0; i <= most; ++i) {  // the first is whole
      const bool whole = i == 0, damaged = !whole && i % 8 == 0;
      write(folder / "model.native.onnx", whole || damaged ? right : changed(right, random));
      if (damaged) write(folder / "model.data", changed(weights, random));
      edgespec_model* model = nullptr;
      const bool open = fine(edgespec_open((folder / "model.native.onnx").string().c_str(), 2, &model));
      const long before = passes;
      if (open) {
        ++opened;
        for (int turn = 0; turn < (whole ? 9 : 1); ++turn) use(model, random);
        edgespec_close(model);
      }
      if (whole && passes == before) {
        std::cerr << graph << " is refused as it was: " << edgespec_error() << std::endl;
        return 1;
      }
      if (damaged) write(folder / "model.data", weights);
    }
  }
  std::cout << "ok, " << opened << " opened, " << passes << " passes, " << refusals << " refusals\n";
  return 0;
}
