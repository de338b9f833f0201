// The linear with NEON as every 64-bit Arm has it: widened products, no dot-product or bf16 extensions.
#include <arm_neon.h>

#include "linear_driver.h"

namespace maitred {
namespace {

struct V4 {
  static constexpr int width = 4;
  float32x4_t v;
  static V4 load(const float* from) { return {vld1q_f32(from)}; }
  static V4 load_part(const float* from, int n) {
    float values[4] = {};
    for (int i = 0; i < n; ++i) values[i] = from[i];
    return load(values);
  }
  static void store(float* to, V4 a) { vst1q_f32(to, a.v); }
  static void store_part(float* to, V4 a, int n) {
    float values[4];
    store(values, a);
    for (int i = 0; i < n; ++i) to[i] = values[i];
  }
  static V4 set1(float x) { return {vdupq_n_f32(x)}; }
  static V4 fma(V4 a, V4 b, V4 c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static V4 min(V4 a, V4 b) { return {vminq_f32(a.v, b.v)}; }
  static V4 max(V4 a, V4 b) { return {vmaxq_f32(a.v, b.v)}; }
  static V4 abs(V4 a) { return {vabsq_f32(a.v)}; }
  static V4 round_even(V4 a) { return {vrndnq_f32(a.v)}; }
  static V4 select_less(V4 a, V4 b, V4 x, V4 y) { return {vbslq_f32(vcltq_f32(a.v, b.v), x.v, y.v)}; }
  static V4 copysign(V4 a, V4 sign) { return {vbslq_f32(vdupq_n_u32(0x80000000u), sign.v, a.v)}; }
  static V4 pow2(V4 n) {
    return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
  }
  static V4 max_bits(V4 a, V4 b) {
    return {vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(a.v), vreinterpretq_s32_f32(b.v)))};
  }
  static float largest_bits(V4 a) { return float_of(static_cast<uint32_t>(vmaxvq_s32(vreinterpretq_s32_f32(a.v)))); }
  static float sum(V4 a) { return vaddvq_f32(a.v); }
  static float root(float x) { return __builtin_sqrtf(x); }
  friend V4 operator+(V4 a, V4 b) { return {vaddq_f32(a.v, b.v)}; }
  friend V4 operator-(V4 a, V4 b) { return {vsubq_f32(a.v, b.v)}; }
  friend V4 operator*(V4 a, V4 b) { return {vmulq_f32(a.v, b.v)}; }
  friend V4 operator/(V4 a, V4 b) { return {vdivq_f32(a.v, b.v)}; }
};

constexpr int kVectors = kTile / 4;

inline uint32_t four(const uint8_t* from) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  return bits;
}

struct F32 {
  using Acc = float32x4_t;
  static Acc zero() { return vdupq_n_f32(0.0f); }
  static Acc get(const float* from) { return vld1q_f32(from); }
  static void put(float* to, Acc a) { vst1q_f32(to, a); }
  struct Values {
    float32x4_t one;
    explicit Values(uint8x16_t bits) : one(vreinterpretq_f32_u8(bits)) {}
  };
  static Acc dot(Acc acc, const Values& w, const Values& x) { return vfmaq_f32(acc, w.one, x.one); }
};

struct Bf16 : F32 {
  struct Values {  // the even values of the pairs, and the odd ones, as float32
    float32x4_t even, odd;
    explicit Values(uint8x16_t bits)
        : even(vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(bits), 16))),
          odd(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(bits), vdupq_n_u32(0xffff0000u)))) {}
  };
  static Acc dot(Acc acc, const Values& w, const Values& x) {
    return vfmaq_f32(vfmaq_f32(acc, w.even, x.even), w.odd, x.odd);
  }
};

// Signed products need no correction: sums start from zero.
struct Int8 {
  using Acc = int32x4_t;
  static Acc zero() { return vdupq_n_s32(0); }
  static Acc get(const float* from) { return vld1q_s32(reinterpret_cast<const int32_t*>(from)); }
  static void put(float* to, Acc a) { vst1q_s32(reinterpret_cast<int32_t*>(to), a); }
  struct Values {
    int8x16_t q;
    explicit Values(uint8x16_t bits) : q(vreinterpretq_s8_u8(bits)) {}
  };
  static Acc dot(Acc acc, const Values& w, const Values& x) {
    const int8x16_t q = veorq_s8(w.q, vdupq_n_s8(static_cast<int8_t>(0x80)));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(x.q)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(q, x.q));
    return vaddq_s32(acc, vpaddq_s32(low, high));
  }
};

