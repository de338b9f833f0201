#include "gguf_blocks.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bits.h"
#include "block_form.h"

namespace maitred {
namespace {

struct Layout {
  int values, bytes;
};
constexpr Layout kLayouts[] = {{1, 4},     {1, 2},    {1, 2},     {32, 18},   {32, 20},   {32, 22},   {32, 24},
                               {32, 34},   {256, 84}, {256, 110}, {256, 144}, {256, 176}, {256, 210}, {32, 18},
                               {256, 136}, {32, 17},  {32, 20},   {32, 36},   {32, 36},   {128, 132}};
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};  // IQ4
constexpr int8_t kE2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // MXFP4's values, doubled

uint16_t half_at(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

uint32_t word_at(const uint8_t* p) {
  uint32_t bits;
  std::memcpy(&bits, p, 4);
  return bits;
}

// Low nibbles are the first half of a block's values, high ones the second.
void nibbles(const uint8_t* from, int half, uint8_t* to) {
  for (int i = 0; i < half; ++i) {
    to[i] = from[i] & 15;
    to[half + i] = from[i] >> 4;
  }
}

void add_fifth_bits(uint32_t high, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | (high >> i & 1) << 4);
}

// Parts of Q4_K and Q5_K: 6 bits each, the upper two of the last four beside the lower ones of the first.
void six_bit_parts(const uint8_t* from, uint8_t* parts) {
  for (int i = 0; i < 4; ++i) {
    parts[2 * i] = from[i] & 63;
    parts[2 * i + 1] = from[4 + i] & 63;
    parts[8 + 2 * i] = static_cast<uint8_t>((from[8 + i] & 15) | (from[i] >> 2 & 0x30));
    parts[9 + 2 * i] = static_cast<uint8_t>(from[8 + i] >> 4 | (from[4 + i] >> 2 & 0x30));
  }
}

// Q3_K's parts are 6 bits less 32, with the upper two bits of all in the last four bytes.
void q3_parts(const uint8_t* from, uint8_t* parts) {
  for (int i = 0; i < 16; ++i) {
    const int low = i < 8 ? from[i] & 15 : from[i - 8] >> 4, high = from[8 + i % 4] >> (2 * (i / 4)) & 3;
    parts[i] = static_cast<uint8_t>((low | high << 4) - 32);
  }
}

// One block of the source into codes, head and parts.
void block_codes(SourceType type, const uint8_t* p, uint8_t* codes, uint16_t* head, uint8_t* parts) {
  head[0] = head[1] = 0;
  switch (type) {
    case SourceType::q4_0:
    case SourceType::q4_1:
    case SourceType::q4_z:
    case SourceType::q5_0:
    case SourceType::q5_1: {
      const bool minimum = type != SourceType::q4_0 && type != SourceType::q5_0;
      const bool five = type == SourceType::q5_0 || type == SourceType::q5_1;
      head[0] = half_at(p);
      if (minimum) head[1] = half_at(p + 2);
      p += minimum ? 4 : 2;
      nibbles(p + (five ? 4 : 0), 16, codes);
      if (five) add_fifth_bits(word_at(p), codes);
      return;
    }
    case SourceType::q8_0:
      head[0] = half_at(p);
      for (int i = 0; i < 32; ++i) codes[i] = p[2 + i] ^ 0x80;
      return;
    case SourceType::q8_z:
      head[0] = half_at(p);
      head[1] = half_at(p + 2);
      std::memcpy(codes, p + 4, 32);
      return;
    case SourceType::q8_w:
      head[0] = half_at(p + 2);
      head[1] = half_at(p);
      for (int i = 0; i < 32; ++i) codes[i] = p[4 + i] ^ 0x80;
      return;
    case SourceType::iq4_nl:
      head[0] = half_at(p);
      nibbles(p + 2, 16, codes);
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(kNonLinear[codes[i]] + 128);
      return;
    case SourceType::mxfp4:
      head[0] = float_to_f16(std::ldexp(1.0f, p[0] - 128));
      nibbles(p + 1, 16, codes);
      for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(kE2M1[codes[i]] + 128);
      return;
    case SourceType::q4_k:
    case SourceType::q5_k: {
      const bool five = type == SourceType::q5_k;
      head[0] = half_at(p);
      head[1] = half_at(p + 2);
      six_bit_parts(p + 4, parts);
      const uint8_t *high = p + 16, *low = p + (five ? 48 : 16);
      for (int i = 0; i < 4; ++i) nibbles(low + 32 * i, 32, codes + 64 * i);
      for (int i = 0; five && i < 256; ++i)
        codes[i] = static_cast<uint8_t>(codes[i] | (high[i % 32] >> i / 32 & 1) << 4);
      return;
    }
    case SourceType::q6_k: {
      const uint8_t *low = p, *high = p + 128;
      for (int half = 0; half < 2; ++half, low += 64, high += 32, codes += 128) {
        nibbles(low, 64, codes);
        for (int i = 0; i < 128; ++i)
          codes[i] = static_cast<uint8_t>(codes[i] | (high[i % 32] >> 2 * (i / 32) & 3) << 4);
      }
      std::memcpy(parts, p + 192, 16);
      head[0] = half_at(p + 208);
      return;
    }
    case SourceType::q3_k: {
      const uint8_t *mask = p, *low = p + 32;
      for (int i = 0; i < 256; ++i) {
        const int two = low[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3, third = mask[i % 32] >> i / 32 & 1;
        codes[i] = static_cast<uint8_t>(two + (third ? 0 : -4) + 32);
      }
      q3_parts(p + 96, parts);
      head[0] = half_at(p + 108);
      return;
    }
    default:
      return;
  }
}

// The format in which a source's codes stay what they are.
DType kept_as(SourceType type) {
  switch (type) {
    case SourceType::q4_0:
      return DType::q4_0;
    case SourceType::q4_1:
      return DType::q4_1;
    case SourceType::q5_0:
      return DType::q5_0;
    case SourceType::q5_1:
      return DType::q5_1;
    case SourceType::q8_0:
    case SourceType::iq4_nl:
    case SourceType::mxfp4:
      return DType::q8_0;
    case SourceType::q4_z:
      return DType::q4_z;
    case SourceType::q8_z:
      return DType::q8_z;
    case SourceType::q8_w:
      return DType::q8_w;
    case SourceType::f8:
      return DType::f8;
    case SourceType::q4_k:
      return DType::q4_k;
    case SourceType::q5_k:
      return DType::q5_k;
    case SourceType::q3_k:
    case SourceType::q6_k:
      return DType::q6_k;
    default:
      return DType::f32;
  }
}

void q2_to_float(const uint8_t* p, float* out) {
  const float d = f16_to_float(half_at(p + 80)), m = f16_to_float(half_at(p + 82));
  for (int i = 0; i < 256; ++i) {
    const uint8_t part = p[i / 16];
    const int code = p[16 + i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
    out[i] = d * static_cast<float>(part & 15) * static_cast<float>(code) - m * static_cast<float>(part >> 4);
  }
}

void iq4_xs_to_float(const uint8_t* p, float* out) {
  const float d = f16_to_float(half_at(p));
  const int high = half_at(p + 2);
  for (int b = 0; b < 8; ++b) {
    const int part = (p[4 + b / 2] >> 4 * (b % 2) & 15) | (high >> 2 * b & 3) << 4;
    const float scale = d * static_cast<float>(part - 32);
    for (int i = 0; i < 16; ++i) {
      const uint8_t both = p[8 + 16 * b + i];
      out[32 * b + i] = scale * static_cast<float>(kNonLinear[both & 15]);
      out[32 * b + 16 + i] = scale * static_cast<float>(kNonLinear[both >> 4]);
    }
  }
}

void codes_to_float(const BlockForm& form, const uint8_t* codes, const uint16_t* head, const uint8_t* parts, int count,
                    float* out) {
  const float d = form.wide ? float_of_halves(head[0], head[1]) : f16_to_float(head[0]), m = f16_to_float(head[1]);
  for (int i = 0; i < count; ++i) {
    if (form.zero) {  // exact: the difference is an integer
      out[i] = d * (static_cast<float>(codes[i]) - m);
      continue;
    }
    float scale = d, minimum = form.minimum ? m : 0.0f;
    if (form.parts && form.minimum) {
      scale = d * static_cast<float>(parts[i / 32 * 2]);
      minimum = -(m * static_cast<float>(parts[i / 32 * 2 + 1]));
    } else if (form.parts) {
      scale = d * static_cast<float>(static_cast<int8_t>(parts[i / 16]));
    }
    const float value = scale * static_cast<float>(codes[i] - form.offset);
    out[i] = form.minimum ? value + minimum : value;
  }
}

float inverse_of(float x) { return std::fabs(x) > 1e-30f ? 1.0f / x : 0.0f; }

uint8_t code_of(float x, int most) {
  const float rounded = std::nearbyint(x);
  return static_cast<uint8_t>(rounded < 0.0f                       ? 0.0f
                              : rounded > static_cast<float>(most) ? static_cast<float>(most)
                                                                   : rounded);
}

// d and m of 32 values for codes 0 .. 15, by weighted least squares: codes are found for ranges a little wider and
// narrower than that of the values, d and m solved for each, and the pair of least error taken. Large values weigh
// more, as in llama.cpp's quantisation with minima (ggml-quants.c, make_qkx2_quants).
void fit_q4_1(const float* x, uint16_t* head, uint8_t* codes) {
  constexpr int kBlock = 32, kMost = 15, kTries = 20;
  float least = x[0], largest = x[0], squares = 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    least = std::min(least, x[i]);
    largest = std::max(largest, x[i]);
    squares += x[i] * x[i];
  }
  const float base = std::sqrt(squares / kBlock), range = largest - least;
  float weights[kBlock], sum_w = 0.0f, sum_x = 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    weights[i] = base + std::fabs(x[i]);
    sum_w += weights[i];
    sum_x += weights[i] * x[i];
  }
  float best = -1.0f;
  uint16_t found[2] = {float_to_f16(range / kMost), float_to_f16(least)};
  for (int attempt = 0; attempt <= kTries && range > 0.0f; ++attempt) {
    const float inverse = (static_cast<float>(kMost) - 1.0f + 0.1f * static_cast<float>(attempt)) / range;
    float sum_q = 0.0f, sum_qq = 0.0f, sum_qx = 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const float q = std::min(static_cast<float>(kMost), std::nearbyint(inverse * (x[i] - least)));
      sum_q += weights[i] * q;
      sum_qq += weights[i] * q * q;
      sum_qx += weights[i] * q * x[i];
    }
    const float determinant = sum_w * sum_qq - sum_q * sum_q;
    const bool first = attempt == 0;
    if (!first && determinant <= 0.0f) continue;
    const uint16_t d_bits = first ? found[0] : float_to_f16((sum_w * sum_qx - sum_x * sum_q) / determinant);
    const uint16_t m_bits = first ? found[1] : float_to_f16((sum_qq * sum_x - sum_q * sum_qx) / determinant);
    const float d = f16_to_float(d_bits), m = f16_to_float(m_bits), turned = inverse_of(d);
    float error = 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const float raw = std::nearbyint((x[i] - m) * turned);
      const float q = raw < 0.0f ? 0.0f : raw > static_cast<float>(kMost) ? static_cast<float>(kMost) : raw;
      const float off = d * q + m - x[i];
      error += weights[i] * off * off;
    }
    if (best < 0.0f || error < best) {
      best = error;
      found[0] = d_bits;
      found[1] = m_bits;
    }
  }
  head[0] = found[0];
  head[1] = found[1];
  const float m = f16_to_float(found[1]), turned = inverse_of(f16_to_float(found[0]));
  for (int i = 0; i < kBlock; ++i) codes[i] = code_of((x[i] - m) * turned, kMost);
}

