// NEON on 64-bit Arm.  The dot product instructions of Armv8.2 are used where the compiler may assume them.
#include "kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_neon.inl"
#include "matrices_neon.inl"
// the kernels use both
#include "kernels.inl"

const Kernels table = kTable("neon");

}  // namespace

const Kernels* neon_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace edgespec
#endif
