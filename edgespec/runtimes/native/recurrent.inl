// Gated delta rules and their short convolutions over the vector types of an isa_*.cpp file; included by kernels.inl.

// ln(1 + exp(x)) = max(x, 0) + 2 artanh(e / (2 + e)) with e = exp(-|x|); a series in a number below 1 / 3.
inline F softplus(F x) {
  const F e = exponential(fneg(fabs_(x)));
  const F z = fdiv(e, fadd(fset(2.f), e)), square = fmul(z, z);
  F p = fset(1.f / 15.f);
  p = fma(p, square, fset(1.f / 13.f));
  p = fma(p, square, fset(1.f / 11.f));
  p = fma(p, square, fset(1.f / 9.f));
  p = fma(p, square, fset(1.f / 7.f));
  p = fma(p, square, fset(1.f / 5.f));
  p = fma(p, square, fset(1.f / 3.f));
  p = fma(p, square, fset(1.f));
  return fma(fadd(z, z), p, relu(x));
}

void k_decays(const float* a, const float* b, const float* bias, const float* rate, int n, float* decay, float* beta) {
  for (int i = 0; i < n; i += 16) {
    const int some = n - i < 16 ? n - i : 16;
    const F steps = softplus(fadd(fload_n(a + i, some), fload_n(bias + i, some)));
    fstore_n(decay + i, exponential(fneg(fmul(steps, fload_n(rate + i, some)))), some);
    fstore_n(beta + i, b ? sigmoid(fload_n(b + i, some)) : steps, some);
  }
}

void k_convolve(const float* const* rows, const float* w, const float* bias, int length, int n, float* y) {
  for (int i = 0; i < n; i += 16) {
    F sum = bias ? fload(bias + i) : fset(0.f);
    for (int j = 0; j < length; ++j)
      if (rows[j]) sum = fma(fload(w + size_t(j) * n + i), fload(rows[j] + i), sum);
    fstore(y + i, silu(sum));
  }
}

// Sums over a key's channels have four partial sums, channel modulo 4, added as (0 + 1) + (2 + 3).
void k_delta(const float* from, float* to, int dim, const float* q, const float* k, const float* v, float decay,
             float beta, float* out) {
  const F by = fset(decay);
  F sum[4] = {fset(0.f), fset(0.f), fset(0.f), fset(0.f)};
  for (int i = 0; i < dim; i += 4)
    for (int j = 0; j < 4; ++j) sum[j] = fma(fload(from + size_t(i + j) * 16), fset(k[i + j]), sum[j]);
  const F known = fmul(fadd(fadd(sum[0], sum[1]), fadd(sum[2], sum[3])), by);
  const F change = fmul(fsub(fload(v), known), fset(beta));
  F read[4] = {fset(0.f), fset(0.f), fset(0.f), fset(0.f)};
  for (int i = 0; i < dim; i += 4)
    for (int j = 0; j < 4; ++j) {
      const F state = fma(fset(k[i + j]), change, fmul(fload(from + size_t(i + j) * 16), by));
      fstore(to + size_t(i + j) * 16, state);
      if (out) read[j] = fma(state, fset(q[i + j]), read[j]);
    }
  if (out) fstore(out, fadd(fadd(read[0], read[1]), fadd(read[2], read[3])));
}

void k_space(const float* from, float* to, int dim, const float* q, const float* k, const float* v, float decay,
             float step, float skip, float* out) {
  const F by = fset(decay), given = fload(v), change = fmul(given, fset(step));
  F read[4] = {fset(0.f), fset(0.f), fset(0.f), fset(0.f)};
  for (int i = 0; i < dim; i += 4)
    for (int j = 0; j < 4; ++j) {
      const F state = fma(fset(k[i + j]), change, fmul(fload(from + size_t(i + j) * 16), by));
      fstore(to + size_t(i + j) * 16, state);
      if (out) read[j] = fma(state, fset(q[i + j]), read[j]);
    }
  if (out) fstore(out, fma(fset(skip), given, fadd(fadd(read[0], read[1]), fadd(read[2], read[3]))));
}
