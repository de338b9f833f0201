// The linear with AMX: products of tiles, 16 rows of 64 bytes with 16 channels of 64 bytes.
//
// Prepared rows are the left tiles as they lie, 16 steps of a packed tile the right ones: 128 bytes from one step to
// the next, channels 0 - 15 in the first half of each and 16 - 31 in the second. 32 rows x 32 channels are four sums;
// each 64 bytes of K take four loads for four products. A run of a tile is as much of K as stays in the first-level
// cache beside the rows that pass it. Few rows of int8 and int4, whose int32 sums are exact, go to the kernels of
// AVX-512, as does f32. The processor sums even and odd values of a product of bf16 apart, 32 of K at a time, which
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
constexpr int kFewRows = 8, kFewRowsInt4 = 24;  // of int8 and int4, that AVX-512 multiplies

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

bool is_few_bf16(const LinearShape& shape, int m) { return shape.dtype == DType::bf16 && m <= kFewRowsBf16; }

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
      run.out = out.rows + chunk.first * out.row_stride + tile * run.out_width;
      if (is_few_bf16(shape, rows.all))
        multiply_few(run, chunk.count, at, operand.row_stride, reinterpret_cast<float*>(sums));
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

// --- int4 ---

// A run of a tile as signed bytes, laid out as int8 is packed, and its groups' scales as floats.
constexpr int kRunValues = 512;  // of K
struct Unpacked {
  alignas(64) int8_t weights[kRunValues * kTile];
  alignas(64) float scales[kRunValues / 32 * kTile];
};

// Groups from `from` on; asks for as many from `next` on, if there are any.
inline void unpack(const uint8_t* from, int groups, int group, const uint8_t* next, Unpacked& out) {
  const __m512i nibble = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
  int8_t* to = out.weights;
  for (int g = 0; g < groups; ++g) {
    for (int i = 0; i < 2; ++i) _mm512_store_ps(out.scales + g * kTile + 16 * i, load_bf16(from + 32 * i));
    from += 64;
    for (int step = 0; step < group / 4; ++step, from += 64, to += 128) {
      const __m512i both = _mm512_loadu_si512(from);
      _mm512_store_si512(to, _mm512_sub_epi8(_mm512_and_si512(both, nibble), eight));
      _mm512_store_si512(to + 64, _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), nibble), eight));
    }
  }
  if (next == nullptr) return;
  for (int line = 0; line < groups * (group / 4 + 1); ++line) _mm_prefetch(next + 64 * line, _MM_HINT_T1);
}

// What 16 rows x 16 channels of a run are made of.
struct GroupRows {
  const uint8_t* rows;
  int64_t stride;
  const int8_t* weights;  // of 16 channels
  int group;
  const int32_t* bases;  // of the first row and group: what sums_per_row says of the second number
  int bases_stride;
};

// One group's int32 products, in the sum register of that number and from there to `to`.
#define MAITRED_GROUP(kSum)                     \
  _tile_zero(kSum);                             \
  _tile_loadd(4, rows, from.stride);            \
  _tile_loadd(6, weights, 128);                 \
  _tile_dpbssd(kSum, 4, 6);                     \
  if (kTwoDepths) {                             \
    _tile_loadd(5, rows + 64, from.stride);     \
    _tile_loadd(7, weights + kDepthBytes, 128); \
    _tile_dpbssd(kSum, 5, 7);                   \
  }                                             \
  _tile_stored(kSum, to, 64)

template <int kSum, bool kTwoDepths>
inline void multiply_group(const GroupRows& from, int g, int32_t* to) {
  const uint8_t* rows = from.rows + g * from.group;
  const int8_t* weights = from.weights + g * from.group * kTile;
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

inline void scale_group(const int32_t* sums, const GroupRows& from, int g, const float* scales, __m512 (&y)[kHalf]) {
  const __m512 scale = _mm512_load_ps(scales);
  const int32_t* bases = from.bases + 2 * g;
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r) {
    const __m512i base = _mm512_set1_epi32(bases[r * from.bases_stride]);
    const __m512i sum = _mm512_add_epi32(_mm512_load_si512(sums + r * kHalf), base);
    y[r] = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_castsi512_ps(sum), _mm512_castsi512_ps(base)), scale, y[r]);
  }
}

