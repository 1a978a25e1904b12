// Shared code of the fuzz harnesses: the operator as ONNX Runtime sees it, with a fake of the part of the C interface
// that it calls, and inputs for a program that are valid until bytes change them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>

#include "abi.h"
#include "selftest.h"

extern "C" edgespec::abi::Status* RegisterCustomOps(edgespec::abi::SessionOptions*, const edgespec::abi::ApiBase*);

namespace edgespec {

constexpr size_t kMostBytes = size_t(1) << 24;  // of a program's buffers and weights: more shows nothing more
constexpr int kInputs = 8, kOutputs = 4;        // without those of memories and the weights
enum Input { kPlan, kRows, kGates, kMoves, kKv, kControl, kTables, kHiddenIn, kMemory, kSources };

// Numbers from the bytes of a fuzzer, followed by zeros.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}
  bool left() const { return data_ < end_; }
  int next() { return left() ? *data_++ : 0; }
  int below(int n) { return (next() << 8 | next()) % n; }
  // One that is likely to be refused, or to be just not.
  int64_t odd() {
    constexpr int64_t kOdd[] = {0,
                                -1,
                                1,
                                2,
                                -2,
                                127,
                                128,
                                129,
                                255,
                                1 << 16,
                                1 << 24,
                                INT32_MAX,
                                int64_t(1) << 32,
                                int64_t(1) << 61,
                                int64_t(1) << 62,
                                INT64_MAX,
                                INT64_MIN};
    const int chosen = next();
    return chosen < 17 ? kOdd[chosen] : chosen < 40 ? -chosen : below(300);
  }
  float number() {
    constexpr float kOdd[] = {0.f, -0.f, 1e-40f, 1e38f, -3e38f, HUGE_VALF, -HUGE_VALF};
    const int chosen = next();
    return chosen < 7 ? kOdd[chosen] : chosen == 7 ? std::nanf("") : (chosen - 128) / 16.f;
  }

 private:
  const uint8_t *data_, *end_;
};

// A tensor whose memory ends where it does.
struct Tensors {
  int type = abi::kFloat;
  std::vector<int64_t> dims;
  std::shared_ptr<Array<uint8_t>> memory;
};

inline Tensors tensor(int type, std::vector<int64_t> dims) {
  size_t bytes = type == abi::kFloat ? 4 : type == abi::kInt64 ? 8 : 1;
  for (const int64_t d : dims) bytes *= size_t(d);
  return {type, std::move(dims), std::make_shared<Array<uint8_t>>(bytes)};
}
template <class T>
T* numbers_of(const Tensors& t) {
  return reinterpret_cast<T*>(t.memory->get());
}

// ---- the fake interface ---------------------------------------------------------------------------------------------

// Allocations of the operator until one fails, and calls until the fake refuses one; below zero: none.
inline std::atomic<long> until_failure{-1}, until_refusal{-1};
inline long ran = 0;  // passes that were not refused

[[noreturn]] inline void fail(const std::string& what) {
  std::cerr << what << std::endl;
  std::abort();
}

struct Context {
  std::vector<Tensors> inputs;
  std::optional<Tensors> outputs[kOutputs];
};
struct Node {
  std::string program;
  bool constant = true;
};

