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

// Values of one channel in a step of K; of block formats, where codes are bytes until they are written.
int step_values(DType dtype) { return dtype == DType::f32 || dtype == DType::f16 ? 1 : dtype == DType::bf16 ? 2 : 4; }

int unit_values(DType dtype) { return dtype == DType::f8 ? kF8Unit : block_form(dtype).unit; }
bool has_units(DType dtype) { return dtype == DType::f8 || is_blocked(dtype); }

int padded_k(const LinearShape& shape) {
  return static_cast<int>(
      round_up(shape.k, has_units(shape.dtype) ? unit_values(shape.dtype) : step_values(shape.dtype)));
}

int num_units(const LinearShape& shape) {
  return has_units(shape.dtype) ? padded_k(shape) / unit_values(shape.dtype) : 0;
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

// A tile on its way: each channel's steps of K as units of 4 bytes, padded with zeros.
struct TileUnits {
  int stride;  // units from one channel to the next; no multiple of a page, for such lines share a cache set
  std::vector<uint32_t> units;
  std::vector<float> row;       // one channel in float32, where it is converted
  std::vector<uint16_t> heads;  // block formats: [channel][unit][2]
  std::vector<uint8_t> parts;   // [channel][unit][16]

  explicit TileUnits(const LinearShape& shape)
      : stride(padded_k(shape) / (shape.dtype == DType::f16 ? 2 : step_values(shape.dtype)) + 17),
        units(static_cast<size_t>(stride) * kTile),
        row(padded_k(shape)),
        heads(static_cast<size_t>(num_units(shape)) * 2 * kTile),
        parts(static_cast<size_t>(num_units(shape)) * 16 * kTile) {}
  uint32_t* channel(int lane) { return units.data() + static_cast<int64_t>(lane) * stride; }
  RowCodes codes(const LinearShape& shape, int lane) {
    const int64_t first = static_cast<int64_t>(lane) * num_units(shape);
    return {reinterpret_cast<uint8_t*>(channel(lane)), heads.data() + 2 * first, parts.data() + 16 * first};
  }
};

// Reads and converts one channel; returns its scale (int8).
float load_channel(const LinearShape& shape, SourceType type, const void* source, int lane, TileUnits& tile) {
  uint32_t* units = tile.channel(lane);
  float* row = tile.row.data();
  const bool as_it_is = (shape.dtype == DType::bf16 && type == SourceType::bf16) ||
                        (shape.dtype == DType::f16 && type == SourceType::f16);
  if (as_it_is) {
    std::memcpy(units, source, shape.k * sizeof(uint16_t));
    return 0.0f;
  }
  if (keeps(type, shape.dtype)) {
    to_codes(type, source, shape.k, tile.codes(shape, lane));
    return 0.0f;
  }
  to_float(type, source, shape.k, row);
  if (shape.dtype == DType::f32) std::memcpy(units, row, shape.k * sizeof(float));
  if (shape.dtype == DType::bf16 || shape.dtype == DType::f16)
    for (int i = 0; i < shape.k; ++i)
      reinterpret_cast<uint16_t*>(units)[i] = shape.dtype == DType::f16 ? float_to_f16(row[i]) : float_to_bf16(row[i]);
  if (shape.dtype == DType::int8) {
    rotate(row, shape.k);
    return quantise_int8(row, padded_k(shape), reinterpret_cast<uint8_t*>(units)) /
           static_cast<float>(rotation_block(shape.k));
  }
  if (is_blocked(shape.dtype)) quantise(shape.dtype, row, shape.k, tile.codes(shape, lane));
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

// The same for values of two bytes.
void transpose_halves(TileUnits& tile, int first, int steps, uint8_t* out) {
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  for (int lane = 0; lane < kTile; ++lane) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(tile.channel(lane)) + first;
    for (int step = 0; step < steps; ++step) to[step * kTile + lane] = from[step];
  }
}

// 32 values' codes of all channels, from step `first` of their units on.
void write_block(int bits, TileUnits& tile, int first, uint8_t* out) {
  if (bits == 8) return transpose(tile, kTile, first, 8, out);
  uint32_t* nibbles = reinterpret_cast<uint32_t*>(out);
  uint8_t* fifths = out + 8 * 64;
  uint32_t* twos = reinterpret_cast<uint32_t*>(fifths);
  std::memset(fifths, 0, 128 * (bits - 4));
  for (int lane = 0; lane < kTile / 2; ++lane) {
    const uint32_t *low = tile.channel(lane) + first, *high = tile.channel(lane + kTile / 2) + first;
    for (int step = 0; step < 8; ++step)
      nibbles[16 * step + lane] = (low[step] & 0x0f0f0f0fu) | (high[step] & 0x0f0f0f0fu) << 4;
    for (int step = 0; bits == 5 && step < 8; ++step) {
      const uint32_t a = (low[step] >> 4 & 0x01010101u) * 0x01020408u >> 24 & 15;
      const uint32_t b = (high[step] >> 4 & 0x01010101u) * 0x01020408u >> 24 & 15;
      fifths[16 * step + lane / 2] |= static_cast<uint8_t>(a << 4 * (lane % 2));
      fifths[16 * step + 8 + lane / 2] |= static_cast<uint8_t>(b << 4 * (lane % 2));
    }
    for (int step = 0; bits == 6 && step < 8; ++step)
      twos[16 * (step / 2) + lane] |= ((low[step] >> 4 & 0x03030303u) | (high[step] >> 4 & 0x03030303u) << 2)
                                      << 4 * (step % 2);
  }
}

void write_units(const LinearShape& shape, TileUnits& tile, uint8_t* out) {
  const BlockForm form = block_form(shape.dtype);
  const int units = num_units(shape);
  for (int unit = 0; unit < units; ++unit) {
    uint16_t* heads = reinterpret_cast<uint16_t*>(out);
    for (int lane = 0; lane < kTile; ++lane) {
      const uint16_t* from = tile.heads.data() + 2 * (static_cast<int64_t>(lane) * units + unit);
      heads[lane] = from[0];
      if (form.minimum || form.wide) heads[kTile + lane] = from[1];
    }
    out += form.head_bytes();
    for (int block = 0; block < form.blocks(); ++block) {
      for (int lane = 0; form.parts && lane < kTile; ++lane) {
        const uint8_t* from = tile.parts.data() + 16 * (static_cast<int64_t>(lane) * units + unit) + 2 * block;
        out[lane] = from[0];
        out[kTile + lane] = from[1];
      }
      if (form.parts) out += 64;
      write_block(form.bits, tile, (unit * form.blocks() + block) * 8, out);
      out += 128 * form.bits;
    }
  }
}

void write_f8(const LinearShape& shape, TileUnits& tile, uint8_t* out) {
  constexpr int kSteps = kF8Unit / 2;
  const int units = num_units(shape);
  for (int unit = 0; unit < units; ++unit, out += kF8UnitBytes) {
    for (int lane = 0; lane < kTile; ++lane)
      std::memcpy(out + lane * sizeof(float), tile.heads.data() + 2 * (int64_t{lane} * units + unit), sizeof(float));
    transpose_halves(tile, unit * kSteps, kSteps, out + kTile * sizeof(float));
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
      const int64_t units = num_units(shape);
      std::fill_n(tile.channel(lane), tile.stride, 0u);
      std::fill_n(tile.heads.begin() + 2 * units * lane, 2 * units, uint16_t{0});
      std::fill_n(tile.parts.begin() + 16 * units * lane, 16 * units, uint8_t{0});
    } else {
      SourceType type;
      const void* source = source_row(sources, row, type);
      scale = load_channel(shape, type, source, lane, tile);
    }
    if (shape.dtype == DType::int8) scales[lane] = scale;
    if (shape.bias) biases[lane] = row < 0 ? 0.0f : bias[row];
  }
  uint8_t* to = out + index * tile_bytes(shape);
  if (is_blocked(shape.dtype))
    write_units(shape, tile, to);
  else if (shape.dtype == DType::f8)
    write_f8(shape, tile, to);
  else if (shape.dtype == DType::f16)
    transpose_halves(tile, 0, shape.k, to);
  else
    transpose(tile, kTile, 0, padded_k(shape) / step_values(shape.dtype), to);
}

}  // namespace

