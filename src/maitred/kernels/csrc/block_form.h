// Block formats of weights: small codes, and a scale for every few of them. Names and values are GGML's
// (ggml-common.h); the bytes here are packed for the kernels (linear.h): a code is never rounded again, and w is what
// GGML computes of it.
#pragma once

#include <cstdint>

#include "bits.h"
#include "types.h"

namespace maitred {

// w = d * (code - offset) + m for each block of values, m = 0 where the form has no minimum. Forms without parts have d
// and m as f16 for each block of 32; those with parts have f16 D and M for a unit of 256 values, and 8-bit parts:
// d = D * part, m = -(M * part) for each 32 values, or d = D * part for each 16. Two forms are not GGML's but of what
// GPTQ, AWQ and compressed-tensors store: with `zero`, M is the code that stands for 0, m = d * (offset - M); with
// `wide`, D is a float32, its upper half where D is and its lower one where M is.
struct BlockForm {
  int bits;  // of a code, which is unsigned
  int unit;  // values from one head (D, M) to the next
  int offset;
  bool minimum;
  bool parts;
  int block;  // values that share d
  bool zero = false;
  bool wide = false;

  constexpr int blocks() const { return unit / 32; }
  constexpr int head_bytes() const { return minimum || wide ? 128 : 64; }      // of 32 channels
  constexpr int block_bytes() const { return (parts ? 64 : 0) + 128 * bits; }  // of 32 values x 32 channels
  constexpr int unit_bytes() const { return head_bytes() + blocks() * block_bytes(); }
};

constexpr BlockForm block_form(DType dtype) {
  return dtype == DType::q4_0   ? BlockForm{4, 32, 8, false, false, 32}
         : dtype == DType::q4_1 ? BlockForm{4, 32, 0, true, false, 32}
         : dtype == DType::q5_0 ? BlockForm{5, 32, 16, false, false, 32}
         : dtype == DType::q5_1 ? BlockForm{5, 32, 0, true, false, 32}
         : dtype == DType::q8_0 ? BlockForm{8, 32, 128, false, false, 32}
         : dtype == DType::q4_z ? BlockForm{4, 32, 0, true, false, 32, true}
         : dtype == DType::q8_z ? BlockForm{8, 32, 128, true, false, 32, true}
         : dtype == DType::q8_w ? BlockForm{8, 32, 128, false, false, 32, false, true}
         : dtype == DType::q4_k ? BlockForm{4, 256, 0, true, true, 32}
         : dtype == DType::q5_k ? BlockForm{5, 256, 0, true, true, 32}
                                : BlockForm{6, 256, 32, false, true, 16};
}

constexpr bool is_blocked(DType dtype) { return dtype >= DType::q4_0; }

// Calls body(BlockType<...>{}) with the format as a constant.
template <DType kDType>
struct BlockType {
  static constexpr DType value = kDType;
};

template <class Body>
inline auto with_block_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::q4_0:
      return body(BlockType<DType::q4_0>{});
    case DType::q4_1:
      return body(BlockType<DType::q4_1>{});
    case DType::q5_0:
      return body(BlockType<DType::q5_0>{});
    case DType::q5_1:
      return body(BlockType<DType::q5_1>{});
    case DType::q8_0:
      return body(BlockType<DType::q8_0>{});
    case DType::q4_z:
      return body(BlockType<DType::q4_z>{});
    case DType::q8_z:
      return body(BlockType<DType::q8_z>{});
    case DType::q8_w:
      return body(BlockType<DType::q8_w>{});
    case DType::q4_k:
      return body(BlockType<DType::q4_k>{});
    case DType::q5_k:
      return body(BlockType<DType::q5_k>{});
    default:
      return body(BlockType<DType::q6_k>{});
  }
}

// One channel at a time, as plain C++ and unpacking read it; vectors have ways of their own.

// Value j (0 .. 3) of a step (0 .. 7) of a block's codes.
static inline int code_at(const BlockForm& form, const uint8_t* codes, int channel, int step, int j) {
  const int within = channel % 16, upper = channel / 16;
  const uint8_t* high = codes + 8 * 64;
  if (form.bits == 8) return codes[128 * step + 4 * channel + j];
  int code = codes[64 * step + 4 * within + j] >> 4 * upper & 15;
  if (form.bits == 5) code |= (high[16 * step + 8 * upper + within / 2] >> (4 * (within % 2) + j) & 1) << 4;
  if (form.bits == 6) code |= (high[64 * (step / 2) + 4 * within + j] >> (4 * (step % 2) + 2 * upper) & 3) << 4;
  return code;
}

struct ChannelScales {
  float d[2];  // of the block's halves
  float m;
};

// head: of the unit; block: its parts, where the form has them.
static inline ChannelScales channel_scales(const BlockForm& form, const uint8_t* head, const uint8_t* block,
                                           int channel) {
  const uint16_t* heads = reinterpret_cast<const uint16_t*>(head);
  const float d = form.wide ? float_of_halves(heads[channel], heads[32 + channel]) : f16_to_float(heads[channel]);
  const float second = form.minimum ? f16_to_float(heads[32 + channel]) : 0.0f;
  const float m = form.zero ? d * (static_cast<float>(form.offset) - second) : second;
  if (!form.parts) return {{d, d}, m};
  if (form.minimum) {
    const float scaled = d * static_cast<float>(block[channel]);
    return {{scaled, scaled}, -(m * static_cast<float>(block[32 + channel]))};
  }
  return {{d * static_cast<float>(static_cast<int8_t>(block[channel])),
           d * static_cast<float>(static_cast<int8_t>(block[32 + channel]))},
          m};
}

// A prepared row of block formats has three numbers for every 32 values, in Operand::sums: the bits of the float32
// scale of its int8 values, and the sums of those values' first and second sixteen.
constexpr int kSumsPerBlock = 3;

}  // namespace maitred
