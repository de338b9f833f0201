// The linear with AVX-512, its VNNI (vpdpbusd) and its bf16 (vdpbf16ps).
//
// A tile of 32 channels is two registers; up to 12 rows x 2 make 24 independent sums. Each step of K takes two loads of
// weights and one broadcast load a row for two products, well under the two loads a cycle that there are.
#include "linear_driver.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

// Loses what GCC knows of a value. Where a loop's sums are used as int32 lanes right behind it, its allocator keeps
// each in two registers (one a type) and copies them to and fro.
inline void forget(__m512i& value) { asm("" : "+v"(value)); }

// Rows r, r + 1, r + 2 are addressed from one pointer: 12 rows take 4 and not 12.
struct RowPointers {
  const uint8_t* at[4];
  int64_t stride;
  RowPointers(const uint8_t* rows, int64_t row_stride)
      : at{rows, rows + 3 * row_stride, rows + 6 * row_stride, rows + 9 * row_stride}, stride(row_stride) {}
  __m512i four(int row) const { return word(at[row / 3] + row % 3 * stride); }
  void advance(int rows) {
    for (int i = 0; i <= (rows - 1) / 3; ++i) at[i] += 4;
  }
};

// R rows x one tile; 4 bytes of each row a step. int8 starts from the rows' sums.
template <class Op, int R>
void multiply_rows(const Block& b) {
  __m512i acc[R][2];
  int32_t* sums = static_cast<int32_t*>(b.acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (b.first) {
      acc[r][0] = acc[r][1] = Op::kValues == 4 ? _mm512_set1_epi32(b.sums[r * b.sums_stride]) : _mm512_setzero_si512();
    } else {
      acc[r][0] = _mm512_load_si512(sums + r * kTile);
      acc[r][1] = _mm512_load_si512(sums + r * kTile + 16);
    }
  }
  const uint8_t* w = b.weights;
  RowPointers x(b.rows, b.row_stride);
  const uint8_t* next = b.next;
  const int64_t advance = b.next_bytes;
  const int64_t second = advance > 64 ? 64 : 0;
  for (int step = 0; step < b.steps; ++step) {
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + second, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i four = x.four(r);
      acc[r][0] = Op::multiply_add(acc[r][0], w0, four);
      acc[r][1] = Op::multiply_add(acc[r][1], w1, four);
    }
    w += 128;
    next += advance;
    x.advance(R);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    forget(acc[r][0]);
    forget(acc[r][1]);
    _mm512_store_si512(sums + r * kTile, acc[r][0]);
    _mm512_store_si512(sums + r * kTile + 16, acc[r][1]);
  }
}

// One block: its products in int32, scaled onto the float32 sums, which stay in registers where there is room for them:
// hence fewer rows at once. `advance` bytes from `next` on are asked for with each step.
template <DType kDType, int R>
inline void multiply_block(const uint8_t* head, const uint8_t* w, const uint8_t* rows, int64_t stride,
                           const int32_t* row_sums, int sums_stride, const uint8_t* next, int64_t advance,
                           __m512 (&sums)[R][2]) {
  constexpr BlockForm kForm = block_form(kDType);
  constexpr int kHalves = 32 / kForm.block, kSteps = 8 / kHalves;
  const uint8_t* codes = w + (kForm.parts ? 64 : 0);
  RowPointers x(rows, stride);
#pragma GCC unroll 2
  for (int half = 0; half < kHalves; ++half) {
    __m512i acc[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int32_t* of_row = row_sums + r * sums_stride;
      const int32_t values = kHalves == 1 ? of_row[1] + of_row[2] : of_row[1 + half];
      acc[r][0] = acc[r][1] = kForm.offset != 0 ? _mm512_set1_epi32(-kForm.offset * values) : _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int step = half * kSteps; step < (half + 1) * kSteps; ++step) {
      __m512i w0, w1;
      block_step<kForm.bits>(codes, step, w0, w1);
      for (int64_t line = 0; line < (kForm.bits == 8 ? 192 : 128); line += 64) _mm_prefetch(next + line, _MM_HINT_T0);
      next += advance;
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const __m512i four = x.four(r);
        acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, four);
        acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, four);
      }
      x.advance(R);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const BlockScales scales = block_scales<kDType>(head + 32 * i, w + 16 * i);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        forget(acc[r][i]);
        sums[r][i] = scaled_onto(sums[r][i], acc[r][i], scales.d[half], row_sums + r * sums_stride);
        if (kForm.minimum) sums[r][i] = minimum_onto(sums[r][i], scales.m, row_sums + r * sums_stride);
      }
    }
  }
}

