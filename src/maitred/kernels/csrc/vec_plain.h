// Plain C++'s vector of one float, as vector_math.h has them. For *_plain.cpp alone, each of which has its own copy.
#pragma once

#include <stdint.h>

#include <cmath>

#include "bits.h"

namespace maitred {
namespace {

struct Vec1 {
  static constexpr int width = 1;
  float x;
  static Vec1 load(const float* from) { return {*from}; }
  static Vec1 from_bf16(const uint16_t* from) { return {bf16_to_float(*from)}; }
  static Vec1 load_part(const float*, int) { return {0.0f}; }
  static void store(float* to, Vec1 a) { *to = a.x; }
  static void store_part(float*, Vec1, int) {}
  static Vec1 set1(float x) { return {x}; }
  static Vec1 fma(Vec1 a, Vec1 b, Vec1 c) { return {a.x * b.x + c.x}; }
  static Vec1 min(Vec1 a, Vec1 b) { return {a.x < b.x ? a.x : b.x}; }
  static Vec1 max(Vec1 a, Vec1 b) { return {a.x > b.x ? a.x : b.x}; }
  static Vec1 abs(Vec1 a) { return {std::fabs(a.x)}; }
  static Vec1 round_even(Vec1 a) { return {std::nearbyint(a.x)}; }
  static Vec1 select_less(Vec1 a, Vec1 b, Vec1 x, Vec1 y) { return a.x < b.x ? x : y; }
  static Vec1 copysign(Vec1 a, Vec1 sign) { return {std::copysign(a.x, sign.x)}; }
  static Vec1 pow2(Vec1 n) { return {float_of(static_cast<uint32_t>((static_cast<int32_t>(n.x) + 127) * (1 << 23)))}; }
  static Vec1 max_bits(Vec1 a, Vec1 b) { return bits_of(a.x) > bits_of(b.x) ? a : b; }
  static float largest_bits(Vec1 a) { return a.x; }
  static float sum(Vec1 a) { return a.x; }
  static float root(float x) { return std::sqrt(x); }
  friend Vec1 operator+(Vec1 a, Vec1 b) { return {a.x + b.x}; }
  friend Vec1 operator-(Vec1 a, Vec1 b) { return {a.x - b.x}; }
  friend Vec1 operator*(Vec1 a, Vec1 b) { return {a.x * b.x}; }
  friend Vec1 operator/(Vec1 a, Vec1 b) { return {a.x / b.x}; }

  static Vec1 from_int32(const int32_t* from) { return {static_cast<float>(*from)}; }
  static void widen_f8(const uint8_t* from, int n, uint16_t* to) {
    for (int i = 0; i < n; ++i) to[i] = f8_to_bf16(from[i]);
  }
  static void store_bf16(uint16_t* to, Vec1 a) { *to = float_to_bf16(a.x); }
  static void store_int8(int8_t* to, Vec1 a) {
    const float q = std::nearbyint(a.x);
    *to = static_cast<int8_t>(q > 127.0f ? 127.0f : q > -127.0f ? q : -127.0f);
  }
  static int32_t sum_int8(const int8_t* from, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += from[i];
    return sum;
  }
  static void prefetch_to_write(const float*) {}
};

}  // namespace
}  // namespace maitred
