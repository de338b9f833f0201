// The linear of every instruction set but for its inner loops: blocking and endings; linear_prepare.h prepares rows.
//
// K is an anonymous struct of a linear_<isa>.cpp file, with a vector type K::V (vector_math.h) and
//   rows_at_once(dtype)                 rows that one call of its inner loops takes at most
//   product(dtype)                      the instruction in them that multiplies
//   f32, f16, bf16, int8 (const Block&)   products of a block
//   blocked<dtype>(const Block&)        the same of block formats
//   kEndsFromSums                       whether sums of int8 rows lack what they should have started from
// Instantiated with such a type, everything here is local to that file.
//
// Few rows: weights are what must be read, and each worker streams tiles of its own from memory.
// Rows that fit into the sums at once (one pass) are limited by memory, and the more of them the less a core sees ahead
// by itself: software prefetches 8 KB ahead make the difference between half and all of the bandwidth. Many rows:
// shares are runs of tiles x blocks of rows whose prepared form stays in the second-level cache, beside the tile that
// they pass, a few rows at a time and over all of its K, so that sums leave the registers once. Each of these passes
// prefetches a part of the next tile, so memory is read evenly all the time that products take.
#pragma once

#include "linear_prepare.h"

namespace maitred {

// Rows row 0 .. num_rows - 1 x one tile x a run of K. acc[r * 32 + lane] holds what K before the run summed to, unless
// the run is the first; f32 bits, or int32 for int8.
struct Block {
  const uint8_t* weights;
  const uint8_t* rows;
  int64_t row_stride;   // bytes
  const int32_t* sums;  // of row 0: at the run's first unit
  int sums_stride;
  int num_rows;
  int steps;  // of K (f32 and f16 1 value, bf16 2, int8 4); f8 and block formats: units
  bool first;
  void* acc;
  // What to prefetch, from `next` on: next_bytes with each step of K.
  const uint8_t* next;
  int next_bytes;
};

namespace linear_driver {

struct Limits {
  int max_rows;       // of a block
  int least_rows;     // of a block, however long they are, where there are as many
  int block_bytes;    // of a block's rows
  int run_bytes;      // of a tile, that all rows of a block pass before its next bytes
  int steps_at_once;  // of K: all runs but the last are multiples of it
};
constexpr Limits kVectorLimits{96, 24, 393216, 262144, 1};
constexpr int kAheadBytes = 8192;        // that a single pass over the weights prefetches ahead
constexpr int kLeastShareBytes = 49152;  // of weights, for up to 8 rows

struct Plan {
  int tiles;
  int rows_per_block, row_blocks;
  int steps, step_bytes, step_values;  // of a tile; f8 and block formats: units
  int run_steps;
  bool one_pass;
  int least_share;  // units
};

static inline Plan plan_of(const LinearShape& shape, int m, int chunk_rows, const Limits& limits) {
  Plan plan{};
  plan.tiles = num_tiles(shape);
  plan.step_values = is_blocked(shape.dtype)      ? block_form(shape.dtype).unit
                     : shape.dtype == DType::f8   ? kF8Unit
                     : shape.dtype == DType::int8 ? 4
                     : shape.dtype == DType::bf16 ? 2
                                                  : 1;
  plan.steps = divide_up(shape.k, plan.step_values);
  plan.step_bytes = static_cast<int>(tile_bytes(shape) / plan.steps);
  const int64_t fit = limits.block_bytes / operand_row_bytes(operand_dtype(shape.dtype), shape.k);
  plan.row_blocks = divide_up(m, fit < limits.least_rows ? limits.least_rows
                                 : fit > limits.max_rows ? limits.max_rows
                                                         : fit);
  plan.rows_per_block = divide_up(m, plan.row_blocks);
  plan.one_pass = plan.rows_per_block <= chunk_rows;
  const int run = limits.run_bytes / plan.step_bytes;
  plan.run_steps = plan.one_pass ? plan.steps : divide_up(plan.steps, divide_up(plan.steps, run < 1 ? 1 : run));
  plan.run_steps = divide_up(plan.run_steps, limits.steps_at_once) * limits.steps_at_once;
  const int64_t eights = plan.rows_per_block < 8 ? 1 : plan.rows_per_block / 8;
  plan.least_share = divide_up(kLeastShareBytes, tile_bytes(shape) * eights);
  return plan;
}

// Shares of the units of work (row block by row block, tile by tile), large ones first: a round of one share a worker
// is half of what is left, so that taking them, which costs a cache line's way between cores, is rare, and yet all
// workers end together.
struct Shares {
  int units, workers, least;
  int index = 0, first = 0, size = 0;  // of the share that `first` begins