namespace standin {

inline std::atomic<long> open_statuses{0}, open_shapes{0};

// Like ONNX Runtime's, this memory is not the operator's: whether there is any is not asked here.
template <class Function>
auto apart(Function function) {
  const long kept = until_failure.exchange(-1);
  auto result = function();
  until_failure = kept;
  return result;
}

inline bool refused() { return until_refusal.fetch_sub(1) == 0; }

inline abi::Status* status(const std::string& text) {
  ++open_statuses;
  return reinterpret_cast<abi::Status*>(new std::string(text));
}
inline abi::Status* create_status(int, const char* text) {
  return apart([&] { return status(text); });
}
inline const char* message(const abi::Status* s) { return reinterpret_cast<const std::string*>(s)->c_str(); }
inline void release_status(abi::Status* s) {
  --open_statuses;
  delete reinterpret_cast<std::string*>(s);
}
inline const Tensors& of(const void* value) { return *static_cast<const Tensors*>(value); }
inline abi::Status* mutable_data(const abi::Value* value, void** data) {
  if (refused()) return apart([] { return status("refused"); });
  *data = of(value).memory->get();
  return nullptr;
}
inline abi::Status* shape(const abi::Value* value, abi::ShapeInfo** info) {
  if (refused()) return apart([] { return status("refused"); });
  ++open_shapes;
  *info = reinterpret_cast<abi::ShapeInfo*>(const_cast<abi::Value*>(value));
  return nullptr;
}
inline abi::Status* element_type(const abi::ShapeInfo* info, int* type) {
  if (refused()) return apart([] { return status("refused"); });
  *type = of(info).type;
  return nullptr;
}
inline abi::Status* rank(const abi::ShapeInfo* info, size_t* rank) {
  if (refused()) return apart([] { return status("refused"); });
  *rank = of(info).dims.size();
  return nullptr;
}
inline abi::Status* dims(const abi::ShapeInfo* info, int64_t* dims, size_t rank) {
  if (refused()) return apart([] { return status("refused"); });
  std::copy_n(of(info).dims.begin(), rank, dims);
  return nullptr;
}
inline void release_shape(abi::ShapeInfo*) { --open_shapes; }
inline abi::Status* attribute(const abi::KernelInfo* info, const char*, char* text, size_t* size) {
  if (refused()) return apart([] { return status("refused"); });
  const auto& program = reinterpret_cast<const Node*>(info)->program;
  if (text) std::memcpy(text, program.c_str(), std::min(*size, program.size() + 1));
  *size = program.size() + 1;
  return nullptr;
}
inline abi::Status* flag(const abi::KernelInfo* info, const char*, int64_t* value) {
  *value = reinterpret_cast<const Node*>(info)->constant;
  return nullptr;
}
inline Context& context(const abi::KernelContext* c) {
  return *reinterpret_cast<Context*>(const_cast<abi::KernelContext*>(c));
}
inline abi::Status* input_count(const abi::KernelContext* c, size_t* count) {
  if (refused()) return apart([] { return status("refused"); });
  *count = context(c).inputs.size();
  return nullptr;
}
inline abi::Status* get_input(const abi::KernelContext* c, size_t index, const abi::Value** value) {
  if (refused()) return apart([] { return status("refused"); });
  *value = reinterpret_cast<const abi::Value*>(&context(c).inputs[index]);
  return nullptr;
}
inline abi::Status* get_output(abi::KernelContext* c, size_t index, const int64_t* dims, size_t rank,
                               abi::Value** value) {
  return apart([&]() -> abi::Status* {
    if (refused()) return status("refused");
    size_t bytes = 8;
    for (size_t i = 0; i < rank; ++i) bytes = std::min(bytes * size_t(dims[i]), kMostBytes * 8);
    if (bytes > kMostBytes * 4) return status("an output is too large");
    auto& made = context(c).outputs[index] = tensor(index == 1 ? abi::kInt64 : abi::kFloat, {dims, dims + rank});
    *value = reinterpret_cast<abi::Value*>(&*made);
    return nullptr;
  });
}

// One more thread than the caller's, for as long as the program runs.
class Helper {
 public:
  Helper() {
    std::thread([this] {
      for (std::unique_lock<std::mutex> lock(mutex_);;) {
        changed_.wait(lock, [&] { return work_ != nullptr; });
        lock.unlock();
        work_(user_, 1);
        lock.lock();
        work_ = nullptr;
        changed_.notify_all();
      }
    }).detach();
  }
  void start(void (*work)(void*, size_t), void* user) {
    const std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    user_ = user;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return work_ == nullptr; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  void (*work_)(void*, size_t) = nullptr;
  void* user_ = nullptr;
};

inline abi::Status* parallel(const abi::KernelContext*, void (*work)(void*, size_t), size_t, size_t, void* user) {
  if (refused()) return apart([] { return status("refused"); });
  static Helper& helper = *apart([] { return new Helper; });
  helper.start(work, user);
  work(user, 0);
  helper.wait();
  return nullptr;
}

inline const abi::CustomOp* decoder = nullptr;

inline abi::Api api() {
  static void* slots[300] = {};
  const auto put = [&](int slot, auto function) { slots[slot] = reinterpret_cast<void*>(function); };
  put(abi::kCreateStatus, create_status);
  put(abi::kGetErrorMessage, message);
  put(abi::kReleaseStatus, release_status);
  put(abi::kGetTensorMutableData, mutable_data);
  put(abi::kGetTensorTypeAndShape, shape);
  put(abi::kGetTensorElementType, element_type);
  put(abi::kGetDimensionsCount, rank);
  put(abi::kGetDimensions, dims);
  put(abi::kReleaseTensorTypeAndShapeInfo, release_shape);
  put(abi::kKernelInfoGetAttributeString, attribute);
  put(abi::kKernelInfoGetAttributeInt64, flag);
  put(abi::kKernelContextGetInputCount, input_count);
  put(abi::kKernelContextGetInput, get_input);
  put(abi::kKernelContextGetOutput, get_output);
  put(abi::kKernelContextParallelFor, parallel);
  put(abi::kCreateCustomOpDomain, +[](const char*, abi::Domain**) -> abi::Status* { return nullptr; });
  put(
      abi::kCustomOpDomainAdd, +[](abi::Domain*, const abi::CustomOp* op) -> abi::Status* {
        decoder = op;
        return nullptr;
      });
  put(abi::kAddCustomOpDomain, +[](abi::SessionOptions*, abi::Domain*) -> abi::Status* { return nullptr; });
  return slots;
}

}  // namespace standin

// ---- the operator ---------------------------------------------------------------------------------------------------

// A node, made and closed as a session does.  What it refuses is in `refusal`; anything but words ends the program.
class Operator {
 public:
  explicit Operator(const std::string& program, bool constant = false) {
    const Node node = standin::apart([&] {
      static const abi::ApiBase base = {[](uint32_t) { return standin::api(); }, nullptr};
      if (!standin::decoder) RegisterCustomOps(nullptr, &base);
      return Node{program, constant};
    });
    take(standin::decoder->create_kernel_v2(standin::decoder, standin::api(),
                                            reinterpret_cast<const abi::KernelInfo*>(&node), &kernel_));
  }
  ~Operator() {
    if (kernel_) standin::decoder->destroy(kernel_);
    if (standin::open_statuses || standin::open_shapes) fail("a status or a shape was not given back");
  }
  Operator(const Operator&) = delete;
  bool made() const { return kernel_ != nullptr; }
  // Whether the pass ran.
  bool run(Context& context) {
    for (auto& output : context.outputs) output.reset();
    const bool done = take(standin::decoder->compute_v2(kernel_, reinterpret_cast<abi::KernelContext*>(&context)));
    ran += done;
    return done;
  }

