// State of texts in slots for the C interface (edgespec.h), and the inputs of passes that follow from it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adapters.h"
#include "books.h"
#include "edgespec.h"
#include "expert_store.h"
#include "guarded.h"
#include "model_file.h"
#include "threads.h"

namespace edgespec {

constexpr int64_t kMostRequestRows = 1 << 20;

// Indices of gates (Gates in native_runner.py), derived from the steps that they switch.
struct Gates {
  int layers = -1, embed = 0, load = 0, hidden = 0, lm = 0, groups = 0, first_group = 0, auxiliary = -1, plane = 0,
      count = 0;

  explicit Gates(const Program& program) : count(program.gates) {
    plane = count;
    for (size_t i = 0; i < program.steps.size(); ++i) {
      const Step& s = program.steps[i];
      if (s.plane >= 0) plane = std::min(plane, s.plane);
      if (s.op != Op::kStore || !i || program.steps[i - 1].op != Op::kGate) continue;
      if (s.at)
        auxiliary = program.steps[i - 1].index;
      else
        layers = (program.steps[i - 1].index - 2) / 2;
    }
    embed = 2 * layers, load = embed + 1, hidden = embed + 2, lm = embed + 3, first_group = embed + 4;
    groups = std::max(0, (auxiliary < 0 ? plane : auxiliary) - first_group);
    count = std::max(count, first_group);
  }

  // The whole model: tokens are looked up, all layers run with both planes, and the model's LM head.
  std::unique_ptr<bool[]> whole() const {
    auto gates = std::make_unique<bool[]>(size_t(count));
    std::fill_n(gates.get(), 2 * layers, true);
    gates[embed] = gates[lm] = true;
    std::fill(gates.get() + plane, gates.get() + count, true);
    return gates;
  }
};

struct Slot {
  Text text;
  int64_t first = 0;  // row of the last pass that its rows begin at
};

struct Results {
  std::vector<float> logits, values, hidden;
  std::vector<int64_t> ids;

  Results() = default;
  Results(size_t logits, size_t best, size_t hidden) : logits(logits), values(best), hidden(hidden), ids(best) {}
  bool fit(size_t logits_, size_t best, size_t hidden_) const {
    return logits.size() >= logits_ && ids.size() >= best && hidden.size() >= hidden_;
  }
};

struct FreeBytes {
  void operator()(uint8_t* bytes) const { std::free(bytes); }
};

}  // namespace edgespec

struct edgespec_model {
  edgespec::ModelFile file;
  edgespec::Program program;
  edgespec::Gates gates;
  edgespec::Threads threads;
  std::mutex mutex;  // one pass at a time
  edgespec::Scratch scratch;
  std::shared_ptr<edgespec::AdapterStore> adapters;  // null: there are none
  std::unique_ptr<edgespec::ExpertStore> store;      // of weights that are read when a pass needs them; null: none are
  std::atomic<int64_t> users{1};                     // the caller, and each cache: the last one to go frees the model

  edgespec_model(edgespec::ModelFile&& read, int count)
      : file(std::move(read)), program(edgespec::Program::parse(file.program)), gates(program), threads(count) {
    if (file.weights.size() < static_cast<size_t>(program.weights))
      edgespec::refuse("a program that names more weights");
  }

  void release() {
    if (--users == 0) delete this;
  }

  // Throws std::invalid_argument: its texts cannot be kept here.
  void check_texts() const {
    if (gates.layers < 0) edgespec::refuse("a program that gives no hidden states");
    if (file.program.compare(0, 5, "lent ") == 0)
      edgespec::refuse("a drafter that reads the keys and values of its target: its passes are run by edgespec_run");
    if (program.memory.count)
      edgespec::refuse(
          "an encoder-decoder, whose texts this interface does not keep: its passes are run by edgespec_run");
    if (program.inserted) edgespec::refuse("a model that reads more than tokens: its passes are run by edgespec_run");
  }
};