template <class Op, int R>
void multiply_rows(const Block& b) {
  typename Op::Acc acc[R][kVectors];
  float* sums = static_cast<float*>(b.acc);
#pragma GCC unroll 24
  for (int i = 0; i < R * kVectors; ++i) acc[i / kVectors][i % kVectors] = b.first ? Op::zero() : Op::get(sums + 4 * i);
  const uint8_t* w = b.weights;
  const uint8_t* x = b.rows;
  for (int step = 0; step < b.steps; ++step, w += 128, x += 4) {
    __builtin_prefetch(b.next + static_cast<int64_t>(b.next_bytes) * step);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const typename Op::Values weights(vld1q_u8(w + 16 * v));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename Op::Values row(vreinterpretq_u8_u32(vdupq_n_u32(four(x + r * b.row_stride))));
        acc[r][v] = Op::dot(acc[r][v], weights, row);
      }
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < R * kVectors; ++i) Op::put(sums + 4 * i, acc[i / kVectors][i % kVectors]);
}

inline float32x4_t bf16x4(const uint8_t* from) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(from)), 16));
}

// Eight steps of K for four channels: products of at most 15 * 128 are added up in 16 bits (8 of them fit), then
// widened.
inline int32x4_t multiply_eight(const uint8_t* w, const uint8_t* x, bool high) {
  int16x8_t first = vdupq_n_s16(0), second = first;
  for (int step = 0; step < 8; ++step, w += 64, x += 4) {
    const uint8x16_t both = vld1q_u8(w);
    const uint8x16_t codes = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    const int8x16_t row = vreinterpretq_s8_u32(vdupq_n_u32(four(x)));
    first = vmlal_s8(first, vget_low_s8(vreinterpretq_s8_u8(codes)), vget_low_s8(row));
    second = vmlal_high_s8(second, vreinterpretq_s8_u8(codes), row);
  }
  return vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second));
}

void multiply_int4(const Block& b) {
  const int64_t bytes = 64 + b.group * 16;
  for (int r = 0; r < b.num_rows; ++r) {
    float* sums = static_cast<float*>(b.acc) + r * kTile;
    const uint8_t* x = b.rows + r * b.row_stride;
    for (int g = 0; g < b.steps; ++g, x += b.group) {
      const uint8_t* w = b.weights + g * bytes;
      for (int v = 0; v < kVectors; ++v) {
        int32x4_t acc = vdupq_n_s32(b.sums[r * b.sums_stride + 2 * g]);
        for (int i = 0; i < b.group; i += 32)
          acc = vaddq_s32(acc, multiply_eight(w + 64 + i * 16 + v % 4 * 16, x + i, v >= 4));
        const float32x4_t before = b.first && g == 0 ? vdupq_n_f32(0.0f) : vld1q_f32(sums + 4 * v);
        const float32x4_t base = vreinterpretq_f32_s32(vdupq_n_s32(b.sums[r * b.sums_stride + 2 * g + 1]));
        const float32x4_t value = vsubq_f32(vreinterpretq_f32_s32(acc), base);
        vst1q_f32(sums + 4 * v, vfmaq_f32(before, value, bf16x4(w + 8 * v)));
      }
    }
  }
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>, &multiply_rows<Op, 2>, &multiply_rows<Op, 3>};

struct Neon {
  using V = V4;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 3; }
  static const char* product(DType dtype) {
    const char* names[] = {"fmla v4s", "fmla v4s", "smull v8h", "smlal v8h"};
    return names[static_cast<int>(dtype)];
  }

  static V4 from_int32(const int32_t* from) { return {vcvtq_f32_s32(vld1q_s32(from))}; }
  static void store_bf16(uint16_t* to, V4 a) {
    for (int i = 0; i < 4; ++i) to[i] = float_to_bf16(a.v[i]);
  }
  static void store_int8(int8_t* to, V4 a) {
    const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(a.v));
    const int8x8_t q = vqmovn_s16(vcombine_s16(words, words));
    const int32_t bits = vget_lane_s32(vreinterpret_s32_s8(q), 0);
    std::memcpy(to, &bits, 4);
  }
  static int32_t sum_int8(const int8_t* from, int n) {  // n a multiple of 32
    int32_t sum = 0;
    for (int i = 0; i < n; i += 16) sum += vaddlvq_s8(vld1q_s8(from + i));
    return sum;
  }

  static void prefetch_to_write(const float* line) { __builtin_prefetch(line, 1); }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void int4(const Block& b) { multiply_int4(b); }
};

}  // namespace

const LinearKernels kLinearNeon = linear_driver::table<Neon>();

}  // namespace maitred
