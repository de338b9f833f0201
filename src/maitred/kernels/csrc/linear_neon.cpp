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

// Signed codes (8 bits: less 128) of 4 channels x 4 values; `v` (0 .. 7) says which channels.
template <int kBits>
inline int8x16_t block_codes(const uint8_t* codes, int step, int v) {
  if (kBits == 8) return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + 128 * step + 16 * v), vdupq_n_u8(0x80)));
  const uint8x16_t both = vld1q_u8(codes + 64 * step + 16 * (v % 4));
  uint8x16_t found = v < 4 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4);
  if (kBits == 5) {
    static const uint8_t kOwn[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8_t* bits = codes + 512 + 16 * step + 2 * v;
    const uint8x16_t bytes = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    found = vorrq_u8(found, vandq_u8(vtstq_u8(bytes, vld1q_u8(kOwn)), vdupq_n_u8(16)));
  }
  if (kBits == 6) {
    const uint8x16_t two = vld1q_u8(codes + 512 + 64 * (step / 2) + 16 * (v % 4));
    const int8_t shift = static_cast<int8_t>(4 - (4 * (step % 2) + 2 * (v / 4)));
    found = vorrq_u8(found, vandq_u8(vshlq_u8(two, vdupq_n_s8(shift)), vdupq_n_u8(0x30)));
  }
  return vreinterpretq_s8_u8(found);
}

inline float32x4_t load_f16(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(p))));
}

// f32 whose upper halves lie apart from the lower ones.
inline float32x4_t load_halves(const uint8_t* upper, const uint8_t* lower) {
  const uint32x4_t high = vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(upper)), 16);
  return vreinterpretq_f32_u32(vaddw_u16(high, vld1_u16(reinterpret_cast<const uint16_t*>(lower))));
}

inline float32x4_t widen_part(const uint8_t* p, bool is_signed) {
  float values[4];
  for (int i = 0; i < 4; ++i)
    values[i] = is_signed ? static_cast<float>(static_cast<int8_t>(p[i])) : static_cast<float>(p[i]);
  return vld1q_f32(values);
}

template <DType kDType>
inline void multiply_block(const uint8_t* head, const uint8_t* w, const uint8_t* x, const int32_t* row_sums,
                           float* sums) {
  constexpr BlockForm kForm = block_form(kDType);
  constexpr int kHalves = 32 / kForm.block, kSteps = 8 / kHalves;
  constexpr int kOffset = kForm.bits == 8 ? 0 : kForm.offset;
  const uint8_t* codes = w + (kForm.parts ? 64 : 0);
  const float scale = float_of(static_cast<uint32_t>(row_sums[0]));
  for (int v = 0; v < kVectors; ++v) {
    const float32x4_t d = kForm.wide ? load_halves(head + 8 * v, head + 64 + 8 * v) : load_f16(head + 8 * v);
    float32x4_t y = vld1q_f32(sums + 4 * v);
    for (int half = 0; half < kHalves; ++half) {
      int32x4_t acc = vdupq_n_s32(-kOffset * (kHalves == 1 ? row_sums[1] + row_sums[2] : row_sums[1 + half]));
      for (int step = half * kSteps; step < (half + 1) * kSteps; ++step) {
        const int8x16_t q = block_codes<kForm.bits>(codes, step, v), four = vreinterpretq_s8_u8(word(x + 4 * step));
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(four)));
        acc = vaddq_s32(acc, vpaddq_s32(low, vpaddlq_s16(vmull_high_s8(q, four))));
      }
      float32x4_t part = d;
      if (kForm.parts) part = vmulq_f32(d, widen_part(w + (kForm.minimum ? 0 : 32 * half) + 4 * v, !kForm.minimum));
      y = vfmaq_f32(y, vcvtq_f32_s32(acc), vmulq_n_f32(part, scale));
    }
    if (kForm.minimum) {
      float32x4_t m = load_f16(head + 64 + 8 * v);
      if (kForm.zero) m = vmulq_f32(d, vsubq_f32(vdupq_n_f32(static_cast<float>(kForm.offset)), m));
      if (kForm.parts) m = vnegq_f32(vmulq_f32(m, widen_part(w + 32 + 4 * v, false)));
      y = vfmaq_f32(y, m, vdupq_n_f32(scale * static_cast<float>(row_sums[1] + row_sums[2])));
    }
    vst1q_f32(sums + 4 * v, y);
  }
}

template <DType kDType>
void multiply_blocks(const Block& b) {
  constexpr BlockForm kForm = block_form(kDType);
  for (int r = 0; r < b.num_rows; ++r) {
    float* sums = static_cast<float*>(b.acc) + r * kTile;
    const uint8_t *x = b.rows + r * b.row_stride, *head = b.weights;
    const int32_t* row_sums = b.sums + r * b.sums_stride;
    if (b.first) std::memset(sums, 0, kTile * sizeof(float));
    for (int unit = 0; unit < b.steps; ++unit, head += kForm.unit_bytes())
      for (int i = 0; i < kForm.blocks(); ++i, x += 32, row_sums += kSumsPerBlock)
        multiply_block<kDType>(head, head + kForm.head_bytes() + i * kForm.block_bytes(), x, row_sums, sums);
  }
}

void multiply_f16(const Block& b) {
  for (int r = 0; r < b.num_rows; ++r) {
    float* sums = static_cast<float*>(b.acc) + r * kTile;
    const float* x = reinterpret_cast<const float*>(b.rows + r * b.row_stride);
    if (b.first) std::memset(sums, 0, kTile * sizeof(float));
    for (int v = 0; v < kVectors; ++v) {
      float32x4_t acc = vld1q_f32(sums + 4 * v);
      const uint8_t* w = b.weights + 8 * v;
      for (int step = 0; step < b.steps; ++step, w += 64) acc = vfmaq_n_f32(acc, load_f16(w), x[step]);
      vst1q_f32(sums + 4 * v, acc);
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
    const bool floats = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
    return floats ? "fmla v4s" : "smull v8h";
  }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void f16(const Block& b) { multiply_f16(b); }
  template <DType kDType>
  static void blocked(const Block& b) {
    multiply_blocks<kDType>(b);
  }
};

}  // namespace

const LinearKernels kLinearNeon = linear_driver::table<Neon>();

}  // namespace maitred