void fit_q8_0(const float* x, uint16_t* head, uint8_t* codes) {
  float most = 0.0f;
  for (int i = 0; i < 32; ++i) most = std::max(most, std::fabs(x[i]));
  head[0] = float_to_f16(most / 127.0f);
  head[1] = 0;
  const float turned = inverse_of(f16_to_float(head[0]));
  for (int i = 0; i < 32; ++i) {
    const float q = std::nearbyint(x[i] * turned);
    codes[i] = static_cast<uint8_t>(static_cast<int>(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q) + 128);
  }
}

}  // namespace

int source_block_values(SourceType type) { return kLayouts[static_cast<int>(type)].values; }
int source_block_bytes(SourceType type) { return kLayouts[static_cast<int>(type)].bytes; }

bool keeps(SourceType type, DType dtype) { return dtype >= DType::f8 && kept_as(type) == dtype; }

void to_codes(SourceType type, const void* row, int k, const RowCodes& out) {
  const int values = source_block_values(type), bytes = source_block_bytes(type);
  const uint8_t* from = static_cast<const uint8_t*>(row);
  for (int block = 0; type == SourceType::f8 && block * values < k; ++block) {
    std::memcpy(out.heads + 2 * block, from + block * bytes, 4);
    std::memcpy(out.codes + block * values, from + block * bytes + 4, values);
  }
  if (type == SourceType::f8) return;
  for (int block = 0; block * values < k; ++block, from += bytes)
    block_codes(type, from, out.codes + block * values, out.heads + 2 * block, out.parts + 16 * block);
}

