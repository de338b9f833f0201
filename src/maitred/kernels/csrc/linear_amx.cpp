// The linear with AMX: products of tiles, 16 rows of 64 bytes with 16 channels of 64 bytes.
//
// Prepared rows are the left tiles as they lie, 16 steps of a packed tile the right ones: 128 bytes from one step to
// the next, channels 0 - 15 in the first half of each and 16 - 31 in the second. 32 rows x 32 channels are four sums;
// each 64 bytes of K take four loads for four products. A run of a tile is as much of K as stays in the first-level
// cache beside the rows that pass it. Few rows of int8 and block formats, whose int32 sums are exact, go to the kernels
// of AVX-512, as does f32. The processor sums even and odd values of a product of bf16 apart, 32 of K at a time, which
// AVX-512's kernel does not, so few rows of bf16 have vectors of their own here.
#include "linear_amx_few.h"
#include "linear_driver.h"
#include "tiles_amx.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

using namespace linear_driver;

constexpr int kRows = 32;  // of a block of sums
constexpr Limits kLimits{512, kRows, 786432, 8 * kDepthBytes, kDepth};
constexpr int kFewRows = 8, kFewRowsBlocked = 32;  // of int8 and block formats, that AVX-512 multiplies

struct Amx {
  using V = Vec16;
  static constexpr bool kEndsFromSums = true;
};

// Tiles 0 - 3 are sums, 4 and 5 rows, 6 and 7 weights. With fewer rows than a block, the second of each kind has what
// is left of them.
class Tiles {
 public:
  Tiles(int num_rows, int depth) {  // depth: steps of K in a register of rows or weights
    TileConfig config;
    const int upper = num_rows < kHalf ? num_rows : kHalf;
    const int lower = num_rows >= kRows ? kHalf : num_rows > kHalf ? num_rows - kHalf : upper;
    const int rows[] = {upper, upper, lower, lower, upper, lower, depth, depth};
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? 4 * depth : 64);
      config.rows[i] = static_cast<uint8_t>(rows[i]);
    }
    configure_tiles(config);
  }
  ~Tiles() { release_tiles(); }
  Tiles(const Tiles&) = delete;
};

// The four products of a block, by row and channel half.
struct Bf16 {
  static void upper_first() { _tile_dpbf16ps(0, 4, 6); }
  static void upper_second() { _tile_dpbf16ps(1, 4, 7); }
  static void lower_first() { _tile_dpbf16ps(2, 5, 6); }
  static void lower_second() { _tile_dpbf16ps(3, 5, 7); }
};

struct Int8 {
  static void upper_first() { _tile_dpbsud(0, 4, 6); }
  static void upper_second() { _tile_dpbsud(1, 4, 7); }
  static void lower_first() { _tile_dpbsud(2, 5, 6); }
  static void lower_second() { _tile_dpbsud(3, 5, 7); }
};

template <class Op, bool kTall>
inline void multiply_depth(const uint8_t* weights, const uint8_t* rows, int64_t stride) {
  _tile_loadd(6, weights, 128);
  _tile_loadd(4, rows, stride);
  Op::upper_first();
  _tile_loadd(7, weights + 64, 128);
  Op::upper_second();
  if (!kTall) return;
  _tile_loadd(5, rows + kHalf * stride, stride);
  Op::lower_first();
  Op::lower_second();
}

template <bool kTall>
inline void load_sums(uint8_t* acc) {
  _tile_loadd(0, acc, 128);
  _tile_loadd(1, acc + 64, 128);
  if (!kTall) return;
  _tile_loadd(2, acc + kHalf * 128, 128);
  _tile_loadd(3, acc + kHalf * 128 + 64, 128);
}

template <bool kTall>
inline void store_sums(uint8_t* acc) {
  _tile_stored(0, acc, 128);
  _tile_stored(1, acc + 64, 128);
  if (!kTall) return;
  _tile_stored(2, acc + kHalf * 128, 128);
  _tile_stored(3, acc + kHalf * 128 + 64, 128);
}

inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Rows x a run, onto acc [rows][32]. Where only these rows pass it, weights are fetched into the first-level cache.
template <class Op, bool kTall, bool kOnePass>
void multiply_run(const Run& run, const uint8_t* rows, int64_t stride, uint8_t* acc) {
  if (run.first)
    zero_sums();
  else
    load_sums<kTall>(acc);
  const uint8_t *weights = run.weights, *next = run.next;
  float* out = run.out;
  const int out_share = run.depths == 0 ? 0 : divide_up(run.out_rows, run.depths);
  int out_left = run.out_rows;
  for (int depth = 0; depth < run.depths; ++depth, weights += kDepthBytes, rows += 64) {
    for (int row = 0; row < out_share && out_left > 0; ++row, --out_left, out += run.out_stride) {
      Vec16::prefetch_to_write(out);
      if (run.out_width == kTile) Vec16::prefetch_to_write(out + kHalf);
    }
    for (int line = 0; line < run.lines; ++line, next += 64) _mm_prefetch(next, kOnePass ? _MM_HINT_T0 : _MM_HINT_T1);
    multiply_depth<Op, kTall>(weights, rows, stride);
  }
  if (run.tail != nullptr) multiply_depth<Op, kTall>(run.tail, rows, stride);
  store_sums<kTall>(acc);
}

template <class Op>
inline void multiply(const Run& run, bool tall, bool one_pass, const uint8_t* rows, int64_t stride, uint8_t* acc) {
  if (one_pass && tall) return multiply_run<Op, true, true>(run, rows, stride, acc);
  if (one_pass) return multiply_run<Op, false, true>(run, rows, stride, acc);
  if (tall) return multiply_run<Op, true, false>(run, rows, stride, acc);
  multiply_run<Op, false, false>(run, rows, stride, acc);
}

// Steps of the run that begins at `step`: whole depths, but for the end of K.
inline int depths_length(const Plan& plan, int step, bool jumps) {
  const int steps = run_length(plan, step, jumps), left = plan.steps - step;
  return steps == left || steps < kDepth ? left : steps / kDepth * kDepth;
}

bool is_few_bf16(const LinearShape& shape, int m) {  // f8 as well
  return operand_dtype(shape.dtype) == DType::bf16 && m <= (shape.dtype == DType::f8 ? kFewRowsF8 : kFewRowsBf16);
}

// All of a linear's rows, and the part of them that one block has.
struct Rows {
  const Operand& operand;
  int all, first, count;
};

// Where 32 rows (or 16, or all there are) stand whose last one is the chunk's: a chunk at the end of a block takes
// rows of its neighbour with it, so that tiles have one height throughout, and only its own are ended.
struct Chunk {
  int first, count;  // its own rows
  int begin;         // of the rows that are multiplied
  bool tall;
  Chunk(const Rows& rows, int index, int size) : first(rows.first + index * size) {
    const int left = rows.first + rows.count - first;
    count = left < size ? left : size;
    tall = count > kHalf;
    const int most = tall ? kRows : kHalf, height = rows.all < most ? rows.all : most;
    begin = first + count > height ? first + count - height : 0;
  }
};

