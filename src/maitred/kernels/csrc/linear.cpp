// What is the same on every instruction set: shapes, packing, unpacking, handing out rows.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "bits.h"
#include "rotate.h"

namespace maitred {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Values of one channel in a step of K.
int step_values(DType dtype) { return dtype == DType::f32 ? 1 : dtype == DType::bf16 ? 2 : 4; }

int padded_k(const LinearShape& shape) {
  return static_cast<int>(round_up(shape.k, shape.dtype == DType::int4 ? shape.group : step_values(shape.dtype)));
}

// The row of the stacked matrix that is channel `lane` of a tile, or -1 in the padding.
int row_of(const LinearShape& shape, int tile, int lane) {
  if (!shape.gated) {
    const int row = tile * kTile + lane;
    return row < shape.n ? row : -1;
  }
  const int half = shape.n / 2, within = tile * (kTile / 2) + lane % (kTile / 2);
  return within >= half ? -1 : lane < kTile / 2 ? within : half + within;
}

const uint8_t* source_row(const SourceRows* sources, int row, SourceType& type) {
  while (row >= sources->num_rows) row -= (sources++)->num_rows;
  type = sources->type;
  return static_cast<const uint8_t*>(sources->rows) + row * sources->row_stride;
}

void to_float(SourceType type, const void* row, int k, float* out) {
  const uint16_t* half = static_cast<const uint16_t*>(row);
  if (type == SourceType::f32) {
    std::memcpy(out, row, k * sizeof(float));
  } else if (type == SourceType::bf16) {
    for (int i = 0; i < k; ++i) out[i] = bf16_to_float(half[i]);
  } else {
    for (int i = 0; i < k; ++i) out[i] = f16_to_float(half[i]);
  }
}

// Round to nearest even for |x| < 2^22, in a form that compilers vectorise.
inline int32_t nearest(float x) { return static_cast<int32_t>(bits_of(x + 12582912.0f)) - 0x4b400000; }

inline float inverse_of(float scale) { return std::fabs(scale) > 1e-30f ? 1.0f / scale : 0.0f; }

// Least and largest of n values, n a multiple of 4, and of zero.
struct Range {
  float least, largest;
};

Range range_of(const float* x, int n) {
  float low[4] = {}, high[4] = {};
  for (int i = 0; i < n; i += 4)
    for (int j = 0; j < 4; ++j) {
      low[j] = x[i + j] < low[j] ? x[i + j] : low[j];
      high[j] = x[i + j] > high[j] ? x[i + j] : high[j];
    }
  return {std::min(std::min(low[0], low[1]), std::min(low[2], low[3])),
          std::max(std::max(high[0], high[1]), std::max(high[2], high[3]))};
}

float quantise_int8(const float* from, int k, uint8_t* codes) {
  const Range range = range_of(from, k);
  const float scale = std::max(-range.least, range.largest) / 127.0f;
  const float inverse = inverse_of(scale);
  for (int i = 0; i < k; ++i) codes[i] = static_cast<uint8_t>(nearest(from[i] * inverse) + 128);
  return scale;
}

// The scale, in bf16, makes the value of largest magnitude -8, for there is no +8: all sixteen codes are in use.
uint16_t quantise_int4(const float* from, int group, uint8_t* codes) {
  const Range range = range_of(from, group);
  const uint16_t bits = float_to_bf16((range.largest > -range.least ? range.largest : range.least) / -8.0f);
  const float inverse = inverse_of(bf16_to_float(bits));
  for (int i = 0; i < group; ++i) {
    const int32_t q = nearest(from[i] * inverse);
    codes[i] = static_cast<uint8_t>((q > 7 ? 7 : q < -8 ? -8 : q) + 8);
  }
  return bits;
}

// A tile on its way: each channel's steps of K as units of 4 bytes, padded with zeros.
struct TileUnits {
  int stride;  // units from one channel to the next; no multiple of a page, for such lines share a cache set
  std::vector<uint32_t> units;
  std::vector<float> row;        // one channel in float32, where it is converted
  std::vector<uint16_t> scales;  // int4: [channel][group]

