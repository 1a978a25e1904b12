// Tests of the kernels and of whole passes that need no ONNX Runtime: run on every processor, under sanitizers and in
// emulators (tests/runtimes/native/test_kernels.py).
//
//   selftest isas            the instruction sets that this processor and build have
//   selftest hash ISA        a hash of what each kernel computes: the same lines for every ISA
//   selftest accuracy ISA    the largest errors against double precision, as JSON
//   selftest numbers         NaN and infinities in one activation reach the logits (EDGESPEC_ISA: of whole passes)
//   selftest processor       what the system calls its cores
//   selftest speed ISA THREADS TURNS LAYERS MEGABYTES ROWS SHAPE    times, as JSON (selftest.h, benchmarks/device.py)
//   selftest attention ISA THREADS TURNS LAYERS MEGABYTES ROWS DEPTH HEADSxKVxDIM    the same of attention
//   selftest pass [brief]    a small model: one row at a time against many, threads, slots, trees, moves, KV formats
#include "selftest.h"

namespace edgespec {
namespace {

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "isas") {
    for (size_t i = std::size(kIsas); i-- > 0;)  // the best last
      if (kernels_named(kIsas[i])) std::printf("%s\n", kIsas[i]);
    return 0;
  }
  if (what == "pass" || what == "numbers") {
    try {
      what == "pass" ? passes(argc > 2 && !std::strcmp(argv[2], "brief")) : numbers();
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
      return 1;
    }
    std::printf("ok (%s)\n", kernels().name);
    return 0;
  }
#if !defined(_WIN32) && !defined(__wasm__)
  if (what == "processor") {
    print_processor();
    return 0;
  }
  if (what == "speed" && argc == 9 && kernels_named(argv[2])) {
    setenv("EDGESPEC_ISA", argv[2], 1);
    print_speed(std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6]), argv[7], argv[8]);
    return 0;
  }
  if (what == "attention" && argc == 10 && kernels_named(argv[2])) {
    setenv("EDGESPEC_ISA", argv[2], 1);
    print_attention(std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6]), argv[7],
                    std::atoi(argv[8]), argv[9]);
    return 0;
  }
#endif
  const Kernels* kernels = argc > 2 ? kernels_named(argv[2]) : nullptr;
  if (!kernels || (what != "hash" && what != "accuracy")) {
    std::fprintf(
        stderr,
        "selftest isas | hash ISA | accuracy ISA | speed ISA ... | attention ISA ... | numbers | pass [brief]\n");
    return 2;
  }
  if (what == "hash") print_hashes(*kernels);
  if (what == "accuracy") print_accuracy(*kernels);
  return 0;
}

}  // namespace
}  // namespace edgespec

int main(int argc, char** argv) { return edgespec::main(argc, argv); }