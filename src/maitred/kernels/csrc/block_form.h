// Block formats of weights: small codes, and a scale for every few of them. Names and values are GGML's
// (ggml-common.h); the bytes here are packed for the kernels (linear.h): a code is never rounded again, and w is what
// GGML computes of it.
#pragma once

#include <cstdint>

#include "types.h"

namespace maitred {

// w = d * (code - offset) + m for each block of values, m = 0 where the form has no minimum. Forms without parts have d
// and m as f16 for each block of 32; those with parts have f16 D and M for a unit of 256 values, and 8-bit parts:
// d = D * part, m = -(M * part) for each 32 values, or d = D * part for each 16.
struct BlockForm {
  int bits;  // of a code, which is unsigned
  int unit;  // values from one head (D, M) to the next
  int offset;
  bool minimum;
  bool parts;
  int block;  // values that share d

  constexpr int blocks() const { return unit / 32; }
  constexpr int head_bytes() const { return minimum ? 128 : 64; }              // of 32 channels
  constexpr int block_bytes() const { return (parts ? 64 : 0) + 128 * bits; }  // of 32 values x 32 channels
  constexpr int unit_bytes() const { return head_bytes() + blocks() * block_bytes(); }
};

constexpr BlockForm block_form(DType dtype) {
  return dtype == DType::q4_0   ? BlockForm{4, 32, 8, false, false, 32}
         : dtype == DType::q4_1 ? BlockForm{4, 32, 0, true, false, 32}
         : dtype == DType::q5_0 ? BlockForm{5, 32, 16, false, false, 32}
         : dtype == DType::q5_1 ? BlockForm{5, 32, 0, true, false, 32}
         : dtype == DType::q8_0 ? BlockForm{8, 32, 128, false, false, 32}
         : dtype == DType::q4_k ? BlockForm{4, 256, 0, true, true, 32}
         : dtype == DType::q5_k ? BlockForm{5, 256, 0, true, true, 32}
                                : BlockForm{6, 256, 32, false, true, 16};
}

constexpr bool is_blocked(DType dtype) { return dtype >= DType::q4_0; }

// A prepared row of block formats has three numbers for every 32 values, in Operand::sums: the bits of the float32
// scale of its int8 values, and the sums of those values' first and second sixteen.
constexpr int kSumsPerBlock = 3;

}  // namespace maitred