  explicit TileUnits(const LinearShape& shape)
      : stride(padded_k(shape) / step_values(shape.dtype) + 16),
        units(static_cast<size_t>(stride) * kTile),
        row(padded_k(shape)),
        scales(shape.dtype == DType::int4 ? padded_k(shape) / shape.group * kTile : 0) {}
  uint32_t* channel(int lane) { return units.data() + static_cast<int64_t>(lane) * stride; }
};

// Reads and converts one channel; returns its scale (int8).
float load_channel(const LinearShape& shape, SourceType type, const void* source, int lane, TileUnits& tile) {
  uint32_t* units = tile.channel(lane);
  float* row = tile.row.data();
  uint8_t* codes = reinterpret_cast<uint8_t*>(units);
  if (shape.dtype == DType::bf16 && type == SourceType::bf16) {
    std::memcpy(units, source, shape.k * sizeof(uint16_t));
    return 0.0f;
  }
  to_float(type, source, shape.k, row);
  if (shape.dtype == DType::f32) std::memcpy(units, row, shape.k * sizeof(float));
  if (shape.dtype == DType::bf16)
    for (int i = 0; i < shape.k; ++i) reinterpret_cast<uint16_t*>(units)[i] = float_to_bf16(row[i]);
  if (shape.dtype == DType::int8) {
    rotate(row, shape.k);
    return quantise_int8(row, padded_k(shape), codes) / static_cast<float>(rotation_block(shape.k));
  }
  if (shape.dtype == DType::int4) {
    const int groups = padded_k(shape) / shape.group;
    for (int g = 0; g < groups; ++g)
      tile.scales[lane * groups + g] = quantise_int4(row + g * shape.group, shape.group, codes + g * shape.group);
  }
  return 0.0f;
}

// Turns `steps` units of each channel, from `first` on, into [step][channel], block by block.
void transpose(TileUnits& tile, int lanes, int first, int steps, uint8_t* out) {
  constexpr int kBlock = 16;
  uint32_t* to = reinterpret_cast<uint32_t*>(out);
  for (int begin = 0; begin < steps; begin += kBlock) {
    const int end = std::min(begin + kBlock, steps);
    for (int lane = 0; lane < lanes; ++lane) {
      const uint32_t* from = tile.channel(lane) + first;
      for (int step = begin; step < end; ++step) to[step * lanes + lane] = from[step];
    }
  }
}

// The upper sixteen channels go into the high nibbles of the lower sixteen.
void write_int4(const LinearShape& shape, TileUnits& tile, uint8_t* out) {
  const int k = padded_k(shape), groups = k / shape.group;
  for (int lane = 0; lane < kTile / 2; ++lane) {
    uint32_t* low = tile.channel(lane);
    const uint32_t* high = tile.channel(lane + kTile / 2);
    for (int step = 0; step < k / 4; ++step) low[step] |= high[step] << 4;
  }
  for (int g = 0; g < groups; ++g, out += kTile * 2 + shape.group * kTile / 2) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(out);
    for (int lane = 0; lane < kTile; ++lane) scales[lane] = tile.scales[lane * groups + g];
    transpose(tile, kTile / 2, g * shape.group / 4, shape.group / 4, out + kTile * 2);
  }
}

float* tail(const LinearShape& shape, uint8_t* data) {
  return reinterpret_cast<float*>(data + num_tiles(shape) * tile_bytes(shape));
}

void pack_tile(const LinearShape& shape, const SourceRows* sources, const float* bias, int index, TileUnits& tile,
               uint8_t* out) {
  float* scales = tail(shape, out) + index * kTile;
  float* biases = scales + (shape.dtype == DType::int8 ? num_tiles(shape) * kTile : 0);
  for (int lane = 0; lane < kTile; ++lane) {
    const int row = row_of(shape, index, lane);
    float scale = 0.0f;
    if (row < 0) {
      std::fill_n(tile.channel(lane), tile.stride, 0u);
      std::fill_n(tile.scales.begin() + lane * (tile.scales.size() / kTile), tile.scales.size() / kTile, 0);
    } else {
      SourceType type;
      const void* source = source_row(sources, row, type);
      scale = load_channel(shape, type, source, lane, tile);
    }
    if (shape.dtype == DType::int8) scales[lane] = scale;
    if (shape.bias) biases[lane] = row < 0 ? 0.0f : bias[row];
  }
  uint8_t* to = out + index * tile_bytes(shape);
  if (shape.dtype == DType::int4)
    write_int4(shape, tile, to);
  else
    transpose(tile, kTile, 0, padded_k(shape) / step_values(shape.dtype), to);
}

}  // namespace

const char* shape_fault(const LinearShape& shape) {
  if (shape.n < 1 || shape.k < 1) return "a matrix needs at least one row and one column";
  if (shape.k > 65536) return "rows longer than 65,536 values overflow the int32 sums";
  if (shape.gated && shape.n % 2 != 0) return "a gated pair needs an even number of rows, gate over up";
  if (shape.dtype == DType::int4 && shape.group != 32 && shape.group != 64 && shape.group != 128)
    return "int4 groups are of 32, 64 or 128 values";
  if (shape.dtype != DType::int4 && shape.group != 0) return "only int4 has groups";
  return nullptr;
}

