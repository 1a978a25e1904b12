#include "expert_store.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>

#include "guarded.h"
#include "model_file.h"
#include "visible.h"

#if !defined(_WIN32) && !defined(__wasm__)
#include <sys/mman.h>
#endif

namespace edgespec {
namespace {

uint8_t* pages(size_t bytes) {
#if defined(_WIN32) || defined(__wasm__)
  (void)bytes;
  throw std::invalid_argument("edgespec: experts are not streamed on this system");
#else
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(found, bytes, MADV_HUGEPAGE);  // less to pin for a read, less to translate for a pass
#endif
  return static_cast<uint8_t*>(found);
#endif
}

void give_back(uint8_t* found, size_t bytes) {
#if !defined(_WIN32) && !defined(__wasm__)
  if (found) munmap(found, bytes);
#else
  (void)found, (void)bytes;
#endif
}

constexpr size_t kColdBytes = size_t(128) << 20;  // more than the cache of most processors

uint64_t whole(uint64_t size) { return (size + kReadAlign - 1) / kReadAlign * kReadAlign; }

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The places of a mixture's parts, from those of the weights that its step names.
ExpertPlace place_of(const Step& s, const std::vector<Place>& weights, std::string& file) {
  ExpertPlace found;
  found.count = s.times;
  found.parts.resize(kExpertParts);
  const int ids[kExpertParts] = {s.gate, s.up, s.w, s.gatelow, s.uplow, s.low};
  for (int part = 0; part < kExpertParts; ++part) {
    if (ids[part] < 0) continue;
    const Place& place = weights.at(static_cast<size_t>(ids[part]));
    if (place.file.empty() || (!file.empty() && file != place.file))
      throw std::invalid_argument("edgespec: experts that are not all in one file of weights");
    file = place.file;
    const bool down = part % 3 == 2, low = part >= 3;
    const int n = down ? s.k : s.n, k = down ? s.n : s.k;
    ExpertPlace::Part& own = found.parts[part];
    own.bytes = low ? tiles_of(n) * low_bytes(k) : packed_bytes(down ? s.downkind : s.kind, n, k);
    own.offset = place.offset;
    own.stride = own.bytes;
    if (place.bytes < own.bytes + static_cast<size_t>(s.times - 1) * own.stride)
      throw std::invalid_argument("edgespec: a matrix of experts that is too short");
  }
  return found;
}

}  // namespace

ExpertStore::ExpertStore(const std::string& graph, size_t cache, bool threads) {
  const ModelFile model = read_model(graph);
  program_ = model.program;
  const Program program = Program::parse(program_);
  size_t experts = 0;
  for (const Step& s : program.steps) {
    if (s.op != Op::kExperts) continue;
    places_.push_back(place_of(s, model.places, file_));
    first_.push_back(experts);
    experts += static_cast<size_t>(s.times);
  }
  if ((of_layers_ = places_.empty())) {
    place_layers(program, model.places);
    experts = places_.size();
  }
  for (size_t expert = 0; expert < experts; ++expert)
    slot_bytes_ = std::max(slot_bytes_, lay(expert, nullptr, nullptr, nullptr));
  const size_t most = std::min(cache / slot_bytes_, experts), least = of_layers_ ? kAhead + 1 : 2;
  if (most < std::min(least, experts))
    throw std::invalid_argument("edgespec: a cache of " + std::to_string(cache) +
                                " bytes for streamed weights: expected at least " +
                                std::to_string(least * slot_bytes_));
  reads_ = AsyncReads::open(file_, threads);
  where_.assign(experts, -1);
  used_.assign(experts, -1e300);
  checksums_.assign(experts, 0);
  known_.assign(experts, 0);
  for (size_t piece = 0; piece < experts && of_layers_; ++piece) used_[piece] = -double(piece);  // the first ones stay
  count_ = static_cast<int>(most);
  slots_ = std::make_unique<Slot[]>(most);
  memory_ = pages(most * slot_bytes_);
}

// Gathers the matrices of consecutive steps: those of a layer, where all are alike.
void ExpertStore::place_layers(const Program& program, const std::vector<Place>& weights) {
  std::vector<size_t> bytes(weights.size());
  for (const Weight& one : program.sizes)
    if (one.k && static_cast<size_t>(one.id) < bytes.size()) bytes[static_cast<size_t>(one.id)] = one.bytes();
  const auto parts_of = [&](const Step& s) {
    std::vector<ExpertPlace::Part> found;
    if (s.op != Op::kLinear && s.op != Op::kGlu && s.op != Op::kHeads) return found;
    for (const int id : {s.w, s.low, s.gate, s.up, s.gatelow, s.uplow}) {
      if (id < 0 || !bytes.at(static_cast<size_t>(id))) continue;
      const Place& place = weights[static_cast<size_t>(id)];
      if (place.file.empty()) continue;  // in the graph file: it is small
      if (!file_.empty() && file_ != place.file)
        throw std::invalid_argument("edgespec: layers that are not all in one file of weights");
      file_ = place.file;
      if (place.bytes < bytes[static_cast<size_t>(id)])
        throw std::invalid_argument("edgespec: a matrix that is too short");
      found.push_back({place.offset, bytes[static_cast<size_t>(id)], 0, id});
    }
    return found;
  };
  const auto size = [](const std::vector<ExpertPlace::Part>& parts) {
    size_t sum = 0;
    for (const ExpertPlace::Part& part : parts) sum += part.bytes;
    return sum;
  };
  size_t most = 0, all = 0, layers = 0;
  for (const Step& s : program.steps) {
    const size_t own = size(parts_of(s));
    most = std::max(most, own);
    all += own;
    layers += s.op == Op::kGlu;
  }
  most = std::max(most, layers ? (all + layers - 1) / layers : 0);
  for (const Step& s : program.steps) {
    std::vector<ExpertPlace::Part> parts = parts_of(s);
    if (!parts.empty()) {
      if (places_.empty() || size(places_.back().parts) + size(parts) > most) {
        first_.push_back(places_.size());
        places_.push_back({{}, 1});
      }
      std::vector<ExpertPlace::Part>& all = places_.back().parts;
      all.insert(all.end(), parts.begin(), parts.end());
    }
    pieces_.push_back(parts.empty() ? -1 : static_cast<int>(places_.size()) - 1);
  }
  if (places_.empty()) throw std::invalid_argument("edgespec: this model has no layers to stream");
}

ExpertStore::~ExpertStore() {
  reads_.reset();  // nothing is written to the memory any more
  give_back(memory_, static_cast<size_t>(count_) * slot_bytes_);
}

int ExpertStore::layer_of(size_t expert) const {
  return static_cast<int>(std::upper_bound(first_.begin(), first_.end(), expert) - first_.begin()) - 1;
}

// Lays the parts of an expert out in memory, by whole pages of the file; parts whose pages follow each other are read
// together.  Returns how many bytes that takes.
size_t ExpertStore::lay(size_t expert, uint8_t* memory, Slot* slot, std::vector<Read>* reads) const {
  const int layer = layer_of(expert);
  const ExpertPlace& place = places_[static_cast<size_t>(layer)];
  const uint64_t id = expert - first_[static_cast<size_t>(layer)];
  const auto offset = [&](size_t part) { return place.parts[part].offset + id * place.parts[part].stride; };
  std::vector<size_t> order;
  for (size_t part = 0; part < place.parts.size(); ++part)
    if (place.parts[part].bytes) order.push_back(part);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return offset(a) < offset(b); });
  if (slot) slot->parts.assign(place.parts.size(), nullptr);
  size_t used = 0;
  for (size_t i = 0; i < order.size();) {
    const uint64_t begin = offset(order[i]) / kReadAlign * kReadAlign;
    uint64_t end = begin;
    for (; i < order.size() && (end == begin || offset(order[i]) <= whole(end)); ++i) {
      end = std::max<uint64_t>(end, offset(order[i]) + place.parts[order[i]].bytes);
      if (slot) slot->parts[order[i]] = memory + used + (offset(order[i]) - begin);
    }
    const size_t bytes = whole(end - begin);
    if (reads) reads->push_back({begin, memory + used, bytes, static_cast<size_t>(end - begin), 0});
    used += bytes;
  }
  return used;
}

