// What is the same on every instruction set: shapes, packing, unpacking, handing out rows.
#include "linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "bits.h"

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

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// One tile's rows in float32, [32][padded k]; zeros in the padding.
struct TileRows {
  std::vector<float> values;
  int k;
  const float* row(int lane) const { return values.data() + static_cast<int64_t>(lane) * k; }
};

void load_tile(const LinearShape& shape, const SourceRows* sources, int tile, TileRows& rows) {
  rows.k = padded_k(shape);
  rows.values.assign(static_cast<size_t>(rows.k) * kTile, 0.0f);
  for (int lane = 0; lane < kTile; ++lane) {
    const int row = row_of(shape, tile, lane);
    if (row < 0) continue;
    SourceType type;
    const void* source = source_row(sources, row, type);
    to_float(type, source, shape.k, rows.values.data() + static_cast<int64_t>(lane) * rows.k);
  }
}

float absmax(const float* x, int n) {
  float most = 0.0f;
  for (int i = 0; i < n; ++i) most = std::max(most, std::fabs(x[i]));
  return most;
}

void pack_f32(const TileRows& rows, uint8_t* out) {
  float* to = reinterpret_cast<float*>(out);
  for (int lane = 0; lane < kTile; ++lane)
    for (int i = 0; i < rows.k; ++i) to[i * kTile + lane] = rows.row(lane)[i];
}

void pack_bf16(const TileRows& rows, uint8_t* out) {
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  for (int lane = 0; lane < kTile; ++lane) {
    const float* from = rows.row(lane);
    for (int i = 0; i < rows.k; i += 2) {
      to[i * kTile + 2 * lane] = float_to_bf16(from[i]);
      to[i * kTile + 2 * lane + 1] = float_to_bf16(from[i + 1]);
    }
  }
}

void pack_int8(const TileRows& rows, uint8_t* out, float* scales) {
  std::vector<uint8_t> quantised(rows.k);
  for (int lane = 0; lane < kTile; ++lane) {
    const float* from = rows.row(lane);
    const float scale = absmax(from, rows.k) / 127.0f;
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    scales[lane] = scale;
    for (int i = 0; i < rows.k; ++i)
      quantised[i] = static_cast<uint8_t>(clamp(nearest(from[i] * inverse), -127, 127) + 128);
    for (int i = 0; i < rows.k; i += 4) std::memcpy(out + i * kTile + 4 * lane, quantised.data() + i, 4);
  }
}

// The scale makes the value of largest magnitude -8, for there is no +8: all sixteen codes are in use.
void quantise_group(const float* from, int group, uint8_t* codes, uint16_t& scale_bits) {
  float extreme = 0.0f;
  for (int i = 0; i < group; ++i)
    if (std::fabs(from[i]) > std::fabs(extreme)) extreme = from[i];
  scale_bits = float_to_bf16(extreme / -8.0f);
  const float scale = bf16_to_float(scale_bits);
  const float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < group; ++i) codes[i] = static_cast<uint8_t>(clamp(nearest(from[i] * inverse), -8, 7) + 8);
}

void pack_int4(const TileRows& rows, int group, uint8_t* out) {
  std::vector<uint8_t> codes(static_cast<size_t>(group) * kTile);
  for (int begin = 0; begin < rows.k; begin += group) {
    uint16_t* scales = reinterpret_cast<uint16_t*>(out);
    for (int lane = 0; lane < kTile; ++lane)
      quantise_group(rows.row(lane) + begin, group, codes.data() + lane * group, scales[lane]);
    out += kTile * sizeof(uint16_t);
    for (int i = 0; i < group; i += 4)
      for (int lane = 0; lane < kTile / 2; ++lane)
        for (int j = 0; j < 4; ++j)
          *out++ = static_cast<uint8_t>(codes[lane * group + i + j] | codes[(lane + kTile / 2) * group + i + j] << 4);
  }
}

float* tail(const LinearShape& shape, uint8_t* data) {
  return reinterpret_cast<float*>(data + num_tiles(shape) * tile_bytes(shape));
}

void pack_tile(const LinearShape& shape, const SourceRows* sources, const float* bias, int tile, TileRows& rows,
               uint8_t* out) {
  load_tile(shape, sources, tile, rows);
  uint8_t* to = out + tile * tile_bytes(shape);
  float* behind = tail(shape, out);
  if (shape.dtype == DType::f32) pack_f32(rows, to);
  if (shape.dtype == DType::bf16) pack_bf16(rows, to);
  if (shape.dtype == DType::int4) pack_int4(rows, shape.group, to);
  if (shape.dtype == DType::int8) {
    pack_int8(rows, to, behind + tile * kTile);
    behind += num_tiles(shape) * kTile;
  }
  if (!shape.bias) return;
  for (int lane = 0; lane < kTile; ++lane) {
    const int row = row_of(shape, tile, lane);
    behind[tile * kTile + lane] = row < 0 ? 0.0f : bias[row];
  }
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
  TileRows rows;
  for (int tile = counter.take(); tile < num_tiles(shape); tile = counter.take())
    pack_tile(shape, sources, bias, tile, rows, out);
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
  return round_up(k, 128) * size;
}

int sums_per_row(const LinearShape& shape) {
  if (shape.dtype == DType::int8) return 1;
  return shape.dtype == DType::int4 ? padded_k(shape) / shape.group : 0;
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