template <DType kDType, int R>
void multiply_blocks(const Block& b) {
  constexpr BlockForm kForm = block_form(kDType);
  float* sums = static_cast<float*>(b.acc);
  __m512 acc[R][2];
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) acc[i / 2][i % 2] = b.first ? _mm512_setzero_ps() : _mm512_load_ps(sums + 16 * i);
  const uint8_t *head = b.weights, *rows = b.rows, *next = b.next;
  const int32_t* row_sums = b.sums;
  const int64_t advance = (b.next_bytes + 8 * kForm.blocks() - 1) / (8 * kForm.blocks());
  for (int unit = 0; unit < b.steps; ++unit, head += kForm.unit_bytes()) {
    const uint8_t* w = head + kForm.head_bytes();
    for (int block = 0; block < kForm.blocks(); ++block) {
      multiply_block<kDType, R>(head, w, rows, b.row_stride, row_sums, b.sums_stride, next, advance, acc);
      w += kForm.block_bytes();
      rows += 32;
      row_sums += kSumsPerBlock;
      next += 8 * advance;
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) _mm512_store_ps(sums + 16 * i, acc[i / 2][i % 2]);
}

// f16 weights: a step is one value of 32 channels.
template <int R>
void multiply_f16(const Block& b) {
  float* sums = static_cast<float*>(b.acc);
  __m512 acc[R][2];
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) acc[i / 2][i % 2] = b.first ? _mm512_setzero_ps() : _mm512_load_ps(sums + 16 * i);
  const uint8_t *w = b.weights, *next = b.next;
  RowPointers x(b.rows, b.row_stride);
  for (int step = 0; step < b.steps; ++step, w += 64, next += b.next_bytes) {
    const __m512 w0 = load_f16(w), w1 = load_f16(w + 32);
    _mm_prefetch(next, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512 value = _mm512_castsi512_ps(x.four(r));
      acc[r][0] = _mm512_fmadd_ps(w0, value, acc[r][0]);
      acc[r][1] = _mm512_fmadd_ps(w1, value, acc[r][1]);
    }
    x.advance(R);
  }
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) _mm512_store_ps(sums + 16 * i, acc[i / 2][i % 2]);
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>,  &multiply_rows<Op, 2>,  &multiply_rows<Op, 3>,
                             &multiply_rows<Op, 4>,  &multiply_rows<Op, 5>,  &multiply_rows<Op, 6>,
                             &multiply_rows<Op, 7>,  &multiply_rows<Op, 8>,  &multiply_rows<Op, 9>,
                             &multiply_rows<Op, 10>, &multiply_rows<Op, 11>, &multiply_rows<Op, 12>};
template <DType kDType>
constexpr Kernel kBlocked[] = {&multiply_blocks<kDType, 1>, &multiply_blocks<kDType, 2>, &multiply_blocks<kDType, 3>,
                               &multiply_blocks<kDType, 4>, &multiply_blocks<kDType, 5>, &multiply_blocks<kDType, 6>,
                               &multiply_blocks<kDType, 7>, &multiply_blocks<kDType, 8>};
constexpr Kernel kF16[] = {&multiply_f16<1>, &multiply_f16<2>,  &multiply_f16<3>,  &multiply_f16<4>,
                           &multiply_f16<5>, &multiply_f16<6>,  &multiply_f16<7>,  &multiply_f16<8>,
                           &multiply_f16<9>, &multiply_f16<10>, &multiply_f16<11>, &multiply_f16<12>};

struct Avx512 {
  using V = Vec16;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType dtype) { return is_blocked(dtype) ? 8 : 12; }
  static const char* product(DType dtype) {
    if (dtype == DType::bf16) return "vdpbf16ps zmm";
    return dtype == DType::f32 || dtype == DType::f16 ? "vfmadd zmm" : "vpdpbusd zmm";
  }

  static void f32(const Block& b) { kFixed<F32Words>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16Words>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8Words>[b.num_rows - 1](b); }
  static void f16(const Block& b) { kF16[b.num_rows - 1](b); }
  template <DType kDType>
  static void blocked(const Block& b) {
    kBlocked<kDType>[b.num_rows - 1](b);
  }
};

}  // namespace

const LinearKernels kLinearAvx512 = linear_driver::table<Avx512>();

}  // namespace maitred