uint64_t ExpertStore::expert_bytes() const {
  uint64_t found = 0;
  for (const ExpertPlace& place : places_)
    for (const ExpertPlace::Part& part : place.parts) found += part.bytes * static_cast<uint64_t>(place.count);
  return found;
}

std::string ExpertStore::name(size_t expert) const {
  const int layer = layer_of(expert);
  if (of_layers_) return "edgespec: " + file_ + ": piece " + std::to_string(layer) + " of the layers";
  return "edgespec: " + file_ + ": expert " + std::to_string(expert - first_[static_cast<size_t>(layer)]) +
         " of mixture " + std::to_string(layer);
}

// ---- the cache -----------------------------------------------------------------------------------------------------

void ExpertStore::use(size_t expert) {
  if (of_layers_) return;
  const double now = turn_ / kHalfLife;
  used_[expert] = now + std::log2(1 + std::exp2(std::max(used_[expert] - now, -1000.0)));
}

// A slot that may be given to another expert.
int ExpertStore::victim() {
  for (;;) {
    int best = -1;
    for (int i = 0; i < count_; ++i) {
      const Slot& slot = slots_[i];
      const int state = slot.state.load(std::memory_order_acquire);
      if (slot.pins || state == kReading) continue;
      if (state == kEmpty || state == kFailed) return i;
      if (best < 0 || used_[static_cast<size_t>(slot.expert)] < used_[static_cast<size_t>(slots_[best].expert)])
        best = i;
    }
    if (best >= 0) return best;
    const std::lock_guard<std::mutex> lock(reading_);
    if (!reads_->going()) throw std::runtime_error("edgespec: more experts at once than their cache holds");
    collect(true);
  }
}

