// Attention with NEON: fused multiply-adds for float32 and bf16, 16-bit products for int8.
#include <arm_neon.h>
#include <stdint.h>

#include "attention.h"
#include "bits.h"

namespace maitred {
namespace {

struct V {
  static constexpr int width = 4;
  float32x4_t v;
  static uint32x4_t bits(const uint8_t* words) { return vreinterpretq_u32_u8(vld1q_u8(words)); }
  static V load(const float* from) { return {vld1q_f32(from)}; }
  static void store(float* to, V a) { vst1q_f32(to, a.v); }
  static V set1(float x) { return {vdupq_n_f32(x)}; }
  static V low(const uint8_t* words) { return {vreinterpretq_f32_u32(vshlq_n_u32(bits(words), 16))}; }
  static V high(const uint8_t* words) {
    return {vreinterpretq_f32_u32(vandq_u32(bits(words), vdupq_n_u32(0xffff0000u)))};
  }
  static V fma(V a, V b, V c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static V min(V a, V b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }  // as on x86: b where either is NaN
  static V max(V a, V b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
  static V round_even(V a) { return {vrndnq_f32(a.v)}; }
  static V pow2(V n) {
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
  }
  friend V operator+(V a, V b) { return {vaddq_f32(a.v, b.v)}; }
  friend V operator-(V a, V b) { return {vsubq_f32(a.v, b.v)}; }
  friend V operator*(V a, V b) { return {vmulq_f32(a.v, b.v)}; }
  friend V operator/(V a, V b) { return {vdivq_f32(a.v, b.v)}; }
};

// A vector's 16 bytes as 16-bit numbers: four words of four.
struct Bytes {
  int16x8_t first, second;
};
inline uint8x16_t word(const uint8_t* p) {
  uint32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return vreinterpretq_u8_u32(vdupq_n_u32(bits));
}
inline Bytes as_unsigned(uint8x16_t x) {
  return {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(x)))};
}
inline Bytes as_signed(uint8x16_t x) {
  const int8x16_t s = vreinterpretq_s8_u8(x);
  return {vmovl_s8(vget_low_s8(s)), vmovl_s8(vget_high_s8(s))};
}
inline Bytes signed_word(const uint8_t* p) { return as_signed(word(p)); }
inline Bytes unsigned_word(const uint8_t* p) { return as_unsigned(word(p)); }
inline Bytes signed_words(const uint8_t* p) { return as_signed(vld1q_u8(p)); }
inline Bytes unsigned_words(const uint8_t* p) { return as_unsigned(vld1q_u8(p)); }

struct Sums {
  int32x4_t v = vdupq_n_s32(0);
  void add(const Bytes& a, const Bytes& b) {
    const int32x4_t w0 = vmull_s16(vget_low_s16(a.first), vget_low_s16(b.first));
    const int32x4_t w1 = vmull_s16(vget_high_s16(a.first), vget_high_s16(b.first));
    const int32x4_t w2 = vmull_s16(vget_low_s16(a.second), vget_low_s16(b.second));
    const int32x4_t w3 = vmull_s16(vget_high_s16(a.second), vget_high_s16(b.second));
    v = vaddq_s32(v, vpaddq_s32(vpaddq_s32(w0, w1), vpaddq_s32(w2, w3)));
  }
  V minus(int32_t bias) const { return {vcvtq_f32_s32(vsubq_s32(v, vdupq_n_s32(bias)))}; }
  V joined(const Sums& low) const { return {vcvtq_f32_s32(vaddq_s32(vshlq_n_s32(v, 8), low.v))}; }
};

#include "attention_lanes.inc"

}  // namespace

const AttentionKernels& attention_kernels_neon() { return kKernels; }

}  // namespace maitred