  std::string refusal;

 private:
  bool take(abi::Status* status) {
    if (!status) return true;
    standin::apart([&] {
      refusal = standin::message(status);
      standin::release_status(status);
      if (refusal.rfind("edgespec", 0)) fail("refused without a word of who: " + refusal);
      return 0;
    });
    return false;
  }

  void* kernel_ = nullptr;
};

// ---- what it is given
// ------------------------------------------------------------------------------------------------

inline std::vector<size_t> weight_sizes(const Program& program, int positions) {
  std::vector<size_t> sizes(size_t(std::min(program.weights, 4096)), 4);
  const auto want = [&](int id, size_t bytes) {
    if (id >= 0 && id < int(sizes.size())) sizes[id] = std::max(sizes[id], bytes);
  };
  for (const Weight& w : program.sizes) want(w.id, w.k ? w.bytes() : size_t(w.by_seen ? positions : w.n) * 4);
  for (const Step& s : program.steps) {
    for (const int id : {s.cos, s.sin}) want(id, size_t(positions) * s.rotary * 2);
    want(s.positions, size_t(positions) * s.k * 4);
  }
  return sizes;
}

// Valid inputs for a program, chosen by bytes: two passes of it, the second one a tree after the first.
class Feeds {
 public:
  Context context;
  bool too_large = false;

