// The linear in plain C++: always there, and what the others are tested against.
#include "linear_driver.h"
#include "vec_plain.h"

namespace maitred {
namespace {

struct Plain {
  using V = Vec1;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 4; }
  static const char* product(DType dtype) {
    if (dtype == DType::bf16) return "scalar bfloat16";
    return dtype == DType::f32 || dtype == DType::f16 ? "scalar float32" : "scalar int8";
  }

  static void f32(const Block& b) {
    for (int row = 0; row < b.num_rows; ++row) {
      float* acc = static_cast<float*>(b.acc) + row * kTile;
      const float* x = reinterpret_cast<const float*>(b.rows + row * b.row_stride);
      const float* w = reinterpret_cast<const float*>(b.weights);
      if (b.first) std::memset(acc, 0, kTile * sizeof(float));
      for (int step = 0; step < b.steps; ++step, w += kTile)
        for (int lane = 0; lane < kTile; ++lane) acc[lane] += w[lane] * x[step];
    }
  }

  static void bf16(const Block& b) {
    for (int row = 0; row < b.num_rows; ++row) {
      float* acc = static_cast<float*>(b.acc) + row * kTile;
      const uint16_t* x = reinterpret_cast<const uint16_t*>(b.rows + row * b.row_stride);
      const uint16_t* w = reinterpret_cast<const uint16_t*>(b.weights);
      if (b.first) std::memset(acc, 0, kTile * sizeof(float));
      for (int step = 0; step < b.steps; ++step, w += 2 * kTile)
        for (int lane = 0; lane < kTile; ++lane) {
          acc[lane] += bf16_to_float(w[2 * lane]) * bf16_to_float(x[2 * step]);
          acc[lane] += bf16_to_float(w[2 * lane + 1]) * bf16_to_float(x[2 * step + 1]);
        }
    }
  }

  static int32_t dot4(const uint8_t* w, const int8_t* x) {
    return w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3];
  }

  static void int8(const Block& b) {
    for (int row = 0; row < b.num_rows; ++row) {
      int32_t* acc = static_cast<int32_t*>(b.acc) + row * kTile;
      const int8_t* x = reinterpret_cast<const int8_t*>(b.rows + row * b.row_stride);
      const uint8_t* w = b.weights;
      if (b.first)
        for (int lane = 0; lane < kTile; ++lane) acc[lane] = b.sums[row * b.sums_stride];
      for (int step = 0; step < b.steps; ++step, w += 4 * kTile)
        for (int lane = 0; lane < kTile; ++lane) acc[lane] += dot4(w + 4 * lane, x + 4 * step);
    }
  }

  static void f16(const Block& b) {
    for (int row = 0; row < b.num_rows; ++row) {
      float* acc = static_cast<float*>(b.acc) + row * kTile;
      const float* x = reinterpret_cast<const float*>(b.rows + row * b.row_stride);
      const uint16_t* w = reinterpret_cast<const uint16_t*>(b.weights);
      if (b.first) std::memset(acc, 0, kTile * sizeof(float));
      for (int step = 0; step < b.steps; ++step, w += kTile)
        for (int lane = 0; lane < kTile; ++lane) acc[lane] += f16_to_float(w[lane]) * x[step];
    }
  }

  // A block's sums, scaled, onto acc.
  template <DType kDType>
  static void block(const uint8_t* head, const uint8_t* w, const int8_t* x, const int32_t* row_sums, float* acc) {
    constexpr BlockForm kForm = block_form(kDType);
    constexpr int kHalves = 32 / kForm.block, kSteps = 8 / kHalves;
    const uint8_t* codes = w + (kForm.parts ? 64 : 0);
    const float scale = float_of(static_cast<uint32_t>(row_sums[0]));
    for (int lane = 0; lane < kTile; ++lane) {
      const ChannelScales scales = channel_scales(kForm, head, w, lane);
      for (int half = 0; half < kHalves; ++half) {
        int32_t sum = -kForm.offset * (kHalves == 1 ? row_sums[1] + row_sums[2] : row_sums[1 + half]);
        for (int step = half * kSteps; step < (half + 1) * kSteps; ++step)
          for (int j = 0; j < 4; ++j) sum += code_at(kForm, codes, lane, step, j) * x[4 * step + j];
        acc[lane] += static_cast<float>(sum) * (scales.d[half] * scale);
      }
      if (kForm.minimum) acc[lane] += scales.m * (scale * static_cast<float>(row_sums[1] + row_sums[2]));
    }
  }

  template <DType kDType>
  static void blocked(const Block& b) {
    constexpr BlockForm kForm = block_form(kDType);
    for (int row = 0; row < b.num_rows; ++row) {
      float* acc = static_cast<float*>(b.acc) + row * kTile;
      const int8_t* x = reinterpret_cast<const int8_t*>(b.rows + row * b.row_stride);
      const int32_t* row_sums = b.sums + row * b.sums_stride;
      const uint8_t* head = b.weights;
      if (b.first) std::memset(acc, 0, kTile * sizeof(float));
      for (int unit = 0; unit < b.steps; ++unit, head += kForm.unit_bytes())
        for (int i = 0; i < kForm.blocks(); ++i, x += 32, row_sums += kSumsPerBlock)
          block<kDType>(head, head + kForm.head_bytes() + i * kForm.block_bytes(), x, row_sums, acc);
    }
  }
};

}  // namespace

const LinearKernels kLinearPlain = linear_driver::table<Plain>();

}  // namespace maitred
