// exp, tanh and what is built of them, written once for every instruction set.
//
// V is a vector of V::width floats from an anonymous namespace (so each file instantiates its own copy), of
// vec_plain.h, vec_avx2.h, vec_avx512.h or vec_neon.h: operators + - * /, and static
//   load, load_part, store, store_part, set1, fma(a, b, c) = a * b + c, abs, round_even, copysign(x, sign)
//   min, max                  the second operand where either is NaN
//   select_less(a, b, x, y)   a < b ? x : y
//   pow2(n)                   2^n for whole n in -126 .. 127
//   max_bits, largest_bits    of magnitudes: the larger bits, so that a NaN wins
//   sum, root                 of all lanes; of one number
//   from_int32, from_bf16, store_bf16, store_int8   V::width values, rounded to nearest even
//   sum_int8(from, n)         of n values, a multiple of 32
//   prefetch_to_write(line)   as this core's own
#pragma once

namespace maitred {

// |relative error| < 2e-7 in -87 .. 88; 0 and 2^127-ish beyond. NaN stays NaN.
template <class V>
inline V exp_of(V x) {
  x = V::max(V::set1(-87.3f), V::min(V::set1(88.0f), x));  // the second operand is kept where either is NaN
  const V n = V::round_even(x * V::set1(1.44269504088896341f));
  V r = V::fma(n, V::set1(-0.693145751953125f), x);  // ln 2 in two parts, Cody and Waite
  r = V::fma(n, V::set1(-1.428606765330187e-6f), r);
  V p = V::set1(1.0f / 5040);
  p = V::fma(p, r, V::set1(1.0f / 720));
  p = V::fma(p, r, V::set1(1.0f / 120));
  p = V::fma(p, r, V::set1(1.0f / 24));
  p = V::fma(p, r, V::set1(1.0f / 6));
  p = V::fma(p, r, V::set1(0.5f));
  p = V::fma(p, r, V::set1(1.0f));
  p = V::fma(p, r, V::set1(1.0f));
  return p * V::pow2(n);
}

template <class V>
inline V tanh_of(V x) {
  const V size = V::abs(x), square = x * x;
  const V one = V::set1(1.0f);
  const V far = one - V::set1(2.0f) / (exp_of(size + size) + one);
  V p = V::set1(62.0f / 2835);  // Taylor's series, for |x| < 0.25
  p = V::fma(p, square, V::set1(-17.0f / 315));
  p = V::fma(p, square, V::set1(2.0f / 15));
  p = V::fma(p, square, V::set1(-1.0f / 3));
  const V near = V::fma(p * square, x, x);
  return V::select_less(size, V::set1(0.25f), near, V::copysign(far, x));
}

template <class V>
inline V silu(V x) {
  return x / (V::set1(1.0f) + exp_of(V::set1(0.0f) - x));
}

// x * Phi(x), |error of Phi| < 6e-7: (Phi(x) - 1/2) / x as a polynomial of t = 2 x^2 / 25 - 1, fitted to |x| <= 5,
// where it ends outside of 0 .. 1, so that both are reached. No exponential, no division.
template <class V>
inline V gelu(V x) {
  constexpr float kTerms[] = {0.14136384f,  -0.07029624f,   0.051520433f,  -0.04044365f,  0.031443808f,
                              -0.02326125f, 0.016392203f,   -0.011185259f, 0.0064364718f, -0.0026602237f,
                              0.001692884f, -0.0016242553f, 0.0006212672f};
  const V one = V::set1(1.0f), near = V::max(V::set1(-5.0f), V::min(V::set1(5.0f), x));
  const V t = V::fma(near * near, V::set1(0.08f), V::set1(-1.0f));
  V p = V::set1(kTerms[12]);
  for (int i = 11; i >= 0; --i) p = V::fma(p, t, V::set1(kTerms[i]));
  return x * V::max(V::set1(0.0f), V::min(one, V::fma(near, p, V::set1(0.5f))));
}

template <class V>
inline V gelu_tanh(V x) {
  const V inner = V::set1(0.79788456080286536f) * V::fma(V::set1(0.044715f) * x * x, x, x);
  return V::set1(0.5f) * x * (V::set1(1.0f) + tanh_of(inner));
}

// (up' + 1) * gate' * sigmoid(slope * gate'), gate' and up' clamped: gpt-oss.
template <class V>
inline V clamped_swiglu(V gate, V up, V slope, V limit) {
  const V one = V::set1(1.0f), zero = V::set1(0.0f);
  gate = V::min(limit, gate);
  up = V::max(zero - limit, V::min(limit, up));
  return (up + one) * gate / (one + exp_of(zero - slope * gate));
}

}  // namespace maitred
