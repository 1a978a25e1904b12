// WebAssembly's SIMD128.
#include "kernels.h"

#if defined(__wasm_simd128__)
#include <wasm_simd128.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "ggml.h"
#include "half.h"

namespace edgespec {
namespace {

#include "lanes_wasm.inl"
#include "matrices_wasm.inl"
// the kernels use both
#include "kernels.inl"

const Kernels table = kTable("simd128");

}  // namespace

const Kernels* simd128_kernels() { return &table; }

}  // namespace edgespec

#else
namespace edgespec {
const Kernels* simd128_kernels() { return nullptr; }
}  // namespace edgespec
#endif
