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
    const char* names[] = {"scalar float32", "scalar bfloat16", "scalar int8", "scalar int8"};
    return names[static_cast<int>(dtype)];
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

  // One group's sums, scaled, onto acc.
  static void group(const uint8_t* w, const int8_t* x, const int32_t* start, int size, float* acc) {
    constexpr int kHalf = kTile / 2;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(w);
    w += kTile * sizeof(uint16_t);
    int32_t sums[kTile];
    for (int lane = 0; lane < kTile; ++lane) sums[lane] = start[0];
    for (int step = 0; step < size / 4; ++step, w += 4 * kHalf)
      for (int lane = 0; lane < kHalf; ++lane)
        for (int j = 0; j < 4; ++j) {
          sums[lane] += (w[4 * lane + j] & 15) * x[4 * step + j];
          sums[lane + kHalf] += (w[4 * lane + j] >> 4) * x[4 * step + j];
        }
    const float base = float_of(static_cast<uint32_t>(start[1]));
    for (int lane = 0; lane < kTile; ++lane)
      acc[lane] += (float_of(static_cast<uint32_t>(sums[lane])) - base) * bf16_to_float(scales[lane]);
  }

  static void int4(const Block& b) {
    const int64_t group_bytes = kTile * 2 + b.group * kTile / 2;
    for (int row = 0; row < b.num_rows; ++row) {
      float* acc = static_cast<float*>(b.acc) + row * kTile;
      const int8_t* x = reinterpret_cast<const int8_t*>(b.rows + row * b.row_stride);
      if (b.first) std::memset(acc, 0, kTile * sizeof(float));
      for (int g = 0; g < b.steps; ++g)
        group(b.weights + g * group_bytes, x + g * b.group, b.sums + row * b.sums_stride + 2 * g, b.group, acc);
    }
  }
};

}  // namespace

const LinearKernels kLinearPlain = linear_driver::table<Plain>();

}  // namespace maitred
