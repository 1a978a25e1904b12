// Weights that are read from the file when a pass needs them, in a cache of fixed size.
//
// In a mixture they are its experts.  A pass calls `begin` as soon as its router has spoken: the reads of the experts
// that are not in the cache start, all at once.  `part` waits for one of them.  Of a model without mixtures they are
// the matrices of its layers, in pieces of consecutive steps: each is here a layer of one expert.  Passes need all of
// them in one order, so the first ones stay and the others are read ahead (LayerReader).
//
// Each expert is compared with its checksum when it arrives, so a weight is the resident one or the pass fails.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "async_reads.h"
#include "program.h"

namespace edgespec {

struct ModelFile;
struct PassInputs;
struct Place;

constexpr int kExpertParts = 6;  // gate, up, down, and the low planes of each

// Where the experts of a layer are in the weight file.
struct ExpertPlace {
  struct Part {
    uint64_t offset = 0;  // of the first expert
    size_t bytes = 0;     // of each; 0: there is no such part
    size_t stride = 0;    // from one expert to the next
    int weight = -1;      // of the program, where it is one expert's
  };
  std::vector<Part> parts;  // of experts kExpertParts
  int count = 0;
};

struct ExpertCounts {
  double passes = 0;    // layers of passes
  double sent = 0;      // rows times the experts of a row
  double distinct = 0;  // experts that those were, by layer and pass
  double hits = 0;      // of those, in the cache
  double bytes = 0;     // that were read
  double waited = 0;    // seconds that threads waited for reads
};

class ExpertStore {
 public:
  static constexpr int kMostRows = 16;  // of a pass that is counted by its rows

  static constexpr int kAhead = 2;         // pieces of layers that are read while one is computed
  static constexpr double kHalfLife = 64;  // passes; measured on the routes of a trained mixture
                                           // (benchmarks/streaming.py)

  // cache: bytes; threads: never io_uring.  Throws std::invalid_argument: weights in several files, or a cache that is
  // too small for two experts, or for kAhead + 1 pieces of layers.
  ExpertStore(const std::string& graph, size_t cache, bool threads);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  const std::string& program() const { return program_; }
  bool of_layers() const { return of_layers_; }  // rather than of experts
  const ExpertPlace& place(int layer) const { return places_[static_cast<size_t>(layer)]; }
  int layers() const { return static_cast<int>(places_.size()); }
  // The piece of layers of a step of the program, -1: its weights are not streamed.
  int piece_of(size_t step) const { return pieces_[step]; }
  size_t experts() const { return where_.size(); }  // of all layers
  size_t slots() const { return size_t(count_); }   // experts that the cache holds
  size_t slot_bytes() const { return slot_bytes_; }
  uint64_t expert_bytes() const;  // of all experts in the file
  const char* reads() const { return reads_->name(); }
  // Compares experts with these; without a call, with what was read first.
  void expect(const uint64_t* checksums) {
    checksums_.assign(checksums, checksums + where_.size());
    known_.assign(where_.size(), 1);
    checked_ = true;
  }
  // Reads all experts -> their checksums.  Throws std::runtime_error: a read failed.
  std::vector<uint64_t> checksums();
  // The checksum of bytes: a change of one word always changes it.
  static uint64_t checksum(const uint8_t* data, size_t bytes, uint64_t from);

  std::mutex pass;  // held by a pass: its experts must not leave before it ends

  // Experts that `begin` may be called with at once, twice before `end`.
  int together() const { return std::max<int>(1, count_ / 2); }
  bool holds(int layer, int id) const { return where_[at(layer, id)] >= 0; }
  // Pins experts of a layer and starts the reads of those that are not in the cache.
  void begin(int layer, const std::vector<int>& ids);
  // Matrix `part` of an expert that was begun; waits for it.  Any thread may call it.  Throws std::runtime_error: a
  // read failed, or what was read is not the expert.
  const uint8_t* part(int layer, int id, int part);
  void end(int layer, const std::vector<int>& ids);
  void end_all();
  void abandon();  // after a pass that failed: what was read for it and not compared is forgotten
  void count(int rows, int sent, int distinct);

