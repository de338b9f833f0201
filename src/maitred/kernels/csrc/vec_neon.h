// NEON's vectors: 4 floats as vector_math.h has them, and what kernels that spell out instructions share. For
// *_neon.cpp alone, each of which has its own copy.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

#include "bits.h"

namespace maitred {
namespace {

// The same 4 bytes in every lane.
inline uint8x16_t word(const void* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return vreinterpretq_u8_u32(vdupq_n_u32(bits));
}

// bf16: the even and the odd values of pairs, and 4 that lie side by side.
inline float32x4_t even_of(uint8x16_t pairs) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(pairs), 16));
}
inline float32x4_t odd_of(uint8x16_t pairs) {
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(pairs), vdupq_n_u32(0xffff0000u)));
}
inline float32x4_t load_bf16(const uint8_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

struct Vec4 {
  static constexpr int width = 4;
  float32x4_t v;
  static Vec4 load(const float* from) { return {vld1q_f32(from)}; }
  static Vec4 from_bf16(const uint16_t* from) { return {load_bf16(reinterpret_cast<const uint8_t*>(from))}; }
  static Vec4 load_part(const float* from, int n) {
    float values[4] = {};
    for (int i = 0; i < n; ++i) values[i] = from[i];
    return load(values);
  }
  static Vec4 load_even(const uint8_t* pairs) { return {even_of(vld1q_u8(pairs))}; }
  static Vec4 load_odd(const uint8_t* pairs) { return {odd_of(vld1q_u8(pairs))}; }
  static void store(float* to, Vec4 a) { vst1q_f32(to, a.v); }
  static void store_part(float* to, Vec4 a, int n) {
    float values[4];
    store(values, a);
    for (int i = 0; i < n; ++i) to[i] = values[i];
  }
  static Vec4 set1(float x) { return {vdupq_n_f32(x)}; }
  static Vec4 fma(Vec4 a, Vec4 b, Vec4 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static Vec4 min(Vec4 a, Vec4 b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }  // vminq would keep any NaN
  static Vec4 max(Vec4 a, Vec4 b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
  static Vec4 abs(Vec4 a) { return {vabsq_f32(a.v)}; }
  static Vec4 round_even(Vec4 a) { return {vrndnq_f32(a.v)}; }
  static Vec4 select_less(Vec4 a, Vec4 b, Vec4 x, Vec4 y) { return {vbslq_f32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
  static Vec4 copysign(Vec4 a, Vec4 sign) { return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, a.v)}; }
  static Vec4 pow2(Vec4 n) {
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
  }
  static Vec4 max_bits(Vec4 a, Vec4 b) {
    return {vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.v), vreinterpretq_s32_f32(b.v)))};
  }
  static float largest_bits(Vec4 a) { return float_of(static_cast<uint32_t>(vmaxvq_s32(vreinterpretq_s32_f32(a.v)))); }
  static float sum(Vec4 a) { return vaddvq_f32(a.v); }
  static float root(float x) { return __builtin_sqrtf(x); }
  friend Vec4 operator+(Vec4 a, Vec4 b) { return {vaddq_f32(a.v, b.v)}; }
  friend Vec4 operator-(Vec4 a, Vec4 b) { return {vsubq_f32(a.v, b.v)}; }
  friend Vec4 operator*(Vec4 a, Vec4 b) { return {vmulq_f32(a.v, b.v)}; }
  friend Vec4 operator/(Vec4 a, Vec4 b) { return {vdivq_f32(a.v, b.v)}; }

  static Vec4 from_int32(const int32_t* from) { return {vcvtq_f32_s32(vld1q_s32(from))}; }
  static void widen_f8(const uint8_t* from, int n, uint16_t* to) {
    for (int i = 0; i < n; ++i) to[i] = f8_to_bf16(from[i]);
  }
  static void store_bf16(uint16_t* to, Vec4 a) {
    for (int i = 0; i < 4; ++i) to[i] = float_to_bf16(a.v[i]);
  }
  static void store_int8(int8_t* to, Vec4 a) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(a.v));
    const int8x8_t q = vqmovn_s16(vcombine_s16(words, words));
    const int32_t bits = vget_lane_s32(vreinterpret_s32_s8(q), 0);
    __builtin_memcpy(to, &bits, 4);
  }
  static int32_t sum_int8(const int8_t* from, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i += 16) sum += vaddlvq_s8(vld1q_s8(from + i));
    return sum;
  }
  static void prefetch_to_write(const float* line) { __builtin_prefetch(line, 1); }
};

}  // namespace
}  // namespace maitred