void ExpertStore::read(int number, size_t expert) {
  Slot& slot = slots_[number];
  if (slot.expert >= 0) where_[static_cast<size_t>(slot.expert)] = -1;
  slot.expert = static_cast<int>(expert);
  where_[expert] = number;
  slot.failure.clear();
  std::vector<Read> wanted;
  lay(expert, memory_ + static_cast<size_t>(number) * slot_bytes_, &slot, &wanted);
  slot.reads = static_cast<int>(wanted.size());
  arriving_.push_back(number);
  slot.state.store(kReading, std::memory_order_release);
  const std::lock_guard<std::mutex> lock(reading_);
  for (Read& one : wanted) {
    one.owner = number;
    reads_->start(one);
    counts_.bytes += static_cast<double>(one.bytes);
    now_->bytes += static_cast<double>(one.bytes);
  }
}

void ExpertStore::collect(bool wait) {
  ended_.clear();
  reads_->collect(wait, ended_);
  for (Ended& one : ended_) {
    Slot& slot = slots_[one.owner];
    if (!one.failure.empty()) slot.failure = std::move(one.failure);
    if (--slot.reads == 0) slot.state.store(slot.failure.empty() ? kRead : kFailed, std::memory_order_release);
  }
}

void ExpertStore::begin(int layer, const std::vector<int>& ids) {
  if (!layer) ++turn_;
  {
    const std::lock_guard<std::mutex> lock(reading_);
    collect(false);
  }
  arriving_.erase(std::remove_if(arriving_.begin(), arriving_.end(),
                                 [this](int number) {
                                   const int state = slots_[number].state.load(std::memory_order_acquire);
                                   return state != kReading && state != kRead;
                                 }),
                  arriving_.end());
  for (const int id : ids) {  // before any slot is given away
    const int number = where_[at(layer, id)];
    use(at(layer, id));
    if (number >= 0) ++slots_[number].pins;
  }
  for (const int id : ids) {
    int number = where_[at(layer, id)];
    const bool there = number >= 0;
    if (there && slots_[number].state.load(std::memory_order_acquire) != kFailed) {
      ++counts_.hits;
      ++now_->hits;
      continue;
    }
    if (!there) {
      number = victim();
      ++slots_[number].pins;
    }
    read(number, at(layer, id));
  }
}

void ExpertStore::end(int layer, const std::vector<int>& ids) {
  for (const int id : ids)
    if (const int number = where_[at(layer, id)]; number >= 0 && slots_[number].pins) --slots_[number].pins;
}

void ExpertStore::end_all() {
  for (int i = 0; i < count_; ++i) slots_[i].pins = 0;
}