// 16 rows x 16 channels of a run, onto acc [rows][32]. Each group's int32 sums are scaled, group after group, while
// the products of those four groups further on are at work.
template <bool kTwoDepths>
void multiply_int4(const GroupRows& from, const float* scales, int groups, bool first, float* acc) {
  alignas(64) int32_t sums[8][kHalf * kHalf];
  __m512 y[kHalf];
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r) y[r] = first ? _mm512_setzero_ps() : _mm512_load_ps(acc + r * kTile);
  for (int g = 0; g < groups + 4; g += 4) {
    int32_t (*to)[kHalf * kHalf] = sums + g % 8;
    const int32_t (*done)[kHalf * kHalf] = sums + (g + 4) % 8;
    const float* scale = scales + (g - 4) * kTile;
    if (g < groups) multiply_group<0, kTwoDepths>(from, g, to[0]);
    if (g >= 4) scale_group(done[0], from, g - 4, scale, y);
    if (g + 1 < groups) multiply_group<1, kTwoDepths>(from, g + 1, to[1]);
    if (g >= 4 && g - 3 < groups) scale_group(done[1], from, g - 3, scale + kTile, y);
    if (g + 2 < groups) multiply_group<2, kTwoDepths>(from, g + 2, to[2]);
    if (g >= 4 && g - 2 < groups) scale_group(done[2], from, g - 2, scale + 2 * kTile, y);
    if (g + 3 < groups) multiply_group<3, kTwoDepths>(from, g + 3, to[3]);
    if (g >= 4 && g - 1 < groups) scale_group(done[3], from, g - 1, scale + 3 * kTile, y);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kHalf; ++r) _mm512_store_ps(acc + r * kTile, y[r]);
}

// As multiply_tile, in chunks of 16 rows.
void multiply_tile_int4(const PackedLinear& weights, const Plan& plan, int tile, const uint8_t* after, const Rows& rows,
                        const LinearOut& out) {
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
    unpack(behind - int64_t{plan.step_bytes} * steps, steps, shape.group, ends ? after : behind, unpacked);
    for (int index = 0; index < chunks; ++index) {
      const Chunk chunk(rows, index, kHalf);
      const uint8_t* at =
          static_cast<const uint8_t*>(operand.rows) + chunk.begin * operand.row_stride + step * shape.group;
      const int32_t* bases = operand.sums + int64_t{chunk.begin} * per_row + 2 * step + 1;
      float* sums = acc + index * kHalf * kTile;
      if (ends) fetch_outputs<Amx>(shape, out, tile, chunk.first, chunk.count);
      for (int half = 0; half < 2; ++half) {
        const GroupRows source{at, operand.row_stride, unpacked.weights + half * 64, shape.group, bases, per_row};
        (shape.group == 128 ? multiply_int4<true> : multiply_int4<false>)(source, unpacked.scales + half * kHalf, steps,
                                                                          step == 0, sums + half * kHalf);
      }
      if (ends)
        end_tile<Amx>(weights, plan, tile, chunk.count, operand, chunk.first,
                      sums + (chunk.first - chunk.begin) * kTile, out);
    }
  }
}

// --- the table ---

bool takes_tiles(const LinearShape& shape, int m) {
  if (shape.dtype == DType::int8) return m > kFewRows;
  if (shape.dtype == DType::int4) return m > (shape.group == 32 ? 2 * kFewRowsInt4 : kFewRowsInt4);
  return shape.dtype == DType::bf16 && m > kFewRowsBf16;
}

void linear(const PackedLinear& weights, const Operand& operand, int m, const LinearOut& out, WorkCounter& counter,
            const Worker& worker) {
  const LinearShape& shape = weights.shape;
  const bool few_bf16 = is_few_bf16(shape, m);
  if (!few_bf16 && !takes_tiles(shape, m)) return kLinearAvx512.linear(weights, operand, m, out, counter, worker);
  const bool int4 = shape.dtype == DType::int4;
  Plan plan = plan_of(shape, m, kRows, kLimits);
  if (int4) {
    plan.one_pass = false;
    plan.run_steps = kRunValues / shape.group;
  }
  const auto multiply = [&](int tile, const uint8_t* after, int row0, int num_rows) {
    (int4 ? multiply_tile_int4 : multiply_tile)(weights, plan, tile, after, Rows{operand, m, row0, num_rows}, out);
  };
  if (few_bf16) return for_each_tile(weights, plan, m, counter, worker, multiply);
  const Tiles tiles(int4 && m > kHalf ? kHalf : m, shape.group == 32 ? kDepth / 2 : kDepth);
  for_each_tile(weights, plan, m, counter, worker, multiply);
}

LinearProduct product(const LinearShape& shape, int m) {
  if (is_few_bf16(shape, m)) return {"vfmadd zmm", kFewRowsBf16};
  if (!takes_tiles(shape, m)) return kLinearAvx512.product(shape, m);
  if (shape.dtype == DType::int4) return {"tdpbssd", kHalf};
  return {shape.dtype == DType::bf16 ? "tdpbf16ps" : "tdpbsud", kRows};
}

}  // namespace

const LinearKernels kLinearAmx{&prepare<Amx>, &linear, &product};

}  // namespace maitred
