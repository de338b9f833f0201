// exp((x - largest) * sharpness) in double precision, the same steps on every instruction set:
//   y = (x - largest) * (sharpness * log2(e)); t = y + magic; f = y - (t - magic), at most 1/2 either way;
//   p = 2^f, its series to f^11 added up in pairs, fours and eights (half the latency of Horner's way);
//   p * 2^n, where n is what t's last bits hold.
// The relative error is at most 1e-14 and a little more with each power of ten below 1; that of the largest is none.
#pragma once

namespace maitred {

constexpr double kLowestPower = -1021.0;       // of two; a weight that is smaller is 0
constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
constexpr double kLog2e = 1.4426950408889634;
constexpr double kExp2Terms[12] = {1.0,
                                   0.6931471805599453,
                                   0.24022650695910072,
                                   0.05550410866482158,
                                   0.009618129107628477,
                                   0.0013333558146428443,
                                   0.0001540353039338161,
                                   1.5252733804059841e-05,
                                   1.321548679014431e-06,
                                   1.01780860092397e-07,
                                   7.054911620801123e-09,
                                   4.4455382718708116e-10};  // ln(2)^k / k!

}  // namespace maitred
