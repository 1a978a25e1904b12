// a * b + c rounded once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace edgespec {

#ifdef __MINGW32__  // whose fma rounds twice
inline float fused(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;  // the product is exact
  const double there = sum - product, lost = (product - (sum - there)) + (c - there);
  if (!(lost != 0) || !std::isfinite(sum)) return static_cast<float>(sum);
  // rounded to the odd neighbour, so that the last rounding sees that something was lost (Boldo and Melquiond,
  // https://hal.inria.fr/inria-00080427)
  int64_t bits;
  std::memcpy(&bits, &sum, 8);
  if (!(bits & 1)) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  double odd;
  std::memcpy(&odd, &bits, 8);
  return static_cast<float>(odd);
}
#else
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
#endif

}  // namespace edgespec