  Feeds(const Program& program, Bytes& bytes) : program_(program) {
    slots_ = 1 + bytes.below(2);
    KvLayout layout;
    program.describe(layout);
    const bool differ = !layout.dims.empty();  // sizes of heads: such caches keep neither codes nor recent keys
    layout.keys = static_cast<KvFormat>(bytes.below(differ ? kKvInt8 + 1 : kKvNone));
    layout.codes = differ ? kKvNone : static_cast<KvFormat>(bytes.below(kKvNone + 1));
    layout.values = static_cast<KvFormat>(bytes.below(kKvInt8 + 1));
    const bool read_codes = layout.codes != kKvNone && bytes.below(2);
    layout.ring = !differ && bytes.below(2) ? 48 : 0;
    layout.window = bytes.below(layout.ring / 2 + 1);
    layout.sinks = bytes.below(kSinkRows + 1);
    const int blocks = 1 + bytes.below(3);
    layout.table = bytes.below(2) ? blocks : 0;
    const size_t kv = (layout.table ? layout.slot_bytes() : layout.header_bytes()) + layout.block_bytes() * blocks;
    const std::vector<size_t> sizes = weight_sizes(program, kPositions);
    const size_t places = size_t(layout.layers) * layout.heads;
    const size_t floats =
        (CodeTables::floats(layout.keys, layout.dim) + CodeTables::floats(layout.codes, layout.dim)) * places;
    const KvLayout memory = program.memory_layout(layout);
    memories_ = program.memory.count ? 1 + bytes.below(2) : 0;
    memory_rows_ = memories_ ? kKvBlock * (1 + bytes.below(2)) : 0;
    const size_t remembered = memory.block_bytes() * size_t(memory_rows_ / kKvBlock);
    size_t total = kv * slots_ + floats * 4 + remembered * memories_;
    for (const size_t size : sizes) total += size;
    for (const auto* widths : {&program.floats, &program.acts})
      for (const int width : *widths) total += size_t(width) * 4 * 32;
    if (total > kMostBytes || program.vocab > (1 << 16) || program.gates > 4096 || program.weights > 4096) {
      too_large = true;
      return;
    }
    auto& in = context.inputs;
    in.resize(kInputs);
    in[kKv] = tensor(abi::kUint8, {slots_, int64_t(kv)});
    header_ = layout.header_bytes(), each_ = layout.slot_bytes(), blocks_ = layout.table;
    for (int i = 0; i < slots_ * blocks_; ++i) number(i) = i;
    in[kTables] = tensor(abi::kFloat, {int64_t(floats)});
    for (size_t i = 0; i < floats; ++i) numbers_of<float>(in[kTables])[i] = float(i % 13) / 8 - .5f;
    in[kControl] = tensor(abi::kInt64, {8});
    const int64_t control[] = {bytes.below(3), layout.keys,  layout.values, layout.codes, read_codes + 2 * layout.table,
                               layout.window,  layout.sinks, layout.ring};
    std::copy_n(control, 8, numbers_of<int64_t>(in[kControl]));
    choose_gates(bytes);
    if (memories_) {
      in.resize(kInputs + 2);
      in[kMemory] = tensor(abi::kUint8, {memories_, int64_t(remembered)});
    }
    constexpr uint8_t kFills[] = {0x3c, 0x3c, 0x3c, 0xbc, 0x00, 0x7f, 0xff};
    const uint8_t fill = kFills[bytes.below(7)];
    for (const size_t size : sizes) {
      in.push_back(tensor(abi::kUint8, {int64_t(size)}));
      std::memset(in.back().memory->get(), fill, size);
    }
    chain(0, 1 + bytes.below(18));
  }

  // A slot refers to a block that is another one's, or none.
  void break_table(Bytes& bytes) {
    if (blocks_) number(bytes.below(slots_ * blocks_)) = bytes.next() % 2 ? 0 : int32_t(bytes.odd());
  }

  // The next pass: rows after the last one's, as a tree; half of the last ones moved, and committed.
  void go_on(Bytes& bytes) {
    const int rows = 1 + bytes.below(9);
    chain(rows_, rows);
    int64_t* plan = numbers_of<int64_t>(context.inputs[kPlan]);
    const size_t all = size_t(rows) * slots_;
    for (size_t r = 0; r < all; ++r) {
      const int64_t at = int64_t(r) % rows, parent = at ? int64_t(r) - 1 - bytes.below(int(at)) : -1;
      plan[4 * all + r] = parent;
      plan[all + r] = parent < 0 ? past_ : plan[all + parent] + 1;
    }
    auto& moves = context.inputs[kMoves] = tensor(abi::kInt64, {slots_ + 1, 3});
    for (int slot = 0; slot < slots_; ++slot) {
      const int64_t committed[] = {slot, kCommitted, past_};
      std::copy_n(committed, 3, numbers_of<int64_t>(moves) + 3 * slot);
    }
    const int64_t moved[] = {0, past_ - 1, bytes.below(int(past_))};
    std::copy_n(moved, 3, numbers_of<int64_t>(moves) + 3 * slots_);
  }

 private:
  static constexpr int kPositions = 256;

  int32_t& number(int i) {  // of a slot's block, one slot after the other
    uint8_t* slot = context.inputs[kKv].memory->get() + size_t(i / blocks_) * each_;
    return reinterpret_cast<int32_t*>(slot + header_)[i % blocks_];
  }