void ExpertStore::abandon() {
  {
    const std::lock_guard<std::mutex> lock(reading_);
    while (reads_->going()) collect(true);
  }
  end_all();
  for (int i = 0; i < count_; ++i) {
    Slot& slot = slots_[i];
    if (slot.state.load(std::memory_order_acquire) == kReady || slot.expert < 0) continue;
    where_[static_cast<size_t>(slot.expert)] = -1;
    slot.expert = -1;
    slot.state.store(kEmpty, std::memory_order_release);
  }
}

const uint8_t* ExpertStore::part(int layer, int id, int part) {
  const int number = where_[at(layer, id)];
  Slot& slot = slots_[number];
  for (;;) {
    switch (slot.state.load(std::memory_order_acquire)) {
      case kReady: return slot.parts[part];
      case kFailed: throw std::runtime_error(name(slot.expert) + ": " + slot.failure);
      case kRead: {
        int expected = kRead;
        if (slot.state.compare_exchange_strong(expected, kChecking, std::memory_order_acq_rel)) check(slot);
        break;
      }
      case kChecking:
        if (!check_another()) std::this_thread::yield();
        break;
      default: {
        if (check_another()) break;
        const double from = seconds();
        const std::lock_guard<std::mutex> lock(reading_);
        if (slot.state.load(std::memory_order_acquire) == kReading) collect(true);
        const double waited = seconds() - from;
        counts_.waited += waited;
        now_->waited += waited;
      }
    }
  }
}

// ---- checksums -----------------------------------------------------------------------------------------------------

uint64_t ExpertStore::checksum(const uint8_t* data, size_t bytes, uint64_t from) {
  // each word is added to one of four lanes and multiplied by an odd number: both can be undone, so no change of one
  // word is lost
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  uint64_t lanes[4] = {from, from + 1, from + 2, from + 3};
  size_t at = 0;
  for (; at + 32 <= bytes; at += 32)
    for (int i = 0; i < 4; ++i) {
      uint64_t word;
      std::memcpy(&word, data + at + 8 * i, 8);
      lanes[i] = (lanes[i] ^ word) * kOdd;
    }
  for (; at < bytes; ++at) lanes[at % 4] = (lanes[at % 4] ^ data[at]) * kOdd;
  uint64_t sum = bytes;
  for (const uint64_t lane : lanes) sum = (sum ^ lane ^ lane >> 29) * kOdd;
  return sum ^ sum >> 32;
}

uint64_t ExpertStore::checksum_of(const Slot& slot) const {
  const ExpertPlace& place = places_[static_cast<size_t>(layer_of(static_cast<size_t>(slot.expert)))];
  uint64_t sum = static_cast<uint64_t>(slot.expert);
  for (size_t part = 0; part < place.parts.size(); ++part)
    if (place.parts[part].bytes) sum = checksum(slot.parts[part], place.parts[part].bytes, sum);
  return sum;
}

void ExpertStore::check(Slot& slot) {
  const size_t expert = static_cast<size_t>(slot.expert);
  const uint64_t sum = checksum_of(slot);
  if (known_[expert] && sum != checksums_[expert]) {
    slot.failure = checked_ ? "its bytes are not those that were checked when the model was opened"
                            : "its bytes are not those of the read before, and the files were not checked";
    slot.state.store(kFailed, std::memory_order_release);
    return;
  }
  checksums_[expert] = sum;
  known_[expert] = 1;
  slot.state.store(kReady, std::memory_order_release);
}

bool ExpertStore::check_another() {
  for (const int number : arriving_) {
    int expected = kRead;
    if (!slots_[number].state.compare_exchange_strong(expected, kChecking, std::memory_order_acq_rel)) continue;
    check(slots_[number]);
    return true;
  }
  return false;
}

std::vector<uint64_t> ExpertStore::checksums() {
  std::vector<uint64_t> found;
  const size_t window = std::min<size_t>(8, static_cast<size_t>(count_));
  const auto one = [this](size_t expert) {
    const int layer = layer_of(expert);
    return std::make_pair(layer, std::vector<int>{static_cast<int>(expert - first_[static_cast<size_t>(layer)])});
  };
  for (size_t next = 0; found.size() < where_.size();) {
    for (; next < std::min(where_.size(), found.size() + window); ++next) {
      const auto [layer, id] = one(next);
      begin(layer, id);
    }
    const auto [layer, id] = one(found.size());
    part(layer, id[0], 0);
    found.push_back(checksum_of(slots_[where_[found.size()]]));
    end(layer, id);
  }
  forget_counts();
  if (!of_layers_) std::fill(used_.begin(), used_.end(), -1e300);
  return found;
}

