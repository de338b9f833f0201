// Number formats as bits: bf16 and f16 to float32 and back. Every function is static: each file has its own copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace maitred {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float float_of_halves(uint16_t upper, uint16_t lower) {
  return float_of(static_cast<uint32_t>(upper) << 16 | lower);
}

static inline float bf16_to_float(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; NaN stays NaN.
static inline uint16_t float_to_bf16(float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

// Exact. Subnormals and infinities by the magic of a multiplication and a comparison, so that a loop vectorises.
static inline float f16_to_float(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
  const uint32_t scaled = bits_of(float_of(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x0f800000u ? special : scaled));
}

// Round to nearest even; beyond the largest it is infinite, NaN stays NaN.
static inline uint16_t float_to_f16(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u)  // subnormal: the addition rounds at 2^-24
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// FP8 of 4 exponent bits (E4M3: bias 7, no infinities) as bf16, which has all its values. Loops over it vectorise.
static inline uint16_t f8_to_bf16(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu;
  const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f) >> 16;
  return static_cast<uint16_t>((x & 0x80u) << 8 | (magnitude < 8 ? subnormal : (magnitude << 4) + 0x3c00u));
}

}  // namespace maitred