  void chain(int past, int rows) {
    past_ = past;
    rows_ = past + rows;
    const size_t all = size_t(rows) * slots_;
    auto& in = context.inputs;
    in[kPlan] = tensor(abi::kInt64, {6, int64_t(all)});
    in[kRows] = tensor(abi::kInt64, {int64_t(all)});
    in[kMoves] = tensor(abi::kInt64, {0, 3});
    in[kHiddenIn] = tensor(abi::kFloat, {int64_t(all), std::max(1, program_.given)});
    for (size_t r = 0; r < all; ++r) {
      const int64_t at = int64_t(r) % rows, place = past + at;
      const int64_t line[] = {at % 4, place, int64_t(r) / rows, past, at ? int64_t(r) - 1 : -1, place};
      for (size_t i = 0; i < 6; ++i) numbers_of<int64_t>(in[kPlan])[i * all + r] = line[i];
      numbers_of<int64_t>(in[kRows])[r] = int64_t(r);
    }
    if (memories_) {
      auto& sources = in[kSources] = tensor(abi::kInt64, {2, int64_t(all)});
      for (size_t r = 0; r < all; ++r) {
        numbers_of<int64_t>(sources)[r] = int64_t(r) / rows % memories_;
        numbers_of<int64_t>(sources)[all + r] = (past * 7 + 1 + int64_t(r) % 3) % memory_rows_;
      }
    }
    for (size_t i = 0; i < all * size_t(std::max(1, program_.given)); ++i)
      numbers_of<float>(in[kHiddenIn])[i] = float(i % 7) / 4 - 1;
  }

  // Most gates on; only one of those around LM heads, as their rows need not fit together; those of steps that fill
  // memories, or those of steps that read them.
  void choose_gates(Bytes& bytes) {
    std::vector<int> heads;
    const bool fill = memories_ && bytes.next() % 4 == 1;
    auto& gates = context.inputs[kGates] = tensor(abi::kBool, {program_.gates});
    for (int i = 0; i < program_.gates; ++i) gates.memory->get()[i] = bytes.next() % 8 != 7;
    for (size_t i = 0; i < program_.steps.size(); ++i)
      for (int j = 1; program_.steps[i].op == Op::kGate && j <= program_.steps[i].skip; ++j)
        if (const Step& s = program_.steps[i + j]; s.op == Op::kLogits) {
          heads.push_back(program_.steps[i].index);
          break;
        } else if (s.op == Op::kHeads && s.memory && s.fills() != fill) {
          gates.memory->get()[program_.steps[i].index] = 0;
        }
    for (const int gate : heads) gates.memory->get()[gate] = 0;
    if (!heads.empty()) gates.memory->get()[heads[bytes.below(int(heads.size()))]] = 1;
  }

  const Program& program_;
  int slots_ = 1, rows_ = 0, blocks_ = 0, memories_ = 0, memory_rows_ = 0;
  size_t header_ = 0, each_ = 0;
  int64_t past_ = 0;
};

// ---- kept programs, and a main function -----------------------------------------------------------------------------

inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) throw std::runtime_error("cannot read " + path);
  return text.str();
}

// Programs of real models, by name: the files of the folder that the environment variable EDGESPEC_PROGRAMS names.
inline const std::vector<std::string>& programs() {
  static const std::vector<std::string> texts = [] {
    std::vector<std::string> paths, found;
    const char* folder = std::getenv("EDGESPEC_PROGRAMS");
    if (!folder) fail("EDGESPEC_PROGRAMS names no folder");
    for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry.path().string());
    std::sort(paths.begin(), paths.end());
    for (const std::string& path : paths) found.push_back(read_file(path));
    return found;
  }();
  return texts;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// Without libFuzzer: SEED COUNT FILE..., the files and then `count` inputs that are made up.
template <class Make>
int run_files(int count, char** arguments, Make make) {
  if (count < 3) return 2;
  const auto run = [](const std::string& text) {
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  };
  for (int i = 3; i < count; ++i) run(read_file(arguments[i]));
  Random random(std::strtoull(arguments[1], nullptr, 10));
  const long most = std::atol(arguments[2]);
  for (long i = 0; i < most; ++i) run(make(random));
  std::cout << "ok, " << most << " inputs and " << count - 3 << " files, " << ran << " passes ran\n";
  return 0;
}

}  // namespace edgespec

// Allocations of the operator, and of code that the test must not count (standin::apart).
void* operator new(size_t bytes) {
  void* const found = edgespec::until_failure.fetch_sub(1) == 0 ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!found) throw std::bad_alloc();
  return found;
}
void* operator new[](size_t bytes) { return ::operator new(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return edgespec::until_failure.fetch_sub(1) == 0 ? nullptr : std::malloc(bytes ? bytes : 1);
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
