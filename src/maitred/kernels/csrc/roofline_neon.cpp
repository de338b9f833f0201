// Peaks of NEON: 16 independent chains in registers, and 16-byte loads. bf16 is carried out as float32.
#include <arm_neon.h>

#include "roofline.h"

namespace maitred {
namespace {

constexpr int kChains = 16;

uint64_t read(const uint8_t* from, int64_t bytes) {
  uint8x16_t a = vdupq_n_u8(0), b = a, c = a, d = a;
  for (int64_t at = 0; at < bytes; at += 64) {
    a = veorq_u8(a, vld1q_u8(from + at));
    b = veorq_u8(b, vld1q_u8(from + at + 16));
    c = veorq_u8(c, vld1q_u8(from + at + 32));
    d = veorq_u8(d, vld1q_u8(from + at + 48));
  }
  return vaddvq_u64(vreinterpretq_u64_u8(veorq_u8(veorq_u8(a, b), veorq_u8(c, d))));
}

int64_t work_f32(int64_t rounds, uint64_t* sink) {
  float32x4_t acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = vdupq_n_f32(0.0f);
  const float32x4_t half = vdupq_n_f32(0.5f);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = vfmaq_f32(half, acc[i], half);
  }
  for (int i = 0; i < kChains; ++i) *sink += static_cast<uint64_t>(static_cast<int64_t>(vaddvq_f32(acc[i])));
  return rounds * kChains * 4 * 2;
}

int64_t work_int8(int64_t rounds, uint64_t* sink) {
  int16x8_t acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = vdupq_n_s16(static_cast<int16_t>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) acc[i] = vmlal_s8(acc[i], vmovn_s16(acc[i]), vdup_n_s8(3));
  }
  for (int i = 0; i < kChains; ++i) *sink += static_cast<uint64_t>(vaddlvq_s16(acc[i]));
  return rounds * kChains * 8 * 2;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  return dtype == DType::f32 || dtype == DType::bf16 ? work_f32(rounds, sink) : work_int8(rounds, sink);
}

}  // namespace

const RooflineKernels kRooflineNeon{&read, &work};

}  // namespace maitred
