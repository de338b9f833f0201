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

// One group: its products in int32, scaled onto the float32 sums, which stay in registers too: hence fewer rows at
// once.
template <int R>
inline void multiply_group(const uint8_t* w, const uint8_t* rows, int64_t stride, int steps, const int32_t* start,
                           int start_stride, const uint8_t* next, int64_t advance, __m512 (&sums)[R][2]) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* scales = w;
  __m512i acc[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    acc[r][0] = _mm512_set1_epi32(start[r * start_stride]);
    acc[r][1] = _mm512_set1_epi32(start[r * start_stride]);
  }
  w += 64;
  _mm_prefetch(next, _MM_HINT_T0);
  next += advance;
  RowPointers x(rows, stride);
#pragma GCC unroll 8
  for (int step = 0; step < steps; ++step) {
    const __m512i both = _mm512_loadu_si512(w);
    const __m512i w0 = _mm512_and_si512(both, nibble), w1 = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    _mm_prefetch(next, _MM_HINT_T0);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const __m512i four = x.four(r);
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], w0, four);
      acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], w1, four);
    }
    w += 64;
    next += advance;
    x.advance(R);
  }
  const __m512 scale0 = load_bf16(scales), scale1 = load_bf16(scales + 32);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    forget(acc[r][0]);
    forget(acc[r][1]);
    const __m512 base = _mm512_castsi512_ps(_mm512_set1_epi32(start[r * start_stride + 1]));
    sums[r][0] = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_castsi512_ps(acc[r][0]), base), scale0, sums[r][0]);
    sums[r][1] = _mm512_fmadd_ps(_mm512_sub_ps(_mm512_castsi512_ps(acc[r][1]), base), scale1, sums[r][1]);
  }
}

template <int R>
void multiply_int4(const Block& b) {
  float* sums = static_cast<float*>(b.acc);
  __m512 acc[R][2];
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) acc[i / 2][i % 2] = b.first ? _mm512_setzero_ps() : _mm512_load_ps(sums + 16 * i);
  const int64_t bytes = 64 + b.group * 16;
  const int64_t advance = (b.next_bytes + b.group / 4) / (b.group / 4 + 1);  // of each of a group's prefetches
  for (int g = 0; g < b.steps; ++g)
    multiply_group<R>(b.weights + g * bytes, b.rows + g * b.group, b.row_stride, b.group / 4, b.sums + 2 * g,
                      b.sums_stride, b.next + static_cast<int64_t>(g) * b.next_bytes, advance, acc);
#pragma GCC unroll 32
  for (int i = 0; i < 2 * R; ++i) _mm512_store_ps(sums + 16 * i, acc[i / 2][i % 2]);
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>,  &multiply_rows<Op, 2>,  &multiply_rows<Op, 3>,
                             &multiply_rows<Op, 4>,  &multiply_rows<Op, 5>,  &multiply_rows<Op, 6>,
                             &multiply_rows<Op, 7>,  &multiply_rows<Op, 8>,  &multiply_rows<Op, 9>,
                             &multiply_rows<Op, 10>, &multiply_rows<Op, 11>, &multiply_rows<Op, 12>};
constexpr Kernel kInt4[] = {&multiply_int4<1>, &multiply_int4<2>, &multiply_int4<3>, &multiply_int4<4>,
                            &multiply_int4<5>, &multiply_int4<6>, &multiply_int4<7>, &multiply_int4<8>};

struct Avx512 {
  using V = Vec16;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType dtype) { return dtype == DType::int4 ? 8 : 12; }
  static const char* product(DType dtype) {
    const char* names[] = {"vfmadd zmm", "vdpbf16ps zmm", "vpdpbusd zmm", "vpdpbusd zmm"};
    return names[static_cast<int>(dtype)];
  }

  static void f32(const Block& b) { kFixed<F32Words>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16Words>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8Words>[b.num_rows - 1](b); }
  static void int4(const Block& b) { kInt4[b.num_rows - 1](b); }
};

}  // namespace

const LinearKernels kLinearAvx512 = linear_driver::table<Avx512>();

}  // namespace maitred