// As linear_driver's, which leaves the rows of a chunk where the next run finds them.
void multiply_tile(const PackedLinear& weights, const Plan& plan, int tile, const uint8_t* after, const Rows& rows,
                   const LinearOut& out) {
  const LinearShape& shape = weights.shape;
  const Operand& operand = rows.operand;
  const uint8_t *from = weights.data + tile * tile_bytes(shape), *end = from + tile_bytes(shape);
  const int chunks = divide_up(rows.count, kRows);
  alignas(64) uint8_t acc[kLimits.max_rows * kTile * 4];
  alignas(64) uint8_t tail[kDepthBytes];
  for (int step = 0, steps; step < plan.steps; step += steps) {
    steps = depths_length(plan, step, after != end);
    const bool ends = step + steps == plan.steps;
    Run run{from + step * int64_t{128}, steps / kDepth, nullptr, step == 0, nullptr, 0, nullptr, out.row_stride, 0,
            shape.gated ? kHalf : kTile};
    if (steps % kDepth != 0) {
      std::memset(tail, 0, kDepthBytes);
      std::memcpy(tail, run.weights + run.depths * kDepthBytes, steps % kDepth * 128);
      run.tail = tail;
    }
    const bool jumps = ends && after != end;
    const uint8_t* following = jumps ? after : plan.one_pass ? run.weights + kAheadBytes : run.weights + steps * 128;
    run.lines = following == nullptr ? 0 : divide_up(kDepthBytes / 64, chunks);
    for (int index = 0; index < chunks; ++index) {
      const Chunk chunk(rows, index, kRows);
      const uint8_t* at = static_cast<const uint8_t*>(operand.rows) + chunk.begin * operand.row_stride + step * 4;
      uint8_t* sums = acc + index * kRows * kTile * 4;
      run.next = following + int64_t{64} * run.lines * run.depths * index;
      run.out_rows = ends ? chunk.count : 0;
      run.out = out.rows + chunk.first * out.row_stride + first_float(shape, out, tile);
      if (is_few_bf16(shape, rows.all))
        multiply_few<false>(run, chunk.count, at, operand.row_stride, reinterpret_cast<float*>(sums));
      else if (shape.dtype == DType::bf16)
        multiply<Bf16>(run, chunk.tall, plan.one_pass, at, operand.row_stride, sums);
      else
        multiply<Int8>(run, chunk.tall, plan.one_pass, at, operand.row_stride, sums);
      if (ends)
        end_tile<Amx>(weights, plan, tile, chunk.count, operand, chunk.first,
                      sums + (chunk.first - chunk.begin) * kTile * 4, out);
    }
  }
}

// As multiply_tile, unit by unit, each of which starts from zero and is scaled onto the sums. Tiles multiply units that
// are expanded to bf16, few rows the codes as they stand.
void multiply_tile_f8(const PackedLinear& weights, const Plan& plan, int tile, const uint8_t* after, const Rows& rows,
                      const LinearOut& out) {
  const LinearShape& shape = weights.shape;
  const Operand& operand = rows.operand;
  const uint8_t* from = weights.data + tile * tile_bytes(shape);
  const bool few = is_few_bf16(shape, rows.all);
  alignas(64) float acc[kLimits.max_rows * kTile], sums[kRows * kTile];
  alignas(64) uint16_t values[kF8Unit * kTile];
  std::memset(acc, 0, rows.count * kTile * sizeof(float));
  constexpr int kAhead = 2;  // units
  for (int step = 0; step < plan.steps; ++step, from += kF8UnitBytes) {
    const int over = step + kAhead - plan.steps;  // units that the next tile begins with
    const uint8_t* next = over < 0 ? from + kAhead * kF8UnitBytes : after + int64_t{over} * kF8UnitBytes;
    if (over >= 0 && after == nullptr) next = from;
    const float* scales = reinterpret_cast<const float*>(from);
    const uint8_t* codes = from + kTile * sizeof(float);
    for (int line = 0; !few && line < kF8UnitBytes; line += 64) {  // one by one: many at once wait for each other
      _mm_prefetch(next + line, _MM_HINT_T1);
      if (line < kF8Unit * kTile) Vec16::widen_f8(codes + line, 64, values + line);
    }
    Run run{few ? codes : reinterpret_cast<const uint8_t*>(values),
            kF8Unit / (2 * kDepth),
            nullptr,
            true,
            next,
            few,
            nullptr,
            out.row_stride,
            0,
            shape.gated ? kHalf : kTile};
    for (int index = 0; index < divide_up(rows.count, kRows); ++index) {
      const Chunk chunk(rows, index, kRows);
      const uint8_t* at = static_cast<const uint8_t*>(operand.rows) + chunk.begin * operand.row_stride +
                          int64_t{step} * kF8Unit * sizeof(uint16_t);
      if (few)
        multiply_few<true>(run, chunk.count, at, operand.row_stride, sums);
      else
        multiply<Bf16>(run, chunk.tall, false, at, operand.row_stride, reinterpret_cast<uint8_t*>(sums));
      float* to = acc + (chunk.first - rows.first) * kTile;
      const float* found = sums + (chunk.first - chunk.begin) * kTile;
      for (int i = 0; i < chunk.count * kTile; i += Vec16::width)
        Vec16::store(to + i, Vec16::fma(Vec16::load(found + i), Vec16::load(scales + i % kTile), Vec16::load(to + i)));
      if (step + 1 == plan.steps) end_tile<Amx>(weights, plan, tile, chunk.count, operand, chunk.first, to, out);
    }
  }
}

