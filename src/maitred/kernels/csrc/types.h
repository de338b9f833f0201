// What every kernel speaks of: number formats, prepared activations, the ragged batch of one step.
#pragma once

#include <cstdint>

namespace maitred {

enum class DType : uint8_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// Activations made ready for a linear: M rows of K values, padded with zeros as the packed weights want them.
// Which format a weight's format takes: f32 -> f32, bf16 -> bf16, int8 and int4 -> int8, with one scale a row
// (linear.h: int8 weights meet rotated rows, each group of int4 a power of two of the scale).
struct Operand {
  DType dtype;
  void* rows;
  int64_t row_stride;  // bytes
  float* scales;       // [M], int8 only
  int32_t* sums;       // int8 only: sums of q that the kernel corrects with; shape is linear.h's matter
};

// One step: T tokens of R requests, those of a request together and in order of position.
struct StepRows {
  int num_tokens;
  int num_rows;
  int num_logits;
  const int32_t* token_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* first_tokens;   // [R + 1] request r has tokens first_tokens[r] .. first_tokens[r + 1] - 1
  const int32_t* block_tables;   // block ids of request 0, then of request 1, ...
  const int32_t* first_blocks;   // [R + 1] where each request's part of block_tables begins
  const int32_t* logits_tokens;  // [num_logits] tokens whose logits are wanted, ascending
  const int32_t* adapters;       // [R] the slot of each request's adapter, -1 for none; null where no request has one
};

}  // namespace maitred
