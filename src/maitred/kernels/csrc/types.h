// What every kernel speaks of: number formats, prepared activations, the ragged batch of one step.
#pragma once

#include <cstdint>

namespace maitred {

enum class DType : uint8_t {
  f32,
  bf16,
  int8,
  f16,
  f8,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q4_z,
  q8_z,
  q8_w,
  q4_k,
  q5_k,
  q6_k
};

// Activations made ready for a linear: M rows of K values, padded with zeros as the packed weights want them.
// Which format a weight's format takes: f32 and f16 -> f32, bf16 and f8 -> bf16, int8 -> int8 (one scale a row, of
// rotated rows), block formats -> int8 too (`q8_0`: a scale for each 32 values; block_form.h).
struct Operand {
  DType dtype;
  void* rows;
  int64_t row_stride;  // bytes
  float* scales;       // [M], int8 only
  int32_t* sums;       // int8 only: sums of q that the kernel corrects with; shape is linear.h's matter
};

// What becomes of a request's recurrent states in a step.
struct StateRow {
  int32_t slot;
  int32_t num_replayed;  // drafts of the step before that were right
  int32_t num_certain;   // of the request's tokens, the first so many: the others are drafts
};

// Written to a slot, too: the state after so many of a row's tokens, none of them a draft.
struct StateSave {
  int32_t row, num_tokens, slot;
};

// One step: T tokens of R requests, those of a request together and in order of position.
struct StepRows {
  int num_tokens;
  int num_rows;
  int num_logits;
  const int32_t* token_ids;      // [T]
  const int32_t* positions;      // [T]
  const int32_t* first_tokens;   // [R + 1] request r has tokens first_tokens[r] .. first_tokens[r + 1] - 1
  const int32_t* block_tables;   // block ids of request 0, then of request 1, ...; then of the next group of layers
  const int32_t* first_blocks;   // [R + 1] where each request's part of block_tables begins
  const int32_t* logits_tokens;  // [num_logits] tokens whose logits are wanted, ascending
  const int32_t* adapters;       // [R] the slot of each request's adapter, -1 for none; null where no request has one
  const StateRow* states = nullptr;  // [R], of models with recurrent layers
  const StateSave* saves = nullptr;  // [num_saves], those of a row in the order of their tokens
  int num_saves = 0;
  int num_groups = 1;  // of layers, each with block tables of its own
  bool pools = false;  // run_logits: the rows that logits are made of are wanted, and not those

  const int32_t* table(int group, int row) const {
    return block_tables + int64_t{group} * first_blocks[num_rows] + first_blocks[row];
  }
  int64_t num_table_blocks() const { return int64_t{num_groups} * first_blocks[num_rows]; }
};

}  // namespace maitred