// ---- counts --------------------------------------------------------------------------------------------------------

void ExpertStore::count(int rows, int sent, int distinct) {
  now_ = &by_rows_[std::min(rows, kMostRows)];
  for (ExpertCounts* counts : {&counts_, now_}) {
    ++counts->passes;
    counts->sent += sent;
    counts->distinct += distinct;
  }
}

void ExpertStore::forget_counts() {
  counts_ = {};
  for (ExpertCounts& one : by_rows_) one = {};
}

// ---- layers
// ----------------------------------------------------------------------------------------------------------

LayerReader::LayerReader(ExpertStore& store, const Program& program, const bool* gates, int rows)
    : store_(store), rows_(rows), held_(static_cast<size_t>(program.weights)) {
  program.each(gates, [&](const Step& s) {
    const int piece = store.piece_of(static_cast<size_t>(&s - program.steps.data()));
    if (piece >= 0 && (order_.empty() || order_.back() != piece)) order_.push_back(piece);
  });
}

void LayerReader::enter(size_t step) {
  const int piece = store_.piece_of(step);
  if (piece < 0 || piece == piece_) return;
  if (piece_ >= 0) {
    for (const ExpertPlace::Part& part : store_.place(piece_).parts) held_[static_cast<size_t>(part.weight)] = nullptr;
    store_.end(piece_, {0});
  }
  piece_ = piece;
  while (next_ < order_.size() && order_[next_++] != piece) {}
  store_.count(rows_, 1, 1);
  if (const auto found = std::find(ahead_.begin(), ahead_.end(), piece); found != ahead_.end())
    ahead_.erase(found);
  else
    store_.begin(piece, {0});
  // the pass after this one is taken to need the same pieces
  for (size_t i = 0; i + 1 < order_.size() && ahead_.size() < size_t(ExpertStore::kAhead); ++i) {
    const int later = order_[(next_ + i) % order_.size()];
    if (later == piece || store_.holds(later, 0)) continue;
    store_.begin(later, {0});
    ahead_.push_back(later);
  }
  const std::vector<ExpertPlace::Part>& parts = store_.place(piece).parts;
  for (size_t part = 0; part < parts.size(); ++part)
    held_[static_cast<size_t>(parts[part].weight)] = store_.part(piece, 0, static_cast<int>(part));
}

StreamedPass::StreamedPass(ExpertStore* store, const Program& program, PassInputs& in) : store_(store) {
  if (!store) return;
  alone_ = std::unique_lock<std::mutex>(store->pass);
  if (!store->of_layers())
    in.experts = store;
  else if (in.rows)
    in.layers = (layers_ = std::make_unique<LayerReader>(*store, program, in.gates, in.rows)).get();
}

StreamedPass::~StreamedPass() {
  if (!store_) return;
  try {
    store_->abandon();
  } catch (...) {}  // the ring cannot be waited for: the next read fails with it
}

void StreamedPass::end() {
  if (store_) store_->end_all();
  store_ = nullptr;
}

// ---- the disk ------------------------------------------------------------------------------------------------------

double disk_rate(const std::string& path, size_t piece, int together, double limit, bool threads, bool checked) {
  const std::unique_ptr<AsyncReads> reads = AsyncReads::open(path, threads);
  const uint64_t pieces = reads->size() / (piece = whole(std::max<size_t>(piece, 1)));
  if (!pieces || together < 1) throw std::invalid_argument("edgespec: a file that is too short to measure its disk");
  // as in a pass, what arrives must not find its memory in the processor's cache
  const size_t bytes = piece * static_cast<size_t>(together), places = std::max<size_t>(1, kColdBytes / bytes);
  const std::unique_ptr<uint8_t, std::function<void(uint8_t*)>> memory(
      pages(places * bytes), [&](uint8_t* found) { give_back(found, places * bytes); });
  std::memset(memory.get(), 1, places * bytes);
  std::vector<Ended> ended;
  uint64_t at = 0, turns = 0;
  volatile uint64_t sum = 0;  // nothing compares it
  const auto place = [&](int i) { return memory.get() + turns % places * bytes + static_cast<size_t>(i) * piece; };
  const double from = seconds();
  do {
    for (int i = 0; i < together; ++i) {
      at = (at + pieces * 5 / 8 + 1) % pieces;  // far from the one before
      reads->start({at * piece, place(i), piece, piece, i});
    }
    while (reads->going()) {
      ended.clear();
      reads->collect(true, ended);
      for (const Ended& one : ended) {
        if (!one.failure.empty()) throw std::runtime_error("edgespec: " + path + ": " + one.failure);
        if (checked) sum = ExpertStore::checksum(place(one.owner), piece, sum);
      }
    }
    ++turns;
  } while (seconds() - from < limit);
  return static_cast<double>(turns * bytes) / (seconds() - from);
}

