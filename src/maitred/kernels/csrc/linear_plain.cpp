// The linear in plain C++: always there, and what the others are tested against.
#include <cmath>

#include "linear_driver.h"

namespace maitred {
namespace {

// A vector of one.
struct One {
  static constexpr int width = 1;
  float x;
  static One load(const float* from) { return {*from}; }
  static One load_part(const float*, int) { return {0.0f}; }
  static void store(float* to, One v) { *to = v.x; }
  static void store_part(float*, One, int) {}
  static One set1(float x) { return {x}; }
  static One fma(One a, One b, One c) { return {a.x * b.x + c.x}; }
  static One min(One a, One b) { return {a.x < b.x ? a.x : b.x}; }
  static One max(One a, One b) { return {a.x > b.x ? a.x : b.x}; }
  static One abs(One a) { return {std::fabs(a.x)}; }
  static One round_even(One a) { return {std::nearbyint(a.x)}; }
  static One select_less(One a, One b, One x, One y) { return a.x < b.x ? x : y; }
  static One copysign(One a, One sign) { return {std::copysign(a.x, sign.x)}; }
  static One pow2(One n) { return {float_of(static_cast<uint32_t>((static_cast<int32_t>(n.x) + 127) * (1 << 23)))}; }
  static One max_bits(One a, One b) { return bits_of(a.x) > bits_of(b.x) ? a : b; }
  static float largest_bits(One a) { return a.x; }
  static float sum(One a) { return a.x; }
  static float root(float x) { return std::sqrt(x); }
  friend One operator+(One a, One b) { return {a.x + b.x}; }
  friend One operator-(One a, One b) { return {a.x - b.x}; }
  friend One operator*(One a, One b) { return {a.x * b.x}; }
  friend One operator/(One a, One b) { return {a.x / b.x}; }
};

struct Plain {
  using V = One;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 4; }
  static const char* product(DType dtype) {
    const char* names[] = {"scalar float32", "scalar bfloat16", "scalar int8", "scalar int8"};
    return names[static_cast<int>(dtype)];
  }

  static One from_int32(const int32_t* from) { return {static_cast<float>(*from)}; }
  static void store_bf16(uint16_t* to, One v) { *to = float_to_bf16(v.x); }
  static void store_int8(int8_t* to, One v) {
    const float q = std::nearbyint(v.x);
    *to = static_cast<int8_t>(q > 127.0f ? 127.0f : q > -127.0f ? q : -127.0f);
  }
  static int32_t sum_int8(const int8_t* from, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += from[i];
    return sum;
  }

  static void prefetch_to_write(const float*) {}

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
