// Low-rank products: what an adapter (LoRA, Hu et al. 2021, arXiv:2106.09685) adds to a linear, W x + B (A x), before
// anything becomes of it. A is [rank, k], B [n, rank] with the adapter's scale in it, both float32 or bf16.
//
// A lies as [rank / 4][k / 16][4][16], padded with zeros. B lies in panels of 16 output channels, [rank][16] each.
// Rows are float32 and stay so: lanes of A are k, those of B channels, each summed upwards in float32. So a row's sums
// are a function of the row and its adapter alone, bit for bit, within one instruction set.
#pragma once

#include <cstdint>

#include "isa.h"
#include "linear.h"
#include "types.h"

namespace maitred {

constexpr int kPanel = kTile / 2;  // output channels
constexpr int kRanksAtOnce = 4;    // rows of A that lie together; a rank is a multiple of it
constexpr int kAdapterRows = 4;    // rows of one adapter that are computed together, at most

static inline int low_rank_k(int k) { return (k + 15) / 16 * 16; }  // as A has it

struct LowRankA {
  DType dtype;
  int rank, k;
  const uint8_t* data;
};

// Consecutive panels of B, with the ranks that reach them, and where their sums go.
struct LowRankB {
  DType dtype;
  int num_panels, num_ranks;
  const uint8_t* data;
  float* to;       // of the first row
  int panel_step;  // floats from one panel's sums to the next one's
};

struct LowRankKernels {
  // Row i of the source as a float32 linear would read it, with zeros up to low_rank_k(k).
  void (*row)(const PrepareSource& source, int k, int i, float* to);
  // sums [count][rank] = rows A'; strides in floats.
  void (*project)(const LowRankA& a, const float* rows, int64_t row_stride, int count, float* sums,
                  int64_t sums_stride);
  // b.to [count][..] = sums B', of sums from the panels' first rank on.
  void (*expand)(const LowRankB& b, const float* sums, int64_t sums_stride, int count, int64_t to_stride);
};

const LowRankKernels& low_rank_kernels(Isa isa);
extern const LowRankKernels kLowRankPlain;
#if defined(__x86_64__)
extern const LowRankKernels kLowRankAvx2;
extern const LowRankKernels kLowRankAvx512;
#elif defined(__aarch64__)
extern const LowRankKernels kLowRankNeon;
#endif

}  // namespace maitred
