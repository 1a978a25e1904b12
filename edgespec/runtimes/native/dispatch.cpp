// Which kernels this processor runs: decided once, overridable by EDGESPEC_ISA for tests.
#include <array>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>

#include "kernels.h"

#if defined(__x86_64__)  // clang-cl also defines it
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edgespec {
namespace {

#if defined(__x86_64__)
// Queries the processor directly: compilers' functions for it are in libraries that not every system has.
struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;  // as registers are called
  Cpuid(unsigned leaf, unsigned part) {
    if (leaf <= __get_cpuid_max(0, nullptr)) __cpuid_count(leaf, part, a, b, c, d);
  }
};
bool all(unsigned bits, std::initializer_list<int> wanted) {
  for (const int bit : wanted)
    if (!(bits >> bit & 1)) return false;
  return true;
}
// Whether the system saves these registers.
bool saves(unsigned wanted) {
  if (!all(Cpuid(1, 0).c, {27})) return false;  // OSXSAVE
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & wanted) == wanted;
}
bool has_avx2() { return saves(0x6) && all(Cpuid(1, 0).c, {28, 12, 29}) && all(Cpuid(7, 0).b, {5}); }  // AVX, FMA, F16C
bool has_avxvnni() { return has_avx2() && all(Cpuid(7, 1).a, {4}); }
bool has_avx512() {  // F, DQ, BW, VL; VNNI
  return has_avx2() && saves(0xe6) && all(Cpuid(7, 0).b, {16, 17, 30, 31}) && all(Cpuid(7, 0).c, {11});
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

// WebAssembly has no way to ask: a module with unknown instructions is refused as a whole.  isa_relaxed.cpp tries its
// own.
bool has_relaxed() { return true; }
bool has_simd128() { return true; }

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
