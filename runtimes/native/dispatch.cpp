// Which kernels this processor runs: decided once, overridable by EDGESPEC_ISA for tests.
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edgespec {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a, b, c = 0, d;  // F16C by its bit: Clang 14 does not know the name
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c & bit_F16C);
}
bool has_avxvnni() {  // by its bit: compilers learnt the name late
  unsigned a = 0, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avxvnni() { return false; }
bool has_avx512() { return false; }
#endif

// Kernels for Arm are built with dot products (ARMv8.2), and another time with matrix products (i8mm, Armv8.6).
#if defined(__aarch64__) && defined(__linux__)
bool has_neon() { return (getauxval(AT_HWCAP) & (1ul << 20)) != 0; }                 // HWCAP_ASIMDDP
bool has_i8mm() { return has_neon() && (getauxval(AT_HWCAP2) & (1ul << 13)) != 0; }  // HWCAP2_I8MM
#else
bool has_neon() { return true; }
bool has_i8mm() {
#if defined(__aarch64__) && defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

bool has_scalar() { return true; }

std::array<const Kernels*, std::size(kIsas)> known() {
#define EDGESPEC_KNOWN(isa) has_##isa() ? isa##_kernels() : nullptr,
  return {EDGESPEC_ISAS(EDGESPEC_KNOWN)};
}

struct Choice {
  const Kernels* kernels = nullptr;
  const char* error = nullptr;

  Choice() {
    const char* wanted = std::getenv("EDGESPEC_ISA");
    if (wanted && *wanted && !(kernels = kernels_named(wanted)))
      error = "EDGESPEC_ISA names an instruction set that this processor or build lacks";
    for (const Kernels* one : known())
      if (!kernels) kernels = one;
  }
};

const Choice& choice() {
  static const Choice made;
  return made;
}

}  // namespace

const Kernels* kernels_named(const char* name) {
  for (const Kernels* one : known())
    if (one && !std::strcmp(name, one->name)) return one;
  return nullptr;
}
const Kernels& kernels() { return *choice().kernels; }
const char* kernels_error() { return choice().error; }

}  // namespace edgespec
