// Linears: packed weights, rows made ready for them, and the products with their endings.
//
// A packed matrix is one flat buffer (64-byte aligned, no pointers in it) that is the same for every instruction set:
// tiles of 32 output channels, and in a tile K runs slowest, so a thread streams its tiles from front to back. One step
// of K in a tile is 32 channels x {1 f32 | 2 bf16 | 4 int8} = 128 bytes, or 32 channels x 1 f16 = 64 bytes:
//   f32, bf16, f16  [tile][step][channel][values]
//   int8            the same, as u8 = q + 128, of rows that are rotated block by block (rotate.h), as the rows that
//   they
//                   meet are before those are rounded; H w ~ block * scale * q, one f32 scale a channel, after the
//                   tiles
//   f8              [tile][unit of 128 values] of: f32 scales of 32 channels, then [step of 2][channel][values], each
//                   value a byte (E4M3): 4224 bytes, which are multiplied as bf16
//   block formats   [tile][unit] of: D of 32 channels, M of 32 channels where there is a minimum (f16; block_form.h),
//   then for each 32
//                   values: [2][channel] parts (where the form has them), and codes in 8 steps of 4 values:
//                     8 bits      [step][channel][4 bytes]
//                     4, 5, 6     [step][channel of 16][4 bytes], whose low nibble belongs to that channel and whose
//                                 high nibble to that channel + 16; then the fifth bits [step][channel][4 bits], or the
//                                 upper two bits [pair of steps][channel of 16][4 bytes], two bits each of: even step,
//                                 channel; even step, channel + 16; odd step, channel; odd step, channel + 16
// After the tiles: f32 scales (int8), then f32 biases (where there are any), in tile order, padded to whole tiles.
// A gated pair (gate over up, 2 I rows) has 16 gate channels in the lower half of a tile and their up channels above.
//
// Every output is summed over K in one order, whatever M, blocking or thread: lanes are channels, K goes upwards (int32
// sums are exact anyway; block formats add their blocks' sums in f32, block after block). So a row's result is a
// function of that row alone, bit for bit, within one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block_form.h"
#include "gguf_blocks.h"
#include "isa.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

constexpr int kPackVersion = 3;  // of the layout above
constexpr int kTile = 32;        // output channels of a tile
constexpr int kF8Unit = 128;     // values of a channel that share a scale
constexpr int kF8UnitBytes = kTile * (static_cast<int>(sizeof(float)) + kF8Unit);

struct LinearShape {
  DType dtype;
  int n;       // rows of the matrix as stacked: q, k, v one after the other; of a gated pair both halves
  int k;       // values of a row
  bool gated;  // rows are gate over up
  bool bias;
};

// Null if the shape can be packed, else what is wrong with it.
const char* shape_fault(const LinearShape& shape);

int num_tiles(const LinearShape& shape);
int out_width(const LinearShape& shape);  // n, or n / 2 of a gated pair
int64_t tile_bytes(const LinearShape& shape);
int64_t packed_bytes(const LinearShape& shape);

struct PackedLinear {
  LinearShape shape;
  const uint8_t* data;  // packed_bytes(shape), 64-byte aligned
};

// Some consecutive rows of a matrix to pack, as a checkpoint has them.
struct SourceRows {
  SourceType type;
  const void* rows;
  int64_t row_stride;  // bytes
  int num_rows;
};

// Packs the stacked sources (num_rows add up to shape.n). bias: [n] f32 in row order, null where shape.bias is false.
// All workers call it with one counter, fresh; meet afterwards.
void pack_linear(const LinearShape& shape, const SourceRows* sources, int num_sources, const float* bias, uint8_t* out,
                 WorkCounter& counter, const Worker& worker);

// Row `row` (as stacked) in float32, k values: an embedding looked up in a tied output matrix.
void unpack_row(const PackedLinear& weights, int row, float* out);

// --- rows ---

// Bytes of a prepared row, its padding included; it serves weights of any format that takes this dtype. Values at and
// behind k are zero.
int64_t operand_row_bytes(DType operand_dtype, int k);
DType operand_dtype(DType weight_dtype);

// int32s in Operand::sums for each row: 1 for int8 weights (-128 * sum of q), what the products of the unsigned weights
// start from; kSumsPerBlock for every 32 values for block formats (block_form.h); 0 for the others.
int sums_per_row(const LinearShape& shape);

// Rows to prepare: x[index ? index[i] : i], RMS-normed where norm_weight is given: x / sqrt(mean(x^2) + eps) * weight.
struct PrepareSource {
  const float* rows;
  int64_t row_stride;        // floats
  const int32_t* index;      // null: rows as they stand
  const float* norm_weight;  // [k], null: no norm
  float eps;
  bool rotated = false;            // for int8 weights: rows come as H x / block already
  const int32_t* order = nullptr;  // [k] of weights whose columns were sorted: value i of a prepared row is order[i]
};

// --- the product ---

enum class Ending : uint8_t {
  store,  // out  = cap(alpha * (acc + bias))
  add,    // out += alpha * (acc + bias)
  gate,   // out  = act(gate + bias) * (up + bias); only and always for gated weights
  act,    // out  = act(acc + bias)
};
// clamped_swiglu: (up' + 1) * gate' * sigmoid(alpha * gate'), with gate' = min(gate, softcap) and up' within +-softcap.
enum class GateAct : uint8_t { silu, gelu, gelu_tanh, clamped_swiglu };

struct LinearOut {
  float* rows;
  int64_t row_stride;  // floats
  Ending ending = Ending::store;
  float alpha = 1.0f;
  float softcap = 0.0f;  // store only: cap(y) = softcap * tanh(y / softcap); 0 leaves y
  GateAct act = GateAct::silu;
  bool half = false;  // act and gate in whole tiles: each row is written in bf16, into its first half
  // What is added to acc before the ending, by row: null for nothing, else a value for each channel, tile by tile.
  const float* const* deltas = nullptr;
  int first_delta = 0;  // of the first tile
};

// What multiplies: an instruction by its name, and the rows that its inner loop takes.
struct LinearProduct {
  const char* name;
  int rows_at_once;
};

struct LinearKernels {
  // Rows first .. last - 1 on this thread alone. A row's bits depend on nothing but the row, so each worker may just as
  // well prepare a copy of its own, where a barrier would cost more than the work (a row or two).
  void (*prepare)(const PrepareSource& source, const LinearShape& shape, int first, int last, const Operand& out);
  // row = (row - mean) / sqrt(variance + eps) * weight + bias, k values (Ba et al., arXiv:1607.06450).
  void (*layer_norm)(float* row, int k, const float* weight, const float* bias, float eps);
  // rows m x packed weights, called by all workers with one fresh counter. out may not overlap the operand.
  void (*linear)(const PackedLinear& weights, const Operand& rows, int m, const LinearOut& out, WorkCounter& counter,
                 const Worker& worker);
  // For m rows.
  LinearProduct (*product)(const LinearShape& weights, int m);
};

const LinearKernels& linear_kernels(Isa isa);

// prepare for m rows, handed out to all workers.
void prepare_rows(const LinearKernels& kernels, const PrepareSource& source, const LinearShape& shape, int m,
                  const Operand& out, WorkCounter& counter, const Worker& worker);

extern const LinearKernels kLinearPlain;
#if defined(__x86_64__)
extern const LinearKernels kLinearAvx2;
extern const LinearKernels kLinearAvx512;
extern const LinearKernels kLinearAmx;
#elif defined(__aarch64__)
extern const LinearKernels kLinearNeon;
#endif

}  // namespace maitred