// --- block formats ---

// A run of a tile as bytes, laid out as int8 is packed, and its blocks' d (of both halves) and m as floats.
constexpr int kRunValues = 512;  // of K
struct Unpacked {
  alignas(64) uint8_t weights[kRunValues * kTile];
  alignas(64) float d[kRunValues / 16 * kTile];
  alignas(64) float m[kRunValues / 32 * kTile];
};

// `units` of them from `from` on; asks for as many bytes from `next` on, if there are any.
template <DType kDType>
void unpack(const uint8_t* from, int units, const uint8_t* next, Unpacked& out) {
  constexpr BlockForm kForm = block_form(kDType);
  constexpr int kHalves = 32 / kForm.block;
  uint8_t* to = out.weights;
  float *d = out.d, *m = out.m;
  for (int unit = 0; unit < units; ++unit) {
    const uint8_t *head = from, *w = from + kForm.head_bytes();
    for (int block = 0; block < kForm.blocks(); ++block, w += kForm.block_bytes(), d += kHalves * kTile, m += kTile) {
      for (int i = 0; i < 2; ++i) {
        const BlockScales scales = block_scales<kDType>(head + 32 * i, w + 16 * i);
        for (int half = 0; half < kHalves; ++half) _mm512_store_ps(d + half * kTile + 16 * i, scales.d[half]);
        _mm512_store_ps(m + 16 * i, scales.m);
      }
#pragma GCC unroll 8
      for (int step = 0; step < 8; ++step, to += 128) {
        __m512i low, high;
        block_step<kForm.bits>(w + (kForm.parts ? 64 : 0), step, low, high);
        _mm512_store_si512(to, low);
        _mm512_store_si512(to + 64, high);
      }
    }
    from += kForm.unit_bytes();
  }
  if (next == nullptr) return;
  for (int line = 0; line < units * kForm.unit_bytes(); line += 64) _mm_prefetch(next + line, _MM_HINT_T1);
}

// What 16 rows x 16 channels of a run are made of.
struct BlockRows {
  const uint8_t* rows;
  int64_t stride;
  const uint8_t* weights;  // of 16 channels
  const float *d, *m;      // likewise
  const int32_t* sums;     // of the first row and block
  int sums_stride;
};

// A group (a block, or half of one): its int32 products, in the sum register of that number and from there to `to`.
#define MAITRED_GROUP(kSum)          \
  _tile_zero(kSum);                  \
  _tile_loadd(4, rows, from.stride); \
  _tile_loadd(6, weights, 128);      \
  _tile_dpbsud(kSum, 4, 6);          \
  _tile_stored(kSum, to, 64)

