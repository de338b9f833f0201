// Attention with NEON: fused multiply-adds for float32 and bf16, 16-bit products for int8.
#include "attention_lanes.h"
#include "vec_neon.h"

namespace maitred {
namespace {

struct Neon {
  using V = Vec4;

  // A vector's 16 bytes as 16-bit numbers: four words of four.
  struct Bytes {
    int16x8_t first, second;
  };
  static Bytes as_unsigned(uint8x16_t x) {
    return {vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(x))), vreinterpretq_s16_u16(vmovl_u8(vget_high_u8(x)))};
  }
  static Bytes as_signed(uint8x16_t x) {
    const int8x16_t s = vreinterpretq_s8_u8(x);
    return {vmovl_s8(vget_low_s8(s)), vmovl_s8(vget_high_s8(s))};
  }
  static Bytes signed_word(const uint8_t* p) { return as_signed(word(p)); }
  static Bytes unsigned_word(const uint8_t* p) { return as_unsigned(word(p)); }
  static Bytes signed_words(const uint8_t* p) { return as_signed(vld1q_u8(p)); }
  static Bytes unsigned_words(const uint8_t* p) { return as_unsigned(vld1q_u8(p)); }

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
};

}  // namespace

const AttentionKernels& attention_kernels_neon() { return AttentionLanes<Neon>::kKernels; }

}  // namespace maitred
