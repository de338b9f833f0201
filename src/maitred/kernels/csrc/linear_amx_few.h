// Few rows of bf16 with vectors, in tdpbf16ps's order of sums: of 32 values of K the even ones apart from the odd ones,
// each by fused multiply-adds from zero on, then both sums added, then that added to what there was; denormal numbers
// count as zeros, as inputs and as results. For linear_amx.cpp.
//
// Memory runs evenly when lines are asked for one at a time between products, which tiles are too few instructions for.
// The instructions are spelled out because the order of operands decides which of two NaNs lives on.
#pragma once

#include "linear.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

constexpr int kHalf = 16;   // rows of a tile register
constexpr int kDepth = 16;  // steps of K in one, 64 bytes of each row
constexpr int kDepthBytes = kDepth * 128;
constexpr int kFewRowsBf16 = 4;  // that vectors multiply
constexpr int kFewRowsF8 = 2;

// A run of one tile, and what to prefetch while rows pass it: `lines` with each depth.
struct Run {
  const uint8_t* weights;
  int depths;
  const uint8_t* tail;  // what is less than a depth at the end of K, filled up with zeros; null if nothing is
  bool first;
  const uint8_t* next;
  int lines;
  // Output lines to ask for, of rows that this run ends: a few with each depth. 0 rows where it does not.
  float* out;
  int64_t out_stride;
  int out_rows, out_width;
};

// While it lives. What computes meanwhile is not inlined, so that nothing of it leaves that time, nor enters it.
class ZeroDenormals {
 public:
  ZeroDenormals() : before(_mm_getcsr()) { _mm_setcsr(kZerosNearestNoTraps); }
  ~ZeroDenormals() { _mm_setcsr(before); }
  ZeroDenormals(const ZeroDenormals&) = delete;

 private:
  static constexpr unsigned kZerosNearestNoTraps = 0x9fc0;
  const unsigned before;
};

inline void add_product(__m512& sum, __m512 x, __m512 w) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w)); }
inline void add(__m512& sum, __m512 x) { asm("vaddps %1, %0, %0" : "+v"(sum) : "v"(x)); }

// Stands behind what makes these values, where the compiler would gather prefetches.
template <class Vector>
inline void prefetch_behind(Vector& a, Vector& b, const uint8_t* line) {
  asm volatile("prefetcht1 %2" : "+v"(a), "+v"(b) : "m"(*line));
}

// Both values of 16 channels' pairs of f8 in each half, times 2^-8: as f16, whose exponent has a bit more.
inline void f8_pairs(__m512i pairs, __m512& even0, __m512& odd0, __m512& even1, __m512& odd1) {
  const __m512i kept = _mm512_set1_epi16(static_cast<int16_t>(0xbf80));
  const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 1), kept);
  const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(pairs, 1), kept);
  even0 = _mm512_cvtph_ps(_mm512_castsi512_si256(even));
  odd0 = _mm512_cvtph_ps(_mm512_castsi512_si256(odd));
  even1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
  odd1 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
}

// R rows x 32 channels over a depth, while as many bytes from `next` on are asked for. kF8: weights are f8.
template <int R, bool kF8>
inline void multiply_depth_few(const uint8_t* weights, const uint8_t* rows, int64_t stride, const uint8_t* next,
                               __m512 (&sums)[R][2]) {
  alignas(64) float values[R][2][kDepth];
  __m512 even[R][2], odd[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512i pairs = _mm512_loadu_si512(rows + r * stride);
    const __m512 back = _mm512_set1_ps(kF8 ? 256.0f : 1.0f);
    _mm512_store_ps(values[r][0], kF8 ? _mm512_mul_ps(even_of(pairs), back) : even_of(pairs));
    _mm512_store_ps(values[r][1], kF8 ? _mm512_mul_ps(odd_of(pairs), back) : odd_of(pairs));
    even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = _mm512_setzero_ps();
  }
  asm("" : "+m"(values));  // else GCC shuffles values out of the vectors that it still has
#pragma GCC unroll 1
  for (int step = 0; step < kDepth; ++step) {
    __m512 even0, odd0, even1, odd1;
    if (kF8) {
      f8_pairs(_mm512_loadu_si512(weights + 64 * step), even0, odd0, even1, odd1);
    } else {
      __m512i w0 = _mm512_loadu_si512(weights + 128 * step), w1 = _mm512_loadu_si512(weights + 128 * step + 64);
      prefetch_behind(w0, w1, next + 128 * step);
      even0 = even_of(w0), odd0 = odd_of(w0), even1 = even_of(w1), odd1 = odd_of(w1);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 x0 = _mm512_set1_ps(values[r][0][step]), x1 = _mm512_set1_ps(values[r][1][step]);
      add_product(even[r][0], x0, even0);
      add_product(odd[r][0], x1, odd0);
      add_product(even[r][1], x0, even1);
      add_product(odd[r][1], x1, odd1);
    }
    prefetch_behind(even[R - 1][1], odd[R - 1][1], next + (kF8 ? 64 * step : 128 * step + 64));
  }
#pragma GCC unroll 16
  for (int i = 0; i < 2 * R; ++i) {
    add(even[i / 2][i % 2], odd[i / 2][i % 2]);
    add(sums[i / 2][i % 2], even[i / 2][i % 2]);
  }
}

template <int R, bool kF8>
__attribute__((noinline)) void multiply_run_few(const Run& run, const uint8_t* rows, int64_t stride, float* acc) {
  __m512 sums[R][2];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * R; ++i) sums[i / 2][i % 2] = run.first ? _mm512_setzero_ps() : _mm512_load_ps(acc + 16 * i);
  const uint8_t *weights = run.weights, *next = run.lines == 0 ? weights : run.next;
  constexpr int kBytes = kF8 ? kDepthBytes / 2 : kDepthBytes;
  for (int depth = 0; depth < run.depths; ++depth, weights += kBytes, rows += 64, next += kBytes)
    multiply_depth_few<R, kF8>(weights, rows, stride, next, sums);
  if (run.tail != nullptr) multiply_depth_few<R, kF8>(run.tail, rows, stride, run.tail, sums);
#pragma GCC unroll 16
  for (int i = 0; i < 2 * R; ++i) _mm512_store_ps(acc + 16 * i, sums[i / 2][i % 2]);
}

template <bool kF8>
constexpr void (*kFew[kFewRowsBf16])(const Run&, const uint8_t*, int64_t, float*) = {
    &multiply_run_few<1, kF8>, &multiply_run_few<2, kF8>, &multiply_run_few<3, kF8>, &multiply_run_few<4, kF8>};

template <bool kF8>
__attribute__((noinline)) void multiply_few(const Run& run, int num_rows, const uint8_t* rows, int64_t stride,
                                            float* acc) {
  float* out = run.out;
  for (int row = 0; row < run.out_rows; ++row, out += run.out_stride) {
    Vec16::prefetch_to_write(out);
    if (run.out_width == kTile) Vec16::prefetch_to_write(out + kHalf);
  }
  const ZeroDenormals zeros;
  kFew<kF8>[num_rows - 1](run, rows, stride, acc);
}

}  // namespace
}  // namespace maitred
