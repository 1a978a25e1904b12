// Which kernels this processor runs: decided once, overridable by EDGESPEC_ISA for tests.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace edgespec {
namespace {

#if defined(__x86_64__)
// F16C is bit 29 of leaf 1's ecx: clang knows it by name from version 16 on.
bool has_avx2() {
  unsigned a, b, c = 0, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c >> 29 & 1);
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
#endif

// Kernels are built with dot products (ARMv8.2); older cores have none.
bool has_dot_products() {
#if defined(__aarch64__) && defined(__linux__)
  return (getauxval(AT_HWCAP) & (1ul << 20)) != 0;  // HWCAP_ASIMDDP
#else
  return true;
#endif
}

struct Choice {
  const Kernels* kernels = nullptr;
  const char* error = nullptr;

  Choice() {
    const Kernels* known[] = {has_avx512() ? avx512_kernels() : nullptr, has_avx2() ? avx2_kernels() : nullptr,
                              has_dot_products() ? neon_kernels() : nullptr, scalar_kernels()};
    const char* wanted = std::getenv("EDGESPEC_ISA");
    for (const Kernels* one : known) {
      if (!one) continue;
      if (!kernels) kernels = one;
      if (wanted && !std::strcmp(wanted, one->name)) {
        kernels = one;
        return;
      }
    }
    if (wanted && *wanted) error = "EDGESPEC_ISA names an instruction set that this processor or build lacks";
  }
};

const Choice& choice() {
  static const Choice made;
  return made;
}

}  // namespace

const Kernels& kernels() { return *choice().kernels; }
const char* kernels_error() { return choice().error; }

}  // namespace edgespec