int out_width(const LinearShape& shape) { return shape.gated ? shape.n / 2 : shape.n; }

int num_tiles(const LinearShape& shape) {
  const int width = shape.gated ? kTile / 2 : kTile;
  return (out_width(shape) + width - 1) / width;
}

int64_t tile_bytes(const LinearShape& shape) {
  const int64_t k = padded_k(shape);
  if (shape.dtype == DType::int4) return k / shape.group * kTile * 2 + k * kTile / 2;
  return k * kTile * (shape.dtype == DType::f32 ? 4 : shape.dtype == DType::bf16 ? 2 : 1);
}

int64_t packed_bytes(const LinearShape& shape) {
  const int64_t channels = static_cast<int64_t>(num_tiles(shape)) * kTile;
  const int64_t floats = (shape.dtype == DType::int8 ? channels : 0) + (shape.bias ? channels : 0);
  return num_tiles(shape) * tile_bytes(shape) + floats * static_cast<int64_t>(sizeof(float));
}

void pack_linear(const LinearShape& shape, const SourceRows* sources, int, const float* bias, uint8_t* out,
                 WorkCounter& counter, const Worker&) {
  TileUnits tile(shape);
  for (int index = counter.take(); index < num_tiles(shape); index = counter.take())
    pack_tile(shape, sources, bias, index, tile, out);
}

void unpack_row(const PackedLinear& weights, int row, float* out) {
  const LinearShape& shape = weights.shape;
  const int half = shape.n / 2;
  const int within = shape.gated ? row % half : row, width = shape.gated ? kTile / 2 : kTile;
  const int tile = within / width, lane = within % width + (shape.gated && row >= half ? kTile / 2 : 0);
  const uint8_t* from = weights.data + tile * tile_bytes(shape);
  if (shape.dtype == DType::f32) {
    for (int i = 0; i < shape.k; ++i) out[i] = reinterpret_cast<const float*>(from)[i * kTile + lane];
  } else if (shape.dtype == DType::bf16) {
    const uint16_t* values = reinterpret_cast<const uint16_t*>(from) + 2 * lane;
    for (int i = 0; i < shape.k; ++i) out[i] = bf16_to_float(values[i / 2 * 2 * kTile + i % 2]);
  } else if (shape.dtype == DType::int8) {
    const float scale = tail(shape, const_cast<uint8_t*>(weights.data))[tile * kTile + lane];
    for (int i = 0; i < shape.k; ++i)
      out[i] = scale * static_cast<float>(from[i / 4 * 4 * kTile + 4 * lane + i % 4] - 128);
    rotate(out, shape.k);
  } else {
    const int64_t group_bytes = kTile * 2 + shape.group * kTile / 2;
    const int shift = lane < kTile / 2 ? 0 : 4, place = 4 * (lane % (kTile / 2));
    for (int i = 0; i < shape.k; ++i) {
      const uint8_t* group = from + i / shape.group * group_bytes;
      const float scale = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[lane]);
      const int step = i % shape.group / 4;
      out[i] = scale * static_cast<float>((group[kTile * 2 + step * 2 * kTile + place + i % 4] >> shift & 15) - 8);
    }
  }
}

DType operand_dtype(DType weight_dtype) { return weight_dtype == DType::int4 ? DType::int8 : weight_dtype; }

int64_t operand_row_bytes(DType operand_dtype, int k) {
  const int size = operand_dtype == DType::f32 ? 4 : operand_dtype == DType::bf16 ? 2 : 1;
  const int64_t lines = round_up(k, 128) * size / 64;
  return (lines | 1) * 64;  // an odd number of cache lines: rows that are read together lie in sets of their own
}

int sums_per_row(const LinearShape& shape) {
  if (shape.dtype == DType::int8) return 1;
  return shape.dtype == DType::int4 ? 2 * (padded_k(shape) / shape.group) : 0;
}

void prepare_rows(const LinearKernels& kernels, const PrepareSource& source, const LinearShape& shape, int m,
                  const Operand& out, WorkCounter& counter, const Worker&) {
  constexpr int kRows = 4;  // of a share
  for (int first = counter.take() * kRows; first < m; first = counter.take() * kRows)
    kernels.prepare(source, shape, first, std::min(first + kRows, m), out);
}

const LinearKernels& linear_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx:
      return kLinearAmx;
    case Isa::avx512:
      return kLinearAvx512;
    case Isa::avx2:
      return kLinearAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return kLinearNeon;
#endif
    default:
      return kLinearPlain;
  }
}

}  // namespace maitred
