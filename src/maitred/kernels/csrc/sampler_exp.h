// exp((x - largest) * sharpness) in double precision, the same steps on every instruction set:
//   y = (x - largest) * (sharpness * 16 log2(e)); t = y + magic; f = y - (t - magic), at most 1/2 either way;
//   n = what t's last bits hold; s = 2^(n / 16), a table's entry for n mod 16 with n / 16 added to its exponent;
//   s + s * (f * q), where 1 + f * q is 2^(f / 16): a polynomial that errs by 5.7e-15 at most and not at all for f = 0.
// The relative error is at most 1e-14 and a little more with each power of ten below 1; that of the largest is none.
#pragma once

#include <cstdint>

namespace maitred {

constexpr double kLowestPower = -1021.0 * 16;  // of the 16th root of two; a weight that is smaller is 0
constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
constexpr double k16Log2e = 23.083120654223414;
constexpr int kExponentShift = 48;  // from n to 16ths of the exponent's last bit
// Nearest to 2^(f / 16) in the sense that its error's extremes are equal, among those that are 1 and level with it at
// 0.
constexpr double kRootTerms[5] = {0.04332169878499658, 0.000938384792561791, 1.3550807777967609e-05,
                                  1.4676419902231462e-07, 1.2716069731854982e-09};
// The bits of 2^(i / 16), less i << kExponentShift, for adding n << kExponentShift adds it again.
alignas(64) constexpr int64_t kRoots[16] = {
    0x3ff0000000000000, 0x3fefb5586cf9890f, 0x3fef72b83c7d517b, 0x3fef387a6e756238,
    0x3fef06fe0a31b715, 0x3feedea64c123422, 0x3feebfdad5362a27, 0x3feeab07dd485429,
    0x3feea09e667f3bcd, 0x3feea11473eb0187, 0x3feeace5422aa0db, 0x3feec49182a3f090,
    0x3feee89f995ad3ad, 0x3fef199bdd85529c, 0x3fef5818dcfba487, 0x3fefa4afa2a490da};

// The same in single precision: y = x * slope, n the integer nearest to y less that nearest to the largest's, eight
// roots and a polynomial for 2^(f / 8) that errs by 2.9e-8. So the largest does not weigh 1: sums are to be multiplied
// by `unit`. The slope is a sum of two floats, and no product is rounded before n is taken from it. A weight errs by at
// most 2.7 * 2^-24 of itself (1 the root, 1 the last step, 0.5 the polynomial), a sum by 3 * 2^-24 more, for 8 weights
// are added in single precision by twos before they go on in double precision.
constexpr double kRoughError = 3.5e-7;
constexpr double k8Log2e = 11.541560327111707;
constexpr double kRoughRange = 1 << 16;     // of y, either way
constexpr double kRoughDepth = 80.0;        // in natural logarithms; what is lower weighs as if it lay there
constexpr float kRoughMagic = 12582912.0F;  // 1.5 * 2^23
constexpr int kRoughShift = 20;             // from n to eighths of the exponent's last bit
constexpr float kRoughTerms[3] = {0.0866434053F, 0.00375404512F, 0.000108390428F};
// As kRoots, twice.
alignas(64) constexpr int32_t kRoughRoots[16] = {0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7, 0x3f7504f3, 0x3f75672a,
                                                 0x3f7744fd, 0x3f7ac0c7, 0x3f800000, 0x3f7b95c2, 0x3f7837f0, 0x3f75fed7,
                                                 0x3f7504f3, 0x3f75672a, 0x3f7744fd, 0x3f7ac0c7};

// Eight sums as one, in one order for all instruction sets.
static inline double sum_of_eight(const double* s) {
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

struct RoughSlope {
  float high, low, magic, lowest;
  double unit;

  RoughSlope(double largest, double sharpness) {
    const double slope = sharpness * k8Log2e, top = largest * slope, nearest = __builtin_rint(top);
    high = static_cast<float>(slope);
    low = static_cast<float>(slope - static_cast<double>(high));
    magic = kRoughMagic - static_cast<float>(nearest);
    lowest = static_cast<float>(largest - kRoughDepth / sharpness);
    unit = __builtin_exp2((nearest - top) / 8.0);
  }
};

}  // namespace maitred
