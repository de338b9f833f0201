// The linear with NEON as every 64-bit Arm has it: widened products, no dot-product or bf16 extensions.
#include "linear_driver.h"
#include "vec_neon.h"

namespace maitred {
namespace {

constexpr int kVectors = kTile / 4;

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
    explicit Values(uint8x16_t bits) : even(even_of(bits)), odd(odd_of(bits)) {}
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
        const typename Op::Values row(word(x + r * b.row_stride));
        acc[r][v] = Op::dot(acc[r][v], weights, row);
      }
    }
  }
#pragma GCC unroll 24
  for (int i = 0; i < R * kVectors; ++i) Op::put(sums + 4 * i, acc[i / kVectors][i % kVectors]);
}

// Eight steps of K for four channels: products of at most 15 * 128 are added up in 16 bits (8 of them fit), then
// widened.
inline int32x4_t multiply_eight(const uint8_t* w, const uint8_t* x, bool high) {
  int16x8_t first = vdupq_n_s16(0), second = first;
  for (int step = 0; step < 8; ++step, w += 64, x += 4) {
    const uint8x16_t both = vld1q_u8(w);
    const uint8x16_t codes = high ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    const int8x16_t row = vreinterpretq_s8_u8(word(x));
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
        vst1q_f32(sums + 4 * v, vfmaq_f32(before, value, load_bf16(w + 8 * v)));
      }
    }
  }
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>, &multiply_rows<Op, 2>, &multiply_rows<Op, 3>};

struct Neon {
  using V = Vec4;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 3; }
  static const char* product(DType dtype) {
    const char* names[] = {"fmla v4s", "fmla v4s", "smull v8h", "smlal v8h"};
    return names[static_cast<int>(dtype)];
  }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void int4(const Block& b) { multiply_int4(b); }
};

}  // namespace

const LinearKernels kLinearNeon = linear_driver::table<Neon>();

}  // namespace maitred
