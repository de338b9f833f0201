#include "qkv.h"

#include <algorithm>
#include <cmath>

namespace maitred {
namespace {

constexpr int kTokensPerShare = 4;

int row_of_token(const StepRows& step, int token) {
  const int32_t* end = step.first_tokens + step.num_rows + 1;
  return static_cast<int>(std::upper_bound(step.first_tokens, end, token) - step.first_tokens) - 1;
}

}  // namespace

void rope_table(const RopeOp& op, const StepRows& step, float* table, WorkCounter& counter, const Worker&) {
  for (int first; (first = counter.take() * kTokensPerShare) < step.num_tokens;) {
    const int end = std::min(first + kTokensPerShare, step.num_tokens);
    for (int token = first; token < end; ++token) {
      const float position = static_cast<float>(step.positions[token]);
      float* cos = table + int64_t{token} * 2 * op.num_pairs;
      float* sin = cos + op.num_pairs;
      for (int i = 0; i < op.num_pairs; ++i) {
        const float angle = position * op.inverse_frequencies[i];
        cos[i] = std::cos(angle) * op.attention_factor;
        sin[i] = std::sin(angle) * op.attention_factor;
      }
    }
  }
}

void qkv(const QKVOp& op, const KVPool& pool, const StepRows& step, const float* rows, int64_t row_stride,
         const float* rope, uint8_t* queries, WorkCounter& counter, const Worker&, Isa isa) {
  const KVLayout& layout = pool.layout();
  const QKVKernels& kernels = qkv_kernels(isa);
  const int64_t token_query_bytes = op.num_heads * query_head_bytes(layout);
  for (int first; (first = counter.take() * kTokensPerShare) < step.num_tokens;) {
    const int end = std::min(first + kTokensPerShare, step.num_tokens);
    int row = row_of_token(step, first);
    for (int token = first; token < end; ++token) {
      while (token >= step.first_tokens[row + 1]) ++row;
      const int position = step.positions[token];
      const int block = step.block_tables[step.first_blocks[row] + position / layout.block_size];
      const float* cos = rope == nullptr ? nullptr : rope + int64_t{token} * 2 * op.num_pairs;
      kernels.token({&op, &layout, rows + token * row_stride, cos, cos == nullptr ? nullptr : cos + op.num_pairs,
                     queries + token * token_query_bytes, pool.block(op.layer, block), position % layout.block_size});
    }
  }
}

const QKVKernels& qkv_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::avx512) return qkv_kernels_avx512();
  if (isa == Isa::avx2) return qkv_kernels_avx2();
#elif defined(__aarch64__)
  if (isa == Isa::neon) return qkv_kernels_neon();
#endif
  (void)isa;
  return qkv_kernels_plain();
}

}  // namespace maitred
