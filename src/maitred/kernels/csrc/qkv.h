// From the rows of the q, k, v matrix to attention's input: q/k norms, rope, K and V into the pool, q made ready.
//
// A query head, made ready, is what a dot product with the pool's keys takes: float32 or bf16 values, or for an int8
// pool two int8 parts, q ~ scale * (high + low / 254), so that the product with int8 keys is exact in integers and q
// loses nothing that matters; behind them float scale, then int32 sums of high and of low (keys are stored with 128
// added, and the sums take that out again). For an int8 pool heads are rotated (rotate.h): queries and keys alike,
// which leaves their products, and values, which attention turns back once they are summed. K's and V's scales are
// divided by the block, and with them everything that the rotations made larger.
#pragma once

#include <cstdint>

#include "isa.h"
#include "kv_pool.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

enum class QKNorm : uint8_t { none = 0, per_head = 1, full_width = 2 };

// One rope's table, made once a step: for each token cos of every pair, then sin of every pair, times the factor.
struct RopeOp {
  const float* inverse_frequencies;  // [num_pairs] radians per position
  int num_pairs;
  float attention_factor;
  // A table for queries alone: at position p they are multiplied by 1 + query_beta * ln(1 + p / query_context), whole
  // contexts counted. 0: none.
  float query_beta = 0.0f;
  int query_context = 1;
};

// table [T][2][num_pairs]. Called by all workers.
void rope_table(const RopeOp& op, const StepRows& step, float* table, WorkCounter& counter, const Worker& worker);

struct QKVOp {
  int layer;  // of its group's, in the pool
  int group;
  int num_heads;  // query heads
  QKNorm norm;
  const float* q_norm;  // [head_dim], or [num_heads * head_dim] for full_width; offset already added
  const float* k_norm;
  float eps;
  int num_pairs;              // values i and i + num_pairs of each head are rotated together; 0 leaves positions out
  bool queries_only = false;  // keys and values of the layer are another's
  bool interleaved;           // values 2i and 2i + 1 are, and become i and i + num_pairs in queries and keys alike
};

// rows [T][stride]: q heads, k heads, v heads (none for a latent pool). queries [T][num_heads][query_head_bytes]. rope
// may be null without pairs; query_rope may be the same. Called by all workers; attention may read the pool once all
// have returned.
void qkv(const QKVOp& op, const KVPool& pool, const StepRows& step, const float* rows, int64_t row_stride,
         const float* rope, const float* query_rope, uint8_t* queries, WorkCounter& counter, const Worker& worker,
         Isa isa);

// What the instruction sets compile for themselves: consecutive tokens of one request whose K and V go to one tile of
// one block (any consecutive slots of a block that is not tiled).
struct QKVRun {
  const QKVOp* op;
  const KVLayout* layout;
  const float* rows;  // of the first token
  int64_t row_stride;
  const float* rope;  // [count][2][num_pairs] cosines, then sines; null without pairs
  const float* query_rope;
  uint8_t* queries;  // of the first token
  int64_t query_stride;
  uint8_t* block;
  int slot;                       // of the first token, in the block
  int count;                      // 1 .. kTileSlots
  const uint8_t* const* earlier;  // int4: the first head's cells of the slots before it in its 16
  int num_earlier;
};

struct QKVKernels {
  void (*run)(const QKVRun& run);
  // int4's cells of one head and 16 slots, of which `count` are there, as a tile of `to`, an int8 layout of one head.
  void (*expand)(const KVLayout& layout, const uint8_t* const* cells, int count, const KVLayout& to, uint8_t* tile);
  void (*rotate)(float* head, int head_dim);
  // V of a tile of a latent pool out of its K.
  void (*turn)(const KVLayout& layout, const uint8_t* keys, uint8_t* values);
};
const QKVKernels& qkv_kernels(Isa isa);
const QKVKernels& qkv_kernels_plain();
const QKVKernels& qkv_kernels_avx2();
const QKVKernels& qkv_kernels_avx512();
const QKVKernels& qkv_kernels_neon();

constexpr int kLargestHead = 1024;  // values; scratch of fixed size is on the stack

}  // namespace maitred
