// Tests of the kernels and of whole passes that need no ONNX Runtime: run on every processor, under sanitizers and in
// emulators (tests/runtimes/native/test_kernels.py).
//
//   selftest isas            the instruction sets that this processor and build have
//   selftest hash ISA        a hash of what each kernel computes: the same lines for every ISA
//   selftest accuracy ISA    the largest errors against double precision, as JSON
//   selftest pass [brief]    a small model: one row at a time against many, threads, slots, trees, moves, KV formats
#include "selftest.h"

namespace edgespec {
namespace {

bool supported(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx2" || isa == "avx512")
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
      return false;
  if (isa == "avx512")
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return !isa.empty();
}

const Kernels* find(const std::string& isa) {
  for (const Kernels* one : {scalar_kernels(), avx2_kernels(), avx512_kernels(), neon_kernels()})
    if (one && isa == one->name && supported(isa)) return one;
  return nullptr;
}

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "isas") {
    for (const char* isa : {"scalar", "avx2", "avx512", "neon"})
      if (find(isa)) std::printf("%s\n", isa);
    return 0;
  }
  if (what == "pass") {
    try {
      passes(argc > 2 && !std::strcmp(argv[2], "brief"));
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
      return 1;
    }
    std::printf("ok (%s)\n", kernels().name);
    return 0;
  }
  const Kernels* kernels = argc > 2 ? find(argv[2]) : nullptr;
  if (!kernels || (what != "hash" && what != "accuracy")) {
    std::fprintf(stderr, "selftest isas | hash ISA | accuracy ISA | pass [brief]\n");
    return 2;
  }
  if (what == "hash") print_hashes(*kernels);
  if (what == "accuracy") print_accuracy(*kernels);
  return 0;
}

}  // namespace
}  // namespace edgespec

int main(int argc, char** argv) { return edgespec::main(argc, argv); }