// Rotations by Hadamard matrices before numbers are rounded to int8: a block's huge value becomes 64 middling ones, so
// that the scale which all share is not spoilt by it (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). What a rotated
// row is multiplied with is rotated alike, which leaves the product as it is: (H x).(H y) = block * x.y.
//
// In the compiler's own vectors, as wide as the file's instruction set has them. Sums and differences are of the same
// two values in the same order at every width, so all give the same bits. Every function is static: each file has its
// own copy.
#pragma once

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include <cstring>
#include <utility>

namespace maitred {

// Values that are rotated together: the largest power of two, up to 64, that divides n. Of an odd n nothing is rotated.
static constexpr int rotation_block(int n) { return (n & -n) < 64 ? n & -n : 64; }

namespace rotation {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int Ints __attribute__((vector_size(4 * kWidth)));
using Lanes = std::make_integer_sequence<int, kWidth>;

static inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// other + x in lanes whose sign is 1, other - x where it is -1.
static inline Floats add_signed(Floats other, Floats x, Floats sign) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, sign, other);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(x, sign, other);
#else
  return other + x * sign;
#endif
}

// Lanes i and i + kStride become their sum and their difference.
template <int kStride, int... kLane>
static inline Floats within(Floats x, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  const Floats other = __builtin_shufflevector(x, x, (kLane ^ kStride)...);
#else
  const Floats other = __builtin_shuffle(x, Ints{(kLane ^ kStride)...});
#endif
  return add_signed(other, x, Floats{((kLane & kStride) != 0 ? -1.0f : 1.0f)...});
}

template <int kBlock>
static inline Floats within_block(Floats x) {
  if constexpr (kBlock > 1) x = within<1>(x, Lanes());
  if constexpr (kBlock > 2) x = within<2>(x, Lanes());
  if constexpr (kBlock > 4 && kWidth > 4) x = within<4>(x, Lanes());
  if constexpr (kBlock > 8 && kWidth > 8) x = within<8>(x, Lanes());
  return x;
}

// One block, or as many as a vector holds.
template <int kBlock>
static inline void rotate_block(float* x) {
  constexpr int kVectors = kBlock > kWidth ? kBlock / kWidth : 1;
  Floats values[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i) values[i] = within_block<kBlock>(load(x + i * kWidth));
#pragma GCC unroll 4
  for (int stride = 1; stride < kVectors; stride *= 2)
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
      if ((i & stride) == 0) {
        const Floats low = values[i], high = values[i + stride];
        values[i] = low + high;
        values[i + stride] = low - high;
      }
  std::memcpy(x, values, sizeof values);
}

template <int kBlock>
static inline void rotate_blocks(float* x, int n) {
  constexpr int kStep = kBlock > kWidth ? kBlock : kWidth;
  int i = 0;
  for (; i + kStep <= n; i += kStep) rotate_block<kBlock>(x + i);
  for (; i < n; i += kBlock)  // less than a vector
    for (int stride = 1; stride < kBlock; stride *= 2)
      for (int j = i; j < i + kBlock; ++j)
        if (((j - i) & stride) == 0) {
          const float low = x[j], high = x[j + stride];
          x[j] = low + high;
          x[j + stride] = low - high;
        }
}

}  // namespace rotation

// x = H x in each block of rotation_block(n) values, H of 1 and -1: twice gives block * x.
static inline void rotate(float* x, int n) {
  switch (rotation_block(n)) {
    case 64:
      return rotation::rotate_blocks<64>(x, n);
    case 32:
      return rotation::rotate_blocks<32>(x, n);
    case 16:
      return rotation::rotate_blocks<16>(x, n);
    case 8:
      return rotation::rotate_blocks<8>(x, n);
    case 4:
      return rotation::rotate_blocks<4>(x, n);
    case 2:
      return rotation::rotate_blocks<2>(x, n);
  }
}

}  // namespace maitred