// ---- for sessions of ONNX Runtime ----------------------------------------------------------------------------------

namespace {
thread_local std::shared_ptr<ExpertStore> pending;
}

std::shared_ptr<ExpertStore> take_pending_store(const std::string& program) {
  if (!pending || pending->program() != program) return nullptr;
  return std::move(pending);
}

}  // namespace edgespec

using edgespec::answered;
using edgespec::ExpertStore;
using Handle = std::shared_ptr<ExpertStore>;

EDGESPEC_EXPORT void* edgespec_experts_open(const char* graph, uint64_t cache, int threads) {
  Handle* made = nullptr;
  edgespec::guarded([&] { made = new Handle(std::make_shared<ExpertStore>(graph, size_t(cache), threads != 0)); });
  return made;
}
EDGESPEC_EXPORT void edgespec_experts_close(void* store) { delete static_cast<Handle*>(store); }
// Gives the store to the next session that this thread opens; null takes it back.  Returns whether one was left.
EDGESPEC_EXPORT int edgespec_experts_use(void* store) {
  const bool left = edgespec::pending != nullptr;
  edgespec::pending = store ? *static_cast<Handle*>(store) : nullptr;
  return left;
}
// Experts, slots, bytes of a slot, bytes of all experts, whether they are pieces of layers.
EDGESPEC_EXPORT void edgespec_experts_sizes(void* store, uint64_t* sizes) {
  const ExpertStore& own = **static_cast<Handle*>(store);
  sizes[0] = own.experts();
  sizes[1] = own.slots();
  sizes[2] = own.slot_bytes();
  sizes[3] = own.expert_bytes();
  sizes[4] = own.of_layers();
}
EDGESPEC_EXPORT const char* edgespec_experts_reads(void* store) { return (*static_cast<Handle*>(store))->reads(); }
// Reads all experts for their checksums -> 0, or below 0: it failed.
EDGESPEC_EXPORT int64_t edgespec_experts_checksums(void* store, uint64_t* sums) {
  return answered([&] {
    const std::vector<uint64_t> found = (*static_cast<Handle*>(store))->checksums();
    std::copy(found.begin(), found.end(), sums);
    return int64_t(0);
  });
}
EDGESPEC_EXPORT void edgespec_experts_expect(void* store, const uint64_t* sums) {
  (*static_cast<Handle*>(store))->expect(sums);
}
// Counts of passes of that many rows (0: of all): passes, sent, distinct, hits, bytes, seconds waited.
EDGESPEC_EXPORT void edgespec_experts_counts(void* store, int rows, double* counts) {
  const edgespec::ExpertCounts found = (*static_cast<Handle*>(store))->counts(rows);
  const double all[] = {found.passes, found.sent, found.distinct, found.hits, found.bytes, found.waited};
  std::copy(std::begin(all), std::end(all), counts);
}
EDGESPEC_EXPORT void edgespec_experts_forget_counts(void* store) { (*static_cast<Handle*>(store))->forget_counts(); }
// Bytes per second that the disk of a file gives, for `together` pieces at once, compared with a checksum or not; below
// 0: it failed.
EDGESPEC_EXPORT double edgespec_experts_disk_rate(const char* path, uint64_t piece, int together, double limit,
                                                  int threads, int checked) {
  double rate = -1;
  edgespec::guarded(
      [&] { rate = edgespec::disk_rate(path, size_t(piece), together, limit, threads != 0, checked != 0); });
  return rate;
}