namespace edgespec {

struct CloseModel {
  void operator()(edgespec_model* model) const { model->release(); }
};
using OpenedModel = std::unique_ptr<edgespec_model, CloseModel>;

// Opens a graph.  threads: the caller's included, 0: as many as there are processors.  small_alone: a small model gets
// one.  Throws std::invalid_argument, Failure: it cannot be read.
// cache: bytes for weights that are read when a pass needs them, 0: all are mapped.
OpenedModel open_graph(const std::string& path, int32_t threads, bool small_alone = false, uint64_t cache = 0);

}  // namespace edgespec

struct edgespec_cache {
  edgespec_model& model;
  edgespec::KvLayout layout;
  size_t each = 0;
  std::unique_ptr<uint8_t, edgespec::FreeBytes> memory;
  uint8_t* base = nullptr;
  std::vector<edgespec::Slot> slots;
  edgespec::Results results;  // of the last pass; not in the model, because its other caches may run passes
  int adapter = 0;            // of the rows of its passes, in the model's store; 0: none
  bool revocable = false;     // whether kept tokens may be taken back: states that cannot be cropped hold fewer

  explicit edgespec_cache(edgespec_model& of) : model(of) { ++model.users; }
  ~edgespec_cache() { model.release(); }
  edgespec_cache(const edgespec_cache&) = delete;
  edgespec_cache& operator=(const edgespec_cache&) = delete;

  edgespec::Slot& at(int32_t slot) {
    if (slot < 0 || size_t(slot) >= slots.size()) edgespec::refuse("slot " + std::to_string(slot) + " does not exist");
    return slots[slot];
  }
  void forget_pass() {
    for (edgespec::Slot& slot : slots) slot.text.forget_rows();
  }
};

namespace edgespec {

struct Planned {
  std::vector<int64_t> plan, heads, moves;
  std::unique_ptr<bool[]> gates;
  int rows = 0;
  int columns = 0;  // of the LM head, the first ones; 0: all
};

// Runs what is planned -> its results, without their size.  Throws std::invalid_argument if it is refused, before
// anything has changed.
edgespec_result launch(edgespec_cache& cache, const Planned& p, const float* inputs, int top);

// Runs the rows of a request after the texts of its slots; they may be kept.
edgespec_result run_pass(edgespec_cache& cache, const edgespec_request& r);

// Rows of the text in a slot, as the loop runs them (loop.h).
struct TextRows {
  const int64_t* tokens;
  int32_t count;
  const int32_t* parents = nullptr;  // as in a request
  int64_t offset = 0;                // rows of earlier drafts, after the text, that they continue
  bool draft = false;                // nothing is kept: the next pass overwrites it
  const bool* gates = nullptr;       // null: the whole model
  int columns = 0;                   // of the LM head, the first ones; 0: all
  int last = 0;                      // only this many rows, the last ones, reach the LM head; 0: all
  bool mutual = false;               // every row sees all others
  bool bare = false;                 // no layer runs: of fused inputs, which write keys and values
  int top = 0;                       // 0: all logits
  bool hidden = false;               // gives hidden states of all rows
  bool auxiliary = false;            // and auxiliary ones, in the columns after them
  bool unscored = false;             // no row reaches the LM head
  const float* inputs = nullptr;     // [count, given] to begin with instead of tokens
  bool fused = false;                // inputs: before what fuses them to rows of layers
};
edgespec_result run_rows(edgespec_cache& cache, int32_t slot, const TextRows& wanted);

// Runs a group of heads over rows of hidden states [rows, hidden].
edgespec_result run_heads(edgespec_cache& cache, int32_t group, const float* hidden, int32_t rows, int32_t top);

// Refuses a text that some pass of its reading would refuse, before the first of them writes.
void check_text(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int64_t count);

// Appends tokens to a slot's text, without the LM head.
edgespec_result read_chunk(edgespec_cache& cache, int32_t slot, const int64_t* tokens, int count,
                           bool auxiliary = false);

// Looks tokens up -> their embeddings, as hidden states.
edgespec_result embed(edgespec_cache& cache, const int64_t* tokens, int32_t count);

// Does what `keep` left to the next pass.
void settle(edgespec_cache& cache, int32_t slot);

// Keeps the states of a slot's text as it is.
void keep_states(edgespec_cache& cache, int32_t slot);

}  // namespace edgespec