void to_float(SourceType type, const void* row, int k, float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(row);
  const uint8_t* from = static_cast<const uint8_t*>(row);
  if (type == SourceType::f32) {
    std::memcpy(out, row, k * sizeof(float));
    return;
  }
  if (type == SourceType::bf16 || type == SourceType::f16) {
    for (int i = 0; i < k; ++i) out[i] = type == SourceType::bf16 ? bf16_to_float(half[i]) : f16_to_float(half[i]);
    return;
  }
  const int values = source_block_values(type), bytes = source_block_bytes(type);
  for (int i = 0; i < k; i += values, from += bytes) {
    if (type == SourceType::f8) {
      const float d = float_of(word_at(from));
      for (int j = 0; j < values; ++j) out[i + j] = d * bf16_to_float(f8_to_bf16(from[4 + j]));
    } else if (type == SourceType::q2_k) {
      q2_to_float(from, out + i);
    } else if (type == SourceType::iq4_xs) {
      iq4_xs_to_float(from, out + i);
    } else {
      uint8_t codes[256], parts[16];
      uint16_t head[2];
      block_codes(type, from, codes, head, parts);
      codes_to_float(block_form(kept_as(type)), codes, head, parts, values, out + i);
    }
  }
}

void quantise(DType dtype, const float* row, int k, const RowCodes& out) {
  for (int block = 0; 32 * block < k; ++block)
    (dtype == DType::q4_1 ? fit_q4_1 : fit_q8_0)(row + 32 * block, out.heads + 2 * block, out.codes + 32 * block);
}

}  // namespace maitred
