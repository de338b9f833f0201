#include "qkv.h"

#include <algorithm>
#include <cmath>

namespace maitred {
namespace {

constexpr int kTokensPerShare = 4;

// The runs of a step, in order: tokens of one request that lie in one tile of the pool, which are a share, so that two
// threads never write to one line.
struct Runs {
  const StepRows& step;
  int row = 0, index = 0, first = 0, end;

  explicit Runs(const StepRows& step) : step(step), end(end_from(0)) {}

  int end_from(int token) const {
    const int left = kTileSlots - step.positions[token] % kTileSlots;
    return std::min(token + left, step.first_tokens[row + 1]);
  }
  // Moves to run `wanted`, which is never below the one before; false if there are not that many.
  bool seek(int wanted) {
    for (; index < wanted; ++index) {
      first = end;
      if (first == step.num_tokens) return false;
      while (first >= step.first_tokens[row + 1]) ++row;
      end = end_from(first);
    }
    return true;
  }
};

}  // namespace

void rope_table(const RopeOp& op, const StepRows& step, float* table, WorkCounter& counter, const Worker&) {
  for (int first; (first = counter.take() * kTokensPerShare) < step.num_tokens;) {
    const int end = std::min(first + kTokensPerShare, step.num_tokens);
    for (int token = first; token < end; ++token) {
      const float position = static_cast<float>(step.positions[token]);
      const float turns = static_cast<float>(step.positions[token] / op.query_context);
      const float factor = op.attention_factor * (1.0f + op.query_beta * std::log(1.0f + turns));
      float* cos = table + int64_t{token} * 2 * op.num_pairs;
      float* sin = cos + op.num_pairs;
      for (int i = 0; i < op.num_pairs; ++i) {
        const float angle = position * op.inverse_frequencies[i];
        cos[i] = std::cos(angle) * factor;
        sin[i] = std::sin(angle) * factor;
      }
    }
  }
}

void qkv(const QKVOp& op, const KVPool& pool, const StepRows& step, const float* rows, int64_t row_stride,
         const float* rope, const float* query_rope, uint8_t* queries, WorkCounter& counter, const Worker&, Isa isa) {
  const KVLayout& layout = pool.layout_of(op.layer);
  const QKVKernels& kernels = qkv_kernels(isa);
  const int64_t query_stride = op.num_heads * query_head_bytes(layout);
  for (Runs runs(step); runs.seek(counter.take());) {
    for (int token = runs.first, count; token < runs.end; token += count) {
      const int position = step.positions[token], slot = position % layout.block_size;
      const int32_t* table = step.table(op.group, runs.row);
      const int block = table[position / layout.block_size];
      count = std::min(runs.end - token, layout.block_size - slot);  // a block may end before a run does
      const int num_earlier = layout.dtype == DType::q4_1 ? position % kTileSlots : 0;
      const uint8_t* earlier[kTileSlots];
      for (int i = 0; i < num_earlier; ++i) {
        const int before = position - num_earlier + i;
        earlier[i] =
            pool.block_of(op.layer, table[before / layout.block_size]) + before % layout.block_size * layout.cell_bytes;
      }
      kernels.run({&op, &layout, rows + token * row_stride, row_stride,
                   rope == nullptr ? nullptr : rope + int64_t{token} * 2 * op.num_pairs,
                   rope == nullptr ? nullptr : query_rope + int64_t{token} * 2 * op.num_pairs,
                   queries + token * query_stride, query_stride, pool.block_of(op.layer, block), slot, count, earlier,
                   num_earlier});
    }
  }
}

const QKVKernels& qkv_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512 || isa == Isa::amx) return qkv_kernels_avx512();
  if (isa == Isa::avx2) return qkv_kernels_avx2();
#elif defined(__aarch64__)
  if (isa == Isa::neon) return qkv_kernels_neon();
#endif
  (void)isa;
  return qkv_kernels_plain();
}

}  // namespace maitred