  // Moves to share `wanted`, which is never below the one before; false if there are not that many.
  bool seek(int wanted) {
    for (;; ++index, first += size) {
      if (index % workers == 0) {
        const int half = (units - first) / (2 * workers);
        size = half > least ? half : least;
      }
      if (first >= units) return false;
      if (index == wanted) return true;
    }
  }
  int last() const { return first + size < units ? first + size : units; }
};

// --- endings ---

// What is the same for all rows of a tile, in registers where they are wide enough for it.
template <class K>
struct Tile {
  using V = typename K::V;
  static constexpr int vectors = kTile / V::width;
  const float* row_scales;     // of the first row; null for f32 and bf16
  const int32_t* starts;       // of the first row, where the products did not begin from them (K::kEndsFromSums, int8)
  const float* const* deltas;  // of the first row; null where no row has any
  int first;                   // channel of the tile
  int width;                   // values of an output row from this tile on
  bool biased;
  bool plain;         // whole, and sums are float32 that nothing is done to by row
  V scales[vectors];  // of the channels, int8
  V biases[vectors];

  Tile(const PackedLinear& weights, const Plan& plan, int tile, const float* row_scales, const int32_t* starts,
       const float* const* deltas, int first_delta)
      : row_scales(row_scales), starts(starts), deltas(deltas), first(first_delta + tile * kTile) {
    const LinearShape& shape = weights.shape;
    const float* behind = reinterpret_cast<const float*>(weights.data + plan.tiles * tile_bytes(shape));
    if (shape.dtype == DType::int8) {
      for (int i = 0; i < vectors; ++i) scales[i] = V::load(behind + tile * kTile + i * V::width);
      behind += plan.tiles * kTile;
    }
    biased = shape.bias;
    for (int i = 0; biased && i < vectors; ++i) biases[i] = V::load(behind + tile * kTile + i * V::width);
    width = out_width(shape) - tile * (shape.gated ? kTile / 2 : kTile);
    plain = shape.dtype != DType::int8 && deltas == nullptr && width >= kTile;
  }
  const float* delta_of(int row) const {
    return deltas == nullptr || deltas[row] == nullptr ? nullptr : deltas[row] + first;
  }
};

// The `i`-th vector of a row, from its sums: float32, or int32 that still lack the channels' scales.
template <class K, bool kInt32>
inline typename K::V value_at(const Tile<K>& tile, const void* acc, int row, const float* delta, int i) {
  using V = typename K::V;
  const int place = row * kTile + i * V::width;
  V y;
  if constexpr (kInt32 && K::kEndsFromSums)
    y = V::from_int32(static_cast<const int32_t*>(acc) + place, tile.starts[row]) * tile.scales[i];
  else if constexpr (kInt32)
    y = V::from_int32(static_cast<const int32_t*>(acc) + place) * tile.scales[i];
  else
    y = V::load(static_cast<const float*>(acc) + place);
  if (tile.row_scales != nullptr) y = y * V::set1(tile.row_scales[row]);
  if (delta != nullptr) y = y + V::load(delta + i * V::width);
  if (tile.biased) y = y + tile.biases[i];
  return y;
}

// Puts an activated vector: value `i` of the tile's in the row that begins at `to` of `out`.
template <class V>
inline void put_act(const LinearOut& out, float* to, int i, V y, int left) {
  if (out.half)
    V::store_bf16(reinterpret_cast<uint16_t*>(to) + i, y);
  else
    put(to + i, y, left);
}

template <class K, bool kInt32, GateAct kAct>
inline void end_gate(const Tile<K>& tile, const void* acc, int num_rows, const LinearOut& out, float* to) {
  using V = typename K::V;
  constexpr int kVectors = Tile<K>::vectors / 2;
  for (int row = 0; row < num_rows; ++row, to += out.row_stride) {
    const float* delta = tile.delta_of(row);
    for (int i = 0; i < kVectors && i * V::width < tile.width; ++i) {
      const V gate = value_at<K, kInt32>(tile, acc, row, delta, i);
      const V up = value_at<K, kInt32>(tile, acc, row, delta, kVectors + i);
      if (kAct == GateAct::clamped_swiglu) {
        const V opened = clamped_swiglu(gate, up, V::set1(out.alpha), V::set1(out.softcap));
        put_act(out, to, i * V::width, opened, tile.width - i * V::width);
        continue;
      }
      const V act = kAct == GateAct::silu ? silu(gate) : kAct == GateAct::gelu ? gelu(gate) : gelu_tanh(gate);
      put_act(out, to, i * V::width, act * up, tile.width - i * V::width);
    }
  }
}

template <class K, bool kInt32, Ending kEnding>
inline void end_plain(const Tile<K>& tile, const void* acc, int num_rows, const LinearOut& out, float* to) {
  using V = typename K::V;
  const V alpha = V::set1(out.alpha);
  if (tile.plain && out.softcap == 0.0f) {
    const float* sums = static_cast<const float*>(acc);
    for (int row = 0; row < num_rows; ++row, to += out.row_stride, sums += kTile)
      for (int i = 0; i < Tile<K>::vectors; ++i) {
        V y = V::load(sums + i * V::width);
        if (tile.biased) y = y + tile.biases[i];
        y = y * alpha;
        V::store(to + i * V::width, kEnding == Ending::add ? V::load(to + i * V::width) + y : y);
      }
    return;
  }
  for (int row = 0; row < num_rows; ++row, to += out.row_stride) {
    const float* delta = tile.delta_of(row);
    for (int i = 0; i < Tile<K>::vectors && i * V::width < tile.width; ++i) {
      const int left = tile.width - i * V::width;
      V y = value_at<K, kInt32>(tile, acc, row, delta, i) * alpha;
      if (kEnding == Ending::add)
        y = get<V>(to + i * V::width, left) + y;
      else if (out.softcap != 0.0f)
        y = V::set1(out.softcap) * tanh_of(y / V::set1(out.softcap));
      put(to + i * V::width, y, left);
    }
  }
}

template <class K, bool kInt32>
inline void end_act(const Tile<K>& tile, const void* acc, int num_rows, const LinearOut& out, float* to) {
  using V = typename K::V;
  for (int row = 0; row < num_rows; ++row, to += out.row_stride) {
    const float* delta = tile.delta_of(row);
    for (int i = 0; i < Tile<K>::vectors && i * V::width < tile.width; ++i) {
      const V y = value_at<K, kInt32>(tile, acc, row, delta, i);
      const V act = out.act == GateAct::silu ? silu(y) : out.act == GateAct::gelu ? gelu(y) : gelu_tanh(y);
      put_act(out, to, i * V::width, act, tile.width - i * V::width);
    }
  }
}

template <class K, bool kInt32>
inline void end_rows(const Tile<K>& tile, const void* acc, int num_rows, const LinearOut& out, float* to) {
  if (out.ending == Ending::store) return end_plain<K, kInt32, Ending::store>(tile, acc, num_rows, out, to);
  if (out.ending == Ending::add) return end_plain<K, kInt32, Ending::add>(tile, acc, num_rows, out, to);
  if (out.ending == Ending::act) return end_act<K, kInt32>(tile, acc, num_rows, out, to);
  if (out.act == GateAct::silu) return end_gate<K, kInt32, GateAct::silu>(tile, acc, num_rows, out, to);
  if (out.act == GateAct::gelu) return end_gate<K, kInt32, GateAct::gelu>(tile, acc, num_rows, out, to);
  if (out.act == GateAct::gelu_tanh) return end_gate<K, kInt32, GateAct::gelu_tanh>(tile, acc, num_rows, out, to);
  return end_gate<K, kInt32, GateAct::clamped_swiglu>(tile, acc, num_rows, out, to);
}

// Where a tile's outputs begin in a row.
static inline int first_float(const LinearShape& shape, const LinearOut& out, int tile) {
  return tile * (shape.gated ? kTile / 2 : kTile) / (out.half ? 2 : 1);
}

// Rows row0 .. of one tile, from their sums acc [num_rows][32] to the output.
template <class K>
inline void end_tile(const PackedLinear& weights, const Plan& plan, int index, int num_rows, const Operand& rows,
                     int row0, const void* acc, const LinearOut& out) {
  const DType dtype = weights.shape.dtype;
  const bool scaled = dtype == DType::int8;
  const Tile<K> tile(weights, plan, index, scaled ? rows.scales + row0 : nullptr, rows.sums + row0,
                     out.deltas == nullptr ? nullptr : out.deltas + row0, out.first_delta);
  float* to = out.rows + row0 * out.row_stride + first_float(weights.shape, out, index);
  if (dtype == DType::int8)
    end_rows<K, true>(tile, acc, num_rows, out, to);
  else
    end_rows<K, false>(tile, acc, num_rows, out, to);
}

// --- products ---

// f8, unit by unit: expanded to bf16, which the first-level cache holds, multiplied, and scaled onto the sums.
template <class K>
inline void multiply_f8(const Block& b) {
  using V = typename K::V;
  constexpr int kMostRows = 12;
  alignas(64) uint16_t values[kF8Unit * kTile];
  alignas(64) float sums[kMostRows * kTile];
  Block unit{reinterpret_cast<const uint8_t*>(values),
             b.rows,
             b.row_stride,
             nullptr,
             0,
             b.num_rows,
             kF8Unit / 2,
             true,
             sums,
             b.next,
             divide_up(b.next_bytes, kF8Unit / 2)};
  const uint8_t* weights = b.weights;
  for (int step = 0; step < b.steps; ++step, weights += kF8UnitBytes) {
    V::widen_f8(weights + kTile * sizeof(float), kF8Unit * kTile, values);
    K::bf16(unit);
    for (int i = 0; i < kTile; i += V::width) {
      const V scale = V::load(reinterpret_cast<const float*>(weights) + i);
      for (int row = 0; row < b.num_rows; ++row) {
        float* acc = static_cast<float*>(b.acc) + row * kTile + i;
        const V before = b.first && step == 0 ? V::set1(0.0f) : V::load(acc);
        V::store(acc, V::fma(V::load(sums + row * kTile + i), scale, before));
      }
    }
    unit.rows += kF8Unit * sizeof(uint16_t);
    unit.next += b.next_bytes;
  }
}

template <class K>
inline void multiply(DType dtype, const Block& block) {
  if (dtype == DType::f32) return K::f32(block);
  if (dtype == DType::bf16) return K::bf16(block);
  if (dtype == DType::int8) return K::int8(block);
  if (dtype == DType::f16) return K::f16(block);
  if (dtype == DType::f8) return multiply_f8<K>(block);
  with_block_type(dtype, [&](auto type) { K::template blocked<decltype(type)::value>(block); });
}

// Steps of the run that begins at `step`. Where this thread goes on elsewhere (`jumps`), the tile's last bytes are a
// run of their own, which prefetches from there.
static inline int run_length(const Plan& plan, int step, bool jumps) {
  const int left = plan.steps - step;
  if (!plan.one_pass) return left < plan.run_steps ? left : plan.run_steps;
  const int ahead = kAheadBytes / plan.step_bytes;
  return jumps && left > ahead ? left - ahead : left;
}

// Where the kernel prefetches: ahead in its own stream, or, where several chunks of rows pass over a run, each of them
// its part of the run that begins at `following` (null: there is none).
static inline void aim_prefetch(const Plan& plan, int chunk, int chunks, const uint8_t* following, Block& block) {
  block.next = block.weights;  // in the cache already: costs next to nothing
  block.next_bytes = 0;
  if (following == nullptr) return;
  block.next_bytes = plan.one_pass ? plan.step_bytes : divide_up(plan.step_bytes, chunks);
  block.next = following + (plan.one_pass ? 0 : static_cast<int64_t>(block.steps) * block.next_bytes * chunk);
}

// Asks for the output's lines while products are still at work: they were last another thread's.
template <class K>
inline void fetch_outputs(const LinearShape& shape, const LinearOut& out, int tile, int row, int num_rows) {
  float* to = out.rows + row * out.row_stride + first_float(shape, out, tile);
  for (int i = 0; i < num_rows; ++i, to += out.row_stride) {
    K::V::prefetch_to_write(to);
    if (!shape.gated && !out.half) K::V::prefetch_to_write(to + kTile / 2);
  }
  for (int i = 0; out.deltas != nullptr && i < num_rows; ++i) {
    if (out.deltas[row + i] == nullptr) continue;
    const float* delta = out.deltas[row + i] + out.first_delta + tile * kTile;
    __builtin_prefetch(delta);
    __builtin_prefetch(delta + kTile / 2);
  }
}

// One tile and one block of rows, with its ending; `after`: the weights that this thread reads next, null if none.
template <class K>
inline void multiply_tile(const PackedLinear& weights, const Plan& plan, int tile, const uint8_t* after,
                          const Operand& rows, int row0, int num_rows, const LinearOut& out) {
  const LinearShape& shape = weights.shape;
  const int chunks = divide_up(num_rows, K::rows_at_once(shape.dtype));
  const int per_row = sums_per_row(shape);
  const DType operand = operand_dtype(shape.dtype);
  const int size = operand == DType::f32 ? 4 : operand == DType::bf16 ? 2 : 1;
  const uint8_t* from = weights.data + tile * tile_bytes(shape);
  alignas(64) uint8_t acc[kVectorLimits.max_rows * kTile * 4];
  Block block{};
  block.row_stride = rows.row_stride;
  block.sums_stride = per_row;
  for (int step = 0; step < plan.steps; step += block.steps) {
    block.weights = from + static_cast<int64_t>(step) * plan.step_bytes;
    block.steps = run_length(plan, step, after != from + tile_bytes(shape));
    block.first = step == 0;
    const bool ends = step + block.steps == plan.steps;
    const uint8_t* behind = block.weights + static_cast<int64_t>(block.steps) * plan.step_bytes;
    const uint8_t* following = ends ? after : plan.one_pass ? block.weights + kAheadBytes : behind;
    if (ends && plan.one_pass && after == behind) following = block.weights + kAheadBytes;
    for (int chunk = 0; chunk < chunks; ++chunk) {  // rows shared out evenly: 32 as 10, 11, 11
      const int begin = num_rows * chunk / chunks, end = num_rows * (chunk + 1) / chunks;
      block.rows = static_cast<const uint8_t*>(rows.rows) + (row0 + begin) * rows.row_stride +
                   static_cast<int64_t>(step) * plan.step_values * size;
      block.sums = per_row == 0 ? nullptr
                                : rows.sums + static_cast<int64_t>(row0 + begin) * per_row +
                                      (is_blocked(shape.dtype) ? kSumsPerBlock * (plan.step_values / 32) * step : 0);
      block.num_rows = end - begin;
      block.acc = acc + static_cast<int64_t>(begin) * kTile * 4;
      aim_prefetch(plan, chunk, chunks, following, block);
      if (ends) fetch_outputs<K>(shape, out, tile, row0 + begin, end - begin);
      multiply<K>(shape.dtype, block);
      if (ends) end_tile<K>(weights, plan, tile, end - begin, rows, row0 + begin, block.acc, out);
    }
  }
}

// Hands out all tiles of all blocks of rows: multiply(tile, after, row0, num_rows), with `after` as above.
template <class Multiply>
inline void for_each_tile(const PackedLinear& weights, const Plan& plan, int m, WorkCounter& counter,
                          const Worker& worker, const Multiply& multiply) {
  Shares shares{plan.tiles * plan.row_blocks, worker.count, plan.least_share};
  for (bool more = shares.seek(counter.take()); more;) {
    const int first = shares.first, last = shares.last();
    for (int unit = first; unit < last; ++unit) {
      const int row_block = unit / plan.tiles, tile = unit % plan.tiles;
      const int row0 = m * row_block / plan.row_blocks, row1 = m * (row_block + 1) / plan.row_blocks;
      int next = unit + 1;
      if (next == last) {  // the next share is taken here, so that its first bytes are on their way when it begins
        more = shares.seek(counter.take());
        next = shares.first;
      }
      const uint8_t* after = more ? weights.data + next % plan.tiles * tile_bytes(weights.shape) : nullptr;
      multiply(tile, after, row0, row1 - row0);
    }
  }
}

template <class K>
void linear(const PackedLinear& weights, const Operand& rows, int m, const LinearOut& out, WorkCounter& counter,
            const Worker& worker) {
  const Plan plan = plan_of(weights.shape, m, K::rows_at_once(weights.shape.dtype), kVectorLimits);
  for_each_tile(weights, plan, m, counter, worker, [&](int tile, const uint8_t* after, int row0, int num_rows) {
    multiply_tile<K>(weights, plan, tile, after, rows, row0, num_rows, out);
  });
}

template <class K>
LinearProduct product(const LinearShape& shape, int) {
  return {K::product(shape.dtype == DType::f8 ? DType::bf16 : shape.dtype), K::rows_at_once(shape.dtype)};
}

template <class K>
constexpr LinearKernels table() {
  return LinearKernels{&prepare<K>, &layer_norm<typename K::V>, &linear<K>, &product<K>};
}

}  // namespace linear_driver
}  // namespace maitred