  ExpertCounts counts(int rows) const { return rows ? by_rows_[std::min(rows, kMostRows)] : counts_; }
  void forget_counts();

 private:
  enum State : int { kEmpty, kReading, kRead, kChecking, kReady, kFailed };
  struct Slot {
    std::atomic<int> state{kEmpty};
    int expert = -1;  // among those of all layers
    int pins = 0;
    int reads = 0;  // that have not ended
    std::vector<const uint8_t*> parts;
    std::string failure;
  };

  size_t at(int layer, int id) const { return first_[layer] + static_cast<size_t>(id); }
  int layer_of(size_t expert) const;
  size_t lay(size_t expert, uint8_t* memory, Slot* slot, std::vector<Read>* reads) const;
  void use(size_t expert);
  int victim();
  void read(int number, size_t expert);
  void collect(bool wait);
  void check(Slot& slot);
  bool check_another();  // that has arrived -> whether there was one
  uint64_t checksum_of(const Slot& slot) const;
  std::string name(size_t expert) const;

  void place_layers(const Program& program, const std::vector<Place>& weights);

  std::string file_, program_;
  bool of_layers_ = false;
  std::vector<int> pieces_;          // by step
  std::vector<ExpertPlace> places_;  // by layer
  std::vector<size_t> first_;        // of a layer, among all experts
  std::vector<uint64_t> checksums_;  // of all experts, as far as they are known
  std::vector<char> known_;          // whether it is: each is written by the thread that checks that expert
  bool checked_ = false;             // whether they are those of a checked file
  std::unique_ptr<AsyncReads> reads_;
  std::mutex reading_;      // of reads_ and what follows from it
  std::vector<int> where_;  // the slot of each expert, -1: none
  // How much an expert was used: log2 of a count that halves every kHalfLife passes, plus passes / kHalfLife.
  std::vector<double> used_;
  double turn_ = 0;  // passes
  std::unique_ptr<Slot[]> slots_;
  int count_ = 0;  // slots
  size_t slot_bytes_ = 0;
  uint8_t* memory_ = nullptr;
  std::vector<int> arriving_;  // slots whose experts were not all checked at the last `begin`
  std::vector<Ended> ended_;
  ExpertCounts counts_, by_rows_[kMostRows + 1];
  ExpertCounts* now_ = by_rows_;  // of the present pass
};

// The pieces of layers of one pass: waits for that of the current step, and reads those of later steps.
class LayerReader {
 public:
  // Steps that the gates leave out are not read.
  LayerReader(ExpertStore& store, const Program& program, const bool* gates, int rows);

  // Waits for the weights of a step, which are then in `held` by their numbers; those of the piece before may leave.
  // Throws std::runtime_error: a read failed, or what was read is not what was checked.
  void enter(size_t step);
  const void* held(int weight) const { return held_[static_cast<size_t>(weight)]; }  // null: it is not streamed

 private:
  ExpertStore& store_;
  std::vector<int> order_;  // pieces, as the pass needs them
  size_t next_ = 0;         // in order_
  int piece_ = -1;          // the current one
  int rows_;
  std::vector<int> ahead_;  // begun for later steps
  std::vector<const void*> held_;
};

// The use of a store by a pass, which is alone with it until `end`.  If that is not reached, reads that it began are
// forgotten.
class StreamedPass {
 public:
  // Sets where `in` gets its weights from.  store: null: all of them are there.
  StreamedPass(ExpertStore* store, const Program& program, PassInputs& in);
  ~StreamedPass();
  StreamedPass(const StreamedPass&) = delete;
  StreamedPass& operator=(const StreamedPass&) = delete;

  void end();

 private:
  ExpertStore* store_;
  std::unique_lock<std::mutex> alone_;
  std::unique_ptr<LayerReader> layers_;
};

// Reads pieces of a file, `together` at once and then the next ones, for `limit` seconds -> bytes per second.
// `checked`: computes the checksum of each as it arrives, as a pass does.  Throws std::runtime_error: a read failed.
double disk_rate(const std::string& path, size_t piece, int together, double limit, bool threads, bool checked);

// The store that the next session opened by this thread uses, if its program is that one's.
std::shared_ptr<ExpertStore> take_pending_store(const std::string& program);

}  // namespace edgespec
