// Low-rank products for a vector type V (vector_math.h), whose anonymous namespace makes every copy local to its file.
//
// Rows of A are read four at a time, 16 values of each, and panels of B rank by rank: both from front to back, for a
// decoding step reads an adapter's bytes for one row and waits for memory. Several rows of one adapter share a read.
#pragma once

#include "linear_prepare.h"
#include "low_rank.h"

namespace maitred {
namespace low_rank_run {

constexpr int kAhead = 2048;  // bytes that are asked for before they are read

template <class V>
struct Floats {
  using Value = float;
  static V at(const float* from) { return V::load(from); }
};

template <class V>
struct Halves {
  using Value = uint16_t;
  static V at(const uint16_t* from) { return V::from_bf16(from); }
};

template <class V>
void row(const PrepareSource& source, int k, int i, float* to) {
  linear_driver::prepare_f32<V>(linear_driver::normed_row<V>(source, k, i), to);
  if (source.rotated) rotate(to, k);  // the second time: it comes as H x / block
}

// R rows x 4 ranks.
template <class V, class T, int R>
inline void project_group(const typename T::Value* a, int steps, const float* x, int64_t stride, float* sums,
                          int64_t sums_stride) {
  constexpr int kParts = 16 / V::width;
  V acc[R][kRanksAtOnce];
#pragma GCC unroll 16
  for (int i = 0; i < R * kRanksAtOnce; ++i) acc[i / kRanksAtOnce][i % kRanksAtOnce] = V::set1(0.0f);
  for (int step = 0; step < steps; ++step, a += kRanksAtOnce * 16, x += 16) {
    __builtin_prefetch(reinterpret_cast<const char*>(a) + kAhead);
    __builtin_prefetch(reinterpret_cast<const char*>(a) + kAhead + 64);
    for (int part = 0; part < kParts; ++part) {
      V values[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) values[r] = V::load(x + r * stride + part * V::width);
#pragma GCC unroll 4
      for (int j = 0; j < kRanksAtOnce; ++j) {
        const V w = T::at(a + j * 16 + part * V::width);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][j] = V::fma(w, values[r], acc[r][j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kRanksAtOnce; ++i)
    sums[i / kRanksAtOnce * sums_stride + i % kRanksAtOnce] = V::sum(acc[i / kRanksAtOnce][i % kRanksAtOnce]);
}

// R rows x P panels that lie together.
template <class V, class T, int R, int P>
inline void expand_together(const typename T::Value* b, int num_ranks, const float* sums, int64_t sums_stride,
                            float* to, int64_t to_stride, int panel_step) {
  constexpr int kParts = 16 / V::width, kSums = P * kParts;
  V acc[R][kSums];
#pragma GCC unroll 64
  for (int i = 0; i < R * kSums; ++i) acc[i / kSums][i % kSums] = V::set1(0.0f);
  for (int j = 0; j < num_ranks; ++j) {
    V x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = V::set1(sums[r * sums_stride + j]);
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      const typename T::Value* from = b + (i / kParts * num_ranks + j) * kPanel + i % kParts * V::width;
      if (i % kParts == 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + kAhead);
      const V w = T::at(from);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][i] = V::fma(w, x[r], acc[r][i]);
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < R * kSums; ++i) {
    const int panel = i % kSums / kParts, part = i % kParts;
    V::store(to + i / kSums * to_stride + panel * panel_step + part * V::width, acc[i / kSums][i % kSums]);
  }
}

// R rows x panels, of which as many are taken together as the registers hold sums of.
template <class V, class T, int R>
inline void expand_rows(const LowRankB& panels, const float* sums, int64_t sums_stride, int64_t to_stride) {
  constexpr int kTogether = V::width == 16 ? 4 : 1;
  const typename T::Value* b = reinterpret_cast<const typename T::Value*>(panels.data);
  const int64_t size = int64_t{panels.num_ranks} * kPanel;
  float* to = panels.to;
  int panel = 0;
  for (; panel + kTogether <= panels.num_panels;
       panel += kTogether, b += kTogether * size, to += kTogether * panels.panel_step)
    expand_together<V, T, R, kTogether>(b, panels.num_ranks, sums, sums_stride, to, to_stride, panels.panel_step);
  for (; panel < panels.num_panels; ++panel, b += size, to += panels.panel_step)
    expand_together<V, T, R, 1>(b, panels.num_ranks, sums, sums_stride, to, to_stride, panels.panel_step);
}

// kRows at a time, as many as the registers hold sums of.
template <class V, class T, int kRows>
inline void project_all(const LowRankA& all, const float* rows, int64_t stride, int count, float* sums,
                        int64_t sums_stride) {
  const typename T::Value* a = reinterpret_cast<const typename T::Value*>(all.data);
  const int steps = low_rank_k(all.k) / 16;
  for (int rank = 0; rank < all.rank; rank += kRanksAtOnce, a += steps * 16 * kRanksAtOnce)
    for (int row = 0; row < count;) {
      const float* x = rows + row * stride;
      float* to = sums + row * sums_stride + rank;
      if (kRows >= 4 && count - row >= 4) {
        project_group<V, T, kRows>(a, steps, x, stride, to, sums_stride);
        row += kRows;
      } else if (count - row >= 2) {
        project_group<V, T, 2>(a, steps, x, stride, to, sums_stride);
        row += 2;
      } else {
        project_group<V, T, 1>(a, steps, x, stride, to, sums_stride);
        row += 1;
      }
    }
}

template <class V, class T, int kRows>
inline void expand_all(const LowRankB& panels, const float* sums, int64_t sums_stride, int count, int64_t to_stride) {
  LowRankB at = panels;
  for (int row = 0; row < count;) {
    const float* from = sums + row * sums_stride;
    at.to = panels.to + row * to_stride;
    if (kRows >= 4 && count - row >= 4) {
      expand_rows<V, T, kRows>(at, from, sums_stride, to_stride);
      row += kRows;
    } else if (count - row >= 2) {
      expand_rows<V, T, 2>(at, from, sums_stride, to_stride);
      row += 2;
    } else {
      expand_rows<V, T, 1>(at, from, sums_stride, to_stride);
      row += 1;
    }
  }
}

template <class V, int kRows>
void project(const LowRankA& a, const float* rows, int64_t stride, int count, float* sums, int64_t sums_stride) {
  if (a.dtype == DType::f32)
    project_all<V, Floats<V>, kRows>(a, rows, stride, count, sums, sums_stride);
  else
    project_all<V, Halves<V>, kRows>(a, rows, stride, count, sums, sums_stride);
}

template <class V, int kRows>
void expand(const LowRankB& panels, const float* sums, int64_t sums_stride, int count, int64_t to_stride) {
  if (panels.dtype == DType::f32)
    expand_all<V, Floats<V>, kRows>(panels, sums, sums_stride, count, to_stride);
  else
    expand_all<V, Halves<V>, kRows>(panels, sums, sums_stride, count, to_stride);
}

// kRows: 2 or 4.
template <class V, int kRows>
constexpr LowRankKernels table() {
  return LowRankKernels{&row<V>, &project<V, kRows>, &expand<V, kRows>};
}

}  // namespace low_rank_run
}  // namespace maitred
