// The sampler's passes over a row in plain C++: what the other instruction sets must equal, bit for bit.
#include <cmath>
#include <cstring>
#include <limits>

#include "sampler.h"
#include "sampler_exp.h"

namespace maitred {
namespace {

// slope is sharpness * log2(e)
double weight_of(float x, double largest, double slope) {
  const double y = (static_cast<double>(x) - largest) * slope;
  if (!(y >= kLowestPower)) return 0.0;
  const double t = y + kMagic;
  const double f = y - (t - kMagic);
  const double f2 = f * f, f4 = f2 * f2, f8 = f4 * f4;
  const double low = std::fma(std::fma(kExp2Terms[3], f, kExp2Terms[2]), f2, std::fma(kExp2Terms[1], f, kExp2Terms[0]));
  const double middle =
      std::fma(std::fma(kExp2Terms[7], f, kExp2Terms[6]), f2, std::fma(kExp2Terms[5], f, kExp2Terms[4]));
  const double high =
      std::fma(std::fma(kExp2Terms[11], f, kExp2Terms[10]), f2, std::fma(kExp2Terms[9], f, kExp2Terms[8]));
  double p = std::fma(high, f8, std::fma(middle, f4, low));
  uint64_t bits, shift;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&shift, &t, sizeof shift);
  bits += shift << 52;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

bool scan(const float* x, int64_t n, float* group_max) {
  bool has_nan = false;
  for (int64_t begin = 0; begin < n; begin += kBlock, group_max += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) group_max[lane] = -std::numeric_limits<float>::infinity();
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t i = begin; i < end; ++i) {
      float& largest = group_max[(i - begin) % kLanes];
      if (x[i] > largest) largest = x[i];
      has_nan |= x[i] != x[i];
    }
  }
  return has_nan;
}

void weigh(const float* x, int64_t n, float low, double largest, double sharpness, double* block_sums) {
  for (int64_t begin = 0; begin < n; begin += kBlock, ++block_sums) {
    double sums[8] = {};
    const int64_t end = begin + kBlock < n ? begin + kBlock : n;
    for (int64_t i = begin; i < end; ++i)
      if (x[i] >= low) sums[(i - begin) % 8] += weight_of(x[i], largest, sharpness * kLog2e);
    *block_sums = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }
}

int64_t collect(const float* x, int64_t n, float low, float high, int32_t first, int32_t* ids) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i)
    if (x[i] >= low && x[i] < high) ids[count++] = first + static_cast<int32_t>(i);
  return count;
}

void weights(const float* x, int64_t n, double largest, double sharpness, double* weights) {
  for (int64_t i = 0; i < n; ++i) weights[i] = weight_of(x[i], largest, sharpness * kLog2e);
}

int64_t count_above(const float* x, int64_t n, float value) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] > value;
  return count;
}

}  // namespace

const SamplerKernels& sampler_plain() {
  static const SamplerKernels kernels{scan, weigh, collect, weights, count_above};
  return kernels;
}

}  // namespace maitred
