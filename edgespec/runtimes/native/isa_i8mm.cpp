// NEON with the matrix products of bytes of Armv8.6 (FEAT_I8MM).
#include "kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
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

const Kernels table = kTable("i8mm");

}  // namespace

const Kernels* i8mm_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* i8mm_kernels() { return nullptr; }
}  // namespace edgespec
#endif