const char* shape_fault(const LinearShape& shape) {
  if (shape.n < 1 || shape.k < 1) return "a matrix needs at least one row and one column";
  if (shape.k > 65536) return "rows longer than 65,536 values overflow the int32 sums";
  if (shape.gated && shape.n % 2 != 0) return "a gated pair needs an even number of rows, gate over up";
  if (is_blocked(shape.dtype) && block_form(shape.dtype).parts && shape.k % 256 != 0)
    return "rows of super-blocks are multiples of 256 values";
  return nullptr;
}

int out_width(const LinearShape& shape) { return shape.gated ? shape.n / 2 : shape.n; }

int num_tiles(const LinearShape& shape) {
  const int width = shape.gated ? kTile / 2 : kTile;
  return (out_width(shape) + width - 1) / width;
}

int64_t tile_bytes(const LinearShape& shape) {
  const int64_t k = padded_k(shape);
  if (is_blocked(shape.dtype)) return int64_t{num_units(shape)} * block_form(shape.dtype).unit_bytes();
  if (shape.dtype == DType::f8) return int64_t{num_units(shape)} * kF8UnitBytes;
  return k * kTile * (shape.dtype == DType::f32 ? 4 : shape.dtype == DType::int8 ? 1 : 2);
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

namespace {

// One channel of a tile of units.
void unpack_units(const LinearShape& shape, const uint8_t* from, int lane, float* out) {
  const BlockForm form = block_form(shape.dtype);
  for (int unit = 0; unit < shape.k; unit += form.unit, from += form.unit_bytes()) {
    const uint8_t* block = from + form.head_bytes();
    for (int begin = unit; begin < unit + form.unit; begin += 32, block += form.block_bytes()) {
      const ChannelScales scales = channel_scales(form, from, block, lane);
      const uint8_t* codes = block + (form.parts ? 64 : 0);
      const int count = std::min(32, shape.k - begin);
      for (int i = 0; i < count; ++i) {
        const float value =
            scales.d[i / 16] * static_cast<float>(code_at(form, codes, lane, i / 4, i % 4) - form.offset);
        out[begin + i] = form.minimum ? value + scales.m : value;
      }
    }
  }
}

}  // namespace

void unpack_row(const PackedLinear& weights, int row, float* out) {
  const LinearShape& shape = weights.shape;
  const int half = shape.n / 2;
  const int within = shape.gated ? row % half : row, width = shape.gated ? kTile / 2 : kTile;
  const int tile = within / width, lane = within % width + (shape.gated && row >= half ? kTile / 2 : 0);
  const uint8_t* from = weights.data + tile * tile_bytes(shape);
  if (is_blocked(shape.dtype)) return unpack_units(shape, from, lane, out);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
  const float scale =
      shape.dtype == DType::int8 ? tail(shape, const_cast<uint8_t*>(weights.data))[tile * kTile + lane] : 0.0f;
  for (int i = 0; i < shape.k; ++i) {
    if (shape.dtype == DType::f32) out[i] = reinterpret_cast<const float*>(from)[i * kTile + lane];
    if (shape.dtype == DType::f16) out[i] = f16_to_float(halves[i * kTile + lane]);
    if (shape.dtype == DType::f8) {
      const uint8_t* unit = from + i / kF8Unit * kF8UnitBytes;
      const uint8_t* codes = unit + kTile * sizeof(float) + i % kF8Unit / 2 * 2 * kTile;
      out[i] = reinterpret_cast<const float*>(unit)[lane] * bf16_to_float(f8_to_bf16(codes[2 * lane + i % 2]));
    }
    if (shape.dtype == DType::bf16) out[i] = bf16_to_float(halves[i / 2 * 2 * kTile + 2 * lane + i % 2]);
    if (shape.dtype == DType::int8)
      out[i] = scale * static_cast<float>(from[i / 4 * 4 * kTile + 4 * lane + i % 4] - 128);
  }
  if (shape.dtype == DType::int8) rotate(out, shape.k);
}

DType operand_dtype(DType weight_dtype) {
  if (is_blocked(weight_dtype)) return DType::q8_0;
  return weight_dtype == DType::f16 ? DType::f32 : weight_dtype == DType::f8 ? DType::bf16 : weight_dtype;
}

int64_t operand_row_bytes(DType operand_dtype, int k) {
  const int size = operand_dtype == DType::f32 ? 4 : operand_dtype == DType::bf16 ? 2 : 1;
  const int64_t lines = round_up(k, 128) * size / 64;
  return (lines | 1) * 64;  // an odd number of cache lines: rows that are read together lie in sets of their own
}

int sums_per_row(const LinearShape& shape) {
  if (shape.dtype == DType::int8) return 1;
  return is_blocked(shape.dtype) ? kSumsPerBlock * (padded_k(shape) / 32) : 0;
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