template <int kSum, int kValues>
inline void multiply_group(const BlockRows& from, int g, int32_t* to) {
  const uint8_t* rows = from.rows + g * kValues;
  const uint8_t* weights = from.weights + g * kValues * kTile;
  if (kSum == 0) {
    MAITRED_GROUP(0);
  }
  if (kSum == 1) {
    MAITRED_GROUP(1);
  }
  if (kSum == 2) {
    MAITRED_GROUP(2);
  }
  if (kSum == 3) {
    MAITRED_GROUP(3);
  }
}
#undef MAITRED_GROUP

template <DType kDType>
inline void scale_group(const int32_t* products, const BlockRows& from, int g, __m512 (&y)[kHalf]) {
  constexpr BlockForm kForm = block_form(kDType);
  constexpr int kHalves = 32 / kForm.block;
  const __m512 d = _mm512_load_ps(from.d + g * kTile), m = _mm512_load_ps(from.m + g / kHalves * kTile);
  const int32_t* sums = from.sums + kSumsPerBlock * (g / kHalves);
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r, sums += from.sums_stride) {
    __m512i found = _mm512_load_si512(products + r * kHalf);
    const int32_t values = kHalves == 1 ? sums[1] + sums[2] : sums[1 + g % 2];
    if (kForm.offset != 0) found = _mm512_add_epi32(found, _mm512_set1_epi32(-kForm.offset * values));
    y[r] = scaled_onto(y[r], found, d, sums);
    if (kForm.minimum) y[r] = minimum_onto(y[r], m, sums);
  }
}

// 16 rows x 16 channels of a run, onto acc [rows][32]. Each group's int32 sums are scaled, group after group, while
// the products of those four groups further on are at work.
template <DType kDType>
void multiply_blocks(const BlockRows& from, int groups, bool first, float* acc) {
  constexpr int kValues = block_form(kDType).block;
  alignas(64) int32_t sums[8][kHalf * kHalf];
  __m512 y[kHalf];
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r) y[r] = first ? _mm512_setzero_ps() : _mm512_load_ps(acc + r * kTile);
  for (int g = 0; g < groups + 4; g += 4) {
    int32_t (*to)[kHalf * kHalf] = sums + g % 8;
    const int32_t (*done)[kHalf * kHalf] = sums + (g + 4) % 8;
    if (g < groups) multiply_group<0, kValues>(from, g, to[0]);
    if (g >= 4) scale_group<kDType>(done[0], from, g - 4, y);
    if (g + 1 < groups) multiply_group<1, kValues>(from, g + 1, to[1]);
    if (g >= 4 && g - 3 < groups) scale_group<kDType>(done[1], from, g - 3, y);
    if (g + 2 < groups) multiply_group<2, kValues>(from, g + 2, to[2]);
    if (g >= 4 && g - 2 < groups) scale_group<kDType>(done[2], from, g - 2, y);
    if (g + 3 < groups) multiply_group<3, kValues>(from, g + 3, to[3]);
    if (g >= 4 && g - 1 < groups) scale_group<kDType>(done[3], from, g - 1, y);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r) _mm512_store_ps(acc + r * kTile, y[r]);
}

