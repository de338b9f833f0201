// What qkv_run.h says, compiled for AVX-512 and with its conversions.
#include "qkv_run.h"
#include "vec_avx512.h"

namespace maitred {
namespace {

struct Avx512Formats {
  // The processor's own rounding: as float_to_bf16, but that subnormals become 0.
  static void store_bf16(const float* x, int n, uint16_t* out) {
    for (int i = 0; i < n; i += 16) {
      const __mmask16 mask = first_lanes(n - i);
      const __m256i values = to_bf16(_mm512_maskz_loadu_ps(mask, x + i));
      _mm256_mask_storeu_epi16(out + i, mask, values);
    }
  }

  // Words of two rows' values.
  static void store_bf16_pairs(const float* even, const float* odd, int n, uint32_t* words) {
    for (int i = 0; i < n; i += 16) {
      const __mmask16 mask = first_lanes(n - i);
      const __m256i low = to_bf16(_mm512_maskz_loadu_ps(mask, even + i));
      const __m256i high = to_bf16(_mm512_maskz_loadu_ps(mask, odd + i));
      const __m512i both =
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      _mm512_mask_storeu_epi32(words + i, mask, both);
    }
  }

  // 16 rows of 16 words, `stride` apart, into 16 lines of their columns, `line_stride` apart: words, pairs and quarters
  // change places.
  static void transpose(const uint32_t* words, int stride, uint32_t* lines, int line_stride = kTileSlots) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(words + i * stride);
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; ++j) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
    for (int i = 0; i < 4; ++i) {  // a[4 * g + i] holds columns i, 4 + i, 8 + i, 12 + i of rows 4 * g ..
      const __m512i even_low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
      const __m512i odd_low = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
      const __m512i even_high = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
      const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
      _mm512_storeu_si512(lines + i * line_stride, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
      _mm512_storeu_si512(lines + (4 + i) * line_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
      _mm512_storeu_si512(lines + (8 + i) * line_stride, _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
      _mm512_storeu_si512(lines + (12 + i) * line_stride, _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
    }
  }

  // Two slots' values change places within 64 bits, then quarters of vectors as above.
  static void pair_slots(const uint32_t* words, uint32_t* rows, int row_stride) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    for (int half = 0; half < 2; ++half, words += 8 * kTileSlots, rows += kTileSlots) {
      __m512i a[8], b[8];
      for (int i = 0; i < 8; ++i) a[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(words + i * kTileSlots), order);
      for (int i = 0; i < 8; i += 2) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 1]);
      }
      for (int i = 0; i < 2; ++i) {
        const __m512i even_low = _mm512_shuffle_i64x2(b[i], b[2 + i], 0x88);
        const __m512i odd_low = _mm512_shuffle_i64x2(b[i], b[2 + i], 0xdd);
        const __m512i even_high = _mm512_shuffle_i64x2(b[4 + i], b[6 + i], 0x88);
        const __m512i odd_high = _mm512_shuffle_i64x2(b[4 + i], b[6 + i], 0xdd);
        _mm512_storeu_si512(rows + i * row_stride, _mm512_shuffle_i64x2(even_low, even_high, 0x88));
        _mm512_storeu_si512(rows + (2 + i) * row_stride, _mm512_shuffle_i64x2(odd_low, odd_high, 0x88));
        _mm512_storeu_si512(rows + (4 + i) * row_stride, _mm512_shuffle_i64x2(even_low, even_high, 0xdd));
        _mm512_storeu_si512(rows + (6 + i) * row_stride, _mm512_shuffle_i64x2(odd_low, odd_high, 0xdd));
      }
    }
  }
};

}  // namespace

const QKVKernels& qkv_kernels_avx512() { return kKernels<Avx512Formats>; }

}  // namespace maitred
