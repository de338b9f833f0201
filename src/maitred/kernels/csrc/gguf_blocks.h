// Rows of a GGUF file's tensors, as GGML lays them out (ggml-common.h): to float32, or to codes and scales as they are.
// And rows of quantised folders as model/quantised.py lays them out: q4_z (d and zero f16, 16 bytes of nibbles as
// Q4_1's), q8_z (d and zero f16, 32 unsigned codes), q8_w (d f32, 32 signed codes), f8 (d f32, 128 values of E4M3).
#pragma once

#include <cstdint>

#include "types.h"

namespace maitred {

enum class SourceType : uint8_t {
  f32,
  bf16,
  f16,
  q4_0,
  q4_1,
  q5_0,
  q5_1,
  q8_0,
  q2_k,
  q3_k,
  q4_k,
  q5_k,
  q6_k,
  iq4_nl,
  iq4_xs,
  mxfp4,
  q4_z,
  q8_z,
  q8_w,
  f8
};

// Values and bytes of a source's block: 1 and the size of a value for f32, bf16, f16.
int source_block_values(SourceType type);
int source_block_bytes(SourceType type);

// k values of a row, with the float32 arithmetic of GGML's own dequantisation.
void to_float(SourceType type, const void* row, int k, float* out);

// What the format `dtype` keeps of one row: codes [k], and for each unit D and M (f16; f8: D as f32), and for each 32
// values two parts: of q4_k and q5_k (of d, of m), of q6_k those of its halves.
struct RowCodes {
  uint8_t* codes;
  uint16_t* heads;  // [units][2]
  uint8_t* parts;   // [units][16]
};

// Whether `dtype` holds the source exactly.
bool keeps(SourceType type, DType dtype);

// Raises nothing: type and dtype are a pair that keeps() knows.
void to_codes(SourceType type, const void* row, int k, const RowCodes& out);

// Rounds k float32 values (padded to whole blocks) to q4_1 or q8_0: the only ones that are made here.
void quantise(DType dtype, const float* row, int k, const RowCodes& out);

}  // namespace maitred