// As multiply_tile, in chunks of 16 rows.
template <DType kDType>
void multiply_tile_blocked(const PackedLinear& weights, const Plan& plan, int tile, const uint8_t* after,
                           const Rows& rows, const LinearOut& out) {
  constexpr BlockForm kForm = block_form(kDType);
  const LinearShape& shape = weights.shape;
  const Operand& operand = rows.operand;
  const uint8_t* from = weights.data + tile * tile_bytes(shape);
  const int chunks = divide_up(rows.count, kHalf), per_row = sums_per_row(shape);
  alignas(64) float acc[kLimits.max_rows * kTile];
  Unpacked unpacked;
  for (int step = 0, steps; step < plan.steps; step += steps) {
    steps = run_length(plan, step, false);
    const bool ends = step + steps == plan.steps;
    const uint8_t* behind = from + int64_t{plan.step_bytes} * (step + steps);
    unpack<kDType>(behind - int64_t{plan.step_bytes} * steps, steps, ends ? after : behind, unpacked);
    for (int index = 0; index < chunks; ++index) {
      const Chunk chunk(rows, index, kHalf);
      const uint8_t* at =
          static_cast<const uint8_t*>(operand.rows) + chunk.begin * operand.row_stride + step * kForm.unit;
      const int32_t* row_sums = operand.sums + int64_t{chunk.begin} * per_row + kSumsPerBlock * kForm.blocks() * step;
      float* sums = acc + index * kHalf * kTile;
      if (ends) fetch_outputs<Amx>(shape, out, tile, chunk.first, chunk.count);
      for (int half = 0; half < 2; ++half) {
        const BlockRows source{at,
                               operand.row_stride,
                               unpacked.weights + half * 64,
                               unpacked.d + half * kHalf,
                               unpacked.m + half * kHalf,
                               row_sums,
                               per_row};
        multiply_blocks<kDType>(source, steps * kForm.unit / kForm.block, step == 0, sums + half * kHalf);
      }
      if (ends)
        end_tile<Amx>(weights, plan, tile, chunk.count, operand, chunk.first,
                      sums + (chunk.first - chunk.begin) * kTile, out);
    }
  }
}

using MultiplyTile = void (*)(const PackedLinear&, const Plan&, int, const uint8_t*, const Rows&, const LinearOut&);
MultiplyTile multiply_tile_of(DType dtype) {
  if (!is_blocked(dtype)) return dtype == DType::f8 ? &multiply_tile_f8 : &multiply_tile;
  return with_block_type(dtype,
                         [](auto type) -> MultiplyTile { return &multiply_tile_blocked<decltype(type)::value>; });
}

// --- the table ---

bool takes_tiles(const LinearShape& shape, int m) {
  if (shape.dtype == DType::int8) return m > kFewRows;
  if (is_blocked(shape.dtype)) return m > kFewRowsBlocked;
  return operand_dtype(shape.dtype) == DType::bf16 && !is_few_bf16(shape, m);
}

void linear(const PackedLinear& weights, const Operand& operand, int m, const LinearOut& out, WorkCounter& counter,
            const Worker& worker) {
  const LinearShape& shape = weights.shape;
  const bool few_bf16 = is_few_bf16(shape, m);
  if (!few_bf16 && !takes_tiles(shape, m)) return kLinearAvx512.linear(weights, operand, m, out, counter, worker);
  const bool blocked = is_blocked(shape.dtype);
  Plan plan = plan_of(shape, m, kRows, kLimits);
  if (blocked) {
    plan.one_pass = false;
    plan.run_steps = kRunValues / plan.step_values;
  }
  const MultiplyTile multiply_one = multiply_tile_of(shape.dtype);
  const auto multiply = [&](int tile, const uint8_t* after, int row0, int num_rows) {
    multiply_one(weights, plan, tile, after, Rows{operand, m, row0, num_rows}, out);
  };
  if (few_bf16) return for_each_tile(weights, plan, m, counter, worker, multiply);
  const Tiles tiles(blocked && m > kHalf ? kHalf : m, blocked ? block_form(shape.dtype).block / 4 : kDepth);
  for_each_tile(weights, plan, m, counter, worker, multiply);
}

LinearProduct product(const LinearShape& shape, int m) {
  if (is_few_bf16(shape, m)) return {"vfmadd zmm", kFewRowsBf16};
  if (!takes_tiles(shape, m)) return kLinearAvx512.product(shape, m);
  if (is_blocked(shape.dtype)) return {"tdpbsud", kHalf};
  return {operand_dtype(shape.dtype) == DType::bf16 ? "tdpbf16ps" : "tdpbsud", kRows};
}

}  // namespace

const LinearKernels kLinearAmx{&prepare<Amx>, &layer_norm<Amx::V>, &linear, &product};

}  // namespace maitred
