// Experts of mixtures that are read from the weight file when a pass needs them, in a cache of fixed size.
//
// A pass calls `begin` as soon as its router has spoken: the reads of the experts that are not in the cache start, all
// at once.  `part` waits for one of them.  Each expert is compared with its checksum when it arrives, so a weight is
// the resident one or the pass fails.
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

constexpr int kExpertParts = 6;  // gate, up, down, and the low planes of each

// Where the experts of a layer are in the weight file.
struct ExpertPlace {
  struct Part {
    uint64_t offset = 0;  // of the first expert
    size_t bytes = 0;     // of each; 0: there is no such part
    size_t stride = 0;    // from one expert to the next
  } parts[kExpertParts];
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

  // cache: bytes; threads: never io_uring.  Throws std::invalid_argument: a model without mixtures, experts in several
  // files, or a cache that is too small for two experts.
  ExpertStore(const std::string& graph, size_t cache, bool threads);
  ~ExpertStore();
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  const std::string& program() const { return program_; }
  size_t experts() const { return where_.size(); }  // of all layers
  size_t slots() const { return size_t(count_); }   // experts that the cache holds
  size_t slot_bytes() const { return slot_bytes_; }
  uint64_t expert_bytes() const;  // of all experts in the file
  const char* reads() const { return reads_->name(); }
  void expect(const uint64_t* checksums) { checksums_.assign(checksums, checksums + where_.size()); }
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
    const uint8_t* parts[kExpertParts] = {};
    std::string failure;
  };

  size_t at(int layer, int id) const { return first_[layer] + static_cast<size_t>(id); }
  int layer_of(size_t expert) const;
  size_t lay(size_t expert, uint8_t* memory, Slot* slot, std::vector<Read>* reads) const;
  void use(size_t expert);
  int victim();
  void read(int number, size_t expert);
  void collect(bool wait);
  void check(Slot& slot) const;
  uint64_t checksum_of(const Slot& slot) const;
  std::string name(size_t expert) const;

  std::string file_, program_;
  std::vector<ExpertPlace> places_;  // by layer
  std::vector<size_t> first_;        // of a layer, among all experts
  std::vector<uint64_t> checksums_;  // of all experts; empty: they are not compared
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
  std::vector<Ended> ended_;
  ExpertCounts counts_, by_rows_[kMostRows + 1];
  ExpertCounts* now_ = by_rows_;  // of the present pass
};

// Reads pieces of a file, `together` at once and then the next ones, for `limit` seconds -> bytes per second.  Throws
// std::runtime_error: a read failed.
double disk_rate(const std::string& path, size_t piece, int together, double limit, bool threads);

// The store that the next session opened by this thread uses, if its program is that one's.
std::shared_ptr<ExpertStore> take_pending_store(const std::string& program);

}  // namespace edgespec
