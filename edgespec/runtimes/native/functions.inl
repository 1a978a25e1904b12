// Functions of single numbers over the vector types of an isa_*.cpp file; included by kernels.inl.

// exp(x) for x <= 0: 2^r * e^f with |f| <= ln2 / 2, a Taylor series of degree 6.  The relative error is below 3e-7 near
// 0 and grows by 2e-8 with each unit of x, where results count ever less.
inline F exponential_near(F x) {  // anything below -87
  const F r = fround(fmul(x, fset(1.44269504f)));
  const F f = fnma(r, fset(0.69314718f), x);
  F p = fset(1.f / 720.f);
  p = fma(p, f, fset(1.f / 120.f));
  p = fma(p, f, fset(1.f / 24.f));
  p = fma(p, f, fset(1.f / 6.f));
  p = fma(p, f, fset(.5f));
  p = fma(p, f, fset(1.f));
  p = fma(p, f, fset(1.f));
  return fscale2(p, r);
}

inline F exponential(F x) { return exponential_near(fmax(fset(-87.f), x)); }  // in this order a NaN stays

// 1 / (1 + exp(-x)), through exp(-|x|) so that nothing overflows
inline F sigmoid(F x) {
  const F e = exponential(fneg(fabs_(x)));  // in (0, 1]
  const F one = fset(1.f);
  return fdiv(fpositive(x, one, e), fadd(one, e));
}

inline F silu(F x) { return fmul(x, sigmoid(x)); }

// exp(-|x|) is cut off at e^-80, long before it would be a denormal number.
constexpr float kFaint = -80.f;

// x * Phi(x) with Phi = 1 - erfc(|x| / sqrt 2) / 2 above zero.  erfc by Hastings' polynomial (Abramowitz and Stegun,
// Handbook of Mathematical Functions, 7.1.26), off by 1.5e-7 at most.
inline F gelu(F x) {
  const F one = fset(1.f), a = fmul(fabs_(x), fset(0.70710678f));
  const F t = fdiv(one, fma(a, fset(0.3275911f), one));
  F p = fset(1.061405429f);
  p = fma(p, t, fset(-1.453152027f));
  p = fma(p, t, fset(1.421413741f));
  p = fma(p, t, fset(-0.284496736f));
  p = fma(p, t, fset(0.254829592f));
  const F exponent = fneg(fmul(a, a));
  const F e = fzero_below(exponential(exponent), exponent, kFaint);
  const F tail = fmul(fmul(fmul(p, t), e), fset(.5f));
  return fmul(x, fpositive(x, fsub(one, tail), tail));
}

// x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) for u = sqrt(2 / pi) (x + 0.044715 x^3)
inline F gelu_tanh(F x) {
  const F one = fset(1.f), square = fmul(x, x);
  const F z = fmul(fmul(x, fset(1.59576912f)), fma(square, fset(0.044715f), one));  // 2 u
  const F exponent = fneg(fabs_(z));
  const F e = fzero_below(exponential(exponent), exponent, kFaint);
  return fmul(x, fdiv(fpositive(x, one, e), fadd(one, e)));
}

// Here too.  The sum makes -0 to 0: LLVM takes a comparison with 0 for FMAX on Arm, which gives 0 there.
inline F relu(F x) { return fadd(fmax(fset(0.f), x), fset(0.f)); }

inline F relu2(F x) {
  const F y = relu(x);
  return fmul(y, y);
}

// exp(y) - 1 for y <= 0, as 2^r (e^f - 1) + (2^r - 1), which keeps its digits near 0: there r is 0.
inline F exponential_less_one(F y) {
  const F least = fset(-87.f), one = fset(1.f);
  const F r = fround(fmul(fmax(y, least), fset(1.44269504f)));
  const F f = fnma(r, fset(0.69314718f), fmax(least, y));  // here too
  F p = fset(1.f / 720.f);
  p = fma(p, f, fset(1.f / 120.f));
  p = fma(p, f, fset(1.f / 24.f));
  p = fma(p, f, fset(1.f / 6.f));
  p = fma(p, f, fset(.5f));
  p = fma(p, f, one);
  const F power = fscale2(one, r);
  return fma(power, fmul(p, f), fsub(power, one));
}

// tanh(x) = -m / (2 + m), m = exp(-2 |x|) - 1
inline F hyperbolic_tangent(F x) {
  const F m = exponential_less_one(fmul(fabs_(x), fset(-2.f)));
  const F size = fdiv(fneg(m), fadd(fset(2.f), m));
  return fpositive(x, size, fneg(size));
}

template <F (*function)(F)>
void k_glu(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; i += 16) fstore(y + i, fmul(function(fload(gate + i)), fload(up + i)));
}

// gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), the gate at most 7, up within -7 and 7 (arXiv 2508.10925).
void k_swiglu_oai(const float* gate, const float* up, int n, float* y) {
  const F one = fset(1.f), least = fset(-7.f);
  for (int i = 0; i < n; i += 16) {  // constants come first, so that a NaN stays
    const F g = fneg(fmax(least, fneg(fload(gate + i)))), u = fneg(fmax(least, fneg(fload(up + i))));
    fstore(y + i, fmul(fmul(g, sigmoid(fmul(g, fset(1.702f)))), fadd(fmax(least, u), one)));
  }
}

void k_xielu(float* x, int n, const float* numbers) {
  const F above = fset(numbers[0]), below = fset(numbers[1]), slope = fset(numbers[2]);
  for (int i = 0; i < n; i += 16) {
    const F each = fload(x + i), low = fneg(relu(fneg(each)));
    const F bent = fma(below, fsub(exponential_less_one(low), low), fmul(slope, each));
    fstore(x + i, fma(above, relu2(each), bent));
  }
}

void k_softcap(float* x, int n, float cap) {
  const F by = fset(1.f / cap), most = fset(cap);
  for (int i = 0; i < n; i += 16) fstore(x + i, fmul(most, hyperbolic_tangent(fmul(fload(x + i), by))));
}
