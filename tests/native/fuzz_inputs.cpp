// Inputs of a native node from any bytes: plans, rows, gates, moves, caches, controls, tables, hidden states and
// weights of kept programs, two passes each.  It runs or fails with a message; nothing else happens.
//
//   fuzz_inputs SEED COUNT FILE...    the files, then random bytes fuzz_inputs memory                each allocation
//   and each call of ONNX Runtime fails once: see below
#include "fuzz.h"

namespace edgespec {
namespace {

void change(Context& context, Bytes& bytes) {
  auto& in = context.inputs;
  const int what = bytes.next() % 16;
  Tensors& t = in[size_t(bytes.below(int(in.size())))];
  if (what < 8) {  // a number
    const bool sees = in.size() > kSources && in[kSources].type == abi::kInt64 && bytes.next() % 4 == 0;
    Tensors& some =
        in[sees ? kSources : (const int[]){kPlan, kPlan, kPlan, kRows, kMoves, kControl, kControl, kPlan}[what]];
    const size_t count = some.memory->size() / 8;
    if (count) numbers_of<int64_t>(some)[size_t(bytes.below(65536)) % count] = bytes.odd();
  } else if (what < 10) {  // a shape
    std::vector<int64_t> dims = t.dims;
    if (dims.empty() || bytes.next() % 4 == 0) dims.assign(size_t(bytes.below(4)), bytes.below(9));
    if (!dims.empty()) {
      int64_t& one = dims[size_t(bytes.below(int(dims.size())))];
      one = std::max<int64_t>(0, one + bytes.below(5) - 2);
    }
    const Tensors old = t;
    t = tensor(t.type, dims);
    std::memcpy(t.memory->get(), old.memory->get(), std::min(t.memory->size(), old.memory->size()));
  } else if (what < 12) {  // bytes of the cache, of tables, of hidden states, of gates
    Tensors& some = in[(const int[]){kKv, kTables, kHiddenIn, kGates, kKv, kKv, kKv, kKv}[bytes.next() % 8]];
    const size_t count = some.memory->size() / 4;
    for (int i = bytes.next() % 32; i >= 0 && count; --i) {
      const size_t at = (size_t(bytes.below(65536)) << 8 | size_t(bytes.next())) % count;
      const float number = bytes.number();
      const int32_t whole = int32_t(bytes.odd());
      std::memcpy(some.memory->get() + at * 4, what == 10 ? static_cast<const void*>(&number) : &whole, 4);
    }
    if (some.type == abi::kBool && some.memory->size()) some.memory->get()[0] = uint8_t(bytes.next());
  } else if (what == 12) {
    if (in.size() > kInputs) in.resize(in.size() - 1);
  } else if (what == 13 && &t >= &in[kInputs]) {  // ONNX Runtime holds the others to their types
    t.type = bytes.below(20);
  } else if (what == 14) {
    for (size_t i = kInputs; i < in.size(); ++i)
      if (bytes.next() % 4 == 0) std::swap(in[i], t);
  } else {
    in[kHiddenIn] = tensor(abi::kFloat, {bytes.below(20), bytes.below(80)});
  }
}

void use(Bytes bytes) {
  const std::string& text = programs()[size_t(bytes.next()) % programs().size()];
  const Program program = Program::parse(text);
  Feeds feeds(program, bytes);
  if (feeds.too_large) fail("a kept program is too large");
  Operator node(text);  // weights differ from pass to pass
  if (bytes.next() % 8 == 1) feeds.break_table(bytes);
  for (int changes = bytes.next() % 2 ? 0 : bytes.below(3); changes; --changes) change(feeds.context, bytes);
  node.run(feeds.context);
  for (int pass = 0; pass < 2 && bytes.left(); ++pass) {
    Feeds later(program, bytes);
    if (later.context.inputs[kKv].dims == feeds.context.inputs[kKv].dims)
      later.context.inputs[kKv] = feeds.context.inputs[kKv];
    later.go_on(bytes);
    while (bytes.left() && bytes.next() % 8) change(later.context, bytes);
    node.run(later.context);
  }
}

// ---- memory --------------------------------------------------------------------------------------------------------

std::vector<uint8_t> given(const Context& context) {
  std::vector<uint8_t> all;
  for (const auto& output : context.outputs) all.insert(all.end(), output->memory->begin(), output->memory->end());
  return all;
}

// Everything that can fail, one after the other: making a node, passes with it.  Each failure is an error with a
// message, and the next pass gives its usual result.  Returns the number of failures.
long failures(const std::string& text, std::atomic<long>& until, const std::string& word) {
  constexpr long kMost = 100000;
  long failed = 0;
  for (long at = 0, step = 1;; at += step) {  // most are those of reading text, line by line
    if (at > kMost) fail("making a node has no end");
    until = at;
    Operator node(text);
    until = -1;
    if (node.made()) break;
    if (node.refusal.find(word) == std::string::npos) fail("expected '" + word + "', got " + node.refusal);
    ++failed;
    step = at < 100 ? 1 : 23;
  }
  const Program program = Program::parse(text);
  const uint8_t none[1] = {};
  Bytes zeros(none, 0), others(none, 0);
  Feeds first(program, zeros);
  Operator whole(text);
  if (!whole.run(first.context)) fail("refused: " + whole.refusal);
  const std::vector<uint8_t> expected = given(first.context);
  for (long at = 0;; ++at) {
    if (at > kMost) fail("a pass has no end");
    Feeds feeds(program, others);
    Operator node(text, at % 2);
    until = at;
    const bool ran = node.run(feeds.context);
    until = -1;
    if (!ran && node.refusal.find(word) == std::string::npos) fail("expected '" + word + "', got " + node.refusal);
    if (!ran && !node.run(feeds.context)) fail("refused after a failure: " + node.refusal);
    if (given(feeds.context) != expected) fail("another result after a failure");
    if (ran) return failed;
    ++failed;
  }
}

}  // namespace
}  // namespace edgespec

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  edgespec::use(edgespec::Bytes(data, size));
  return 0;
}

#ifndef EDGESPEC_LIBFUZZER
int main(int count, char** arguments) {
  using namespace edgespec;
  if (count == 2 && !std::strcmp(arguments[1], "memory")) {
    long allocations = 0, calls = 0;
    for (const std::string& text : programs()) {
      allocations += failures(text, until_failure, "out of memory");
      calls += failures(text, until_refusal, "refused");
    }
    std::cout << "ok, " << allocations << " allocations and " << calls << " calls failed\n";
    return 0;
  }
  return run_files(count, arguments, [](Random& random) {
    std::string data(size_t(random.between(20, 400)), ' ');
    for (char& byte : data) byte = static_cast<char>(random.next());
    return data;
  });
}
#endif
