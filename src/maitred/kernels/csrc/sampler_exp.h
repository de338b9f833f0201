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

}  // namespace maitred
