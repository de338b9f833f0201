// Attention with AVX-512: bf16 dot products for a bf16 pool, VNNI for an int8 one, fused multiply-adds for float32.
//
// Rows are taken in blocks of a few and 16 slots are a vector, so that a word of K or V that was loaded meets every row
// of its block. While K is read, V of the same tile is fetched into the cache, and while V is read, what comes next.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own intrinsics (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#include <stdint.h>

#include "attention.h"

namespace maitred {
namespace {

constexpr int kTiles = 4;  // of a block of scores
constexpr float kLog2E = 1.44269504088896340736f;

inline __m512 load(const void* p) { return _mm512_loadu_ps(p); }
inline __m512i load_bits(const void* p) { return _mm512_loadu_si512(p); }
inline __m512i word(const uint8_t* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}
inline float float_at(const uint8_t* p) {
  float x;
  __builtin_memcpy(&x, p, 4);
  return x;
}
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// 2^t for t <= 0; 0 below -150; NaN stays NaN.
inline __m512 exp2_of(__m512 t) {
  t = _mm512_max_ps(_mm512_set1_ps(-151.0f), t);  // the second operand is kept where it is NaN
  const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(t, n);
  __m512 p = _mm512_set1_ps(1.54035304e-4f);  // ln(2)^k / k!
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.33335581e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.61812911e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.55041087e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.40226507e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93147181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

inline float exp2_of(float t) { return _mm512_cvtss_f32(exp2_of(_mm512_set1_ps(t))); }

inline __m512 softcapped(__m512 score, float softcap) {
  // tanh(x) = 1 - 2 / (e^2x + 1); beyond 2^60 it is 1 in float32, below 2^-60 it is -1.
  __m512 t = _mm512_mul_ps(score, _mm512_set1_ps(2.0f * kLog2E / softcap));
  t = _mm512_min_ps(_mm512_set1_ps(60.0f), _mm512_max_ps(_mm512_set1_ps(-60.0f), t));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(exp2_of(t), one)));
  return _mm512_mul_ps(tanh, _mm512_set1_ps(softcap * kLog2E));
}

// What multiplies q.k before it is stored: the softcap comes in natural units, else scores are powers of two at once.
inline float stored_scale(const Segment& work) { return work.softcap == 0.0f ? work.scale * kLog2E : work.scale; }

// The formats. Each has: kRows, the most rows of a block of scores; Acc, the sum of a vector of 16 slots.
struct F32 {
  static constexpr int kRows = 6, kValueRows = 6, kPerWord = 1;
};
struct BF16 {
  static constexpr int kRows = 6, kValueRows = 6, kPerWord = 2;
};
struct Int8 {
  static constexpr int kRows = 3, kValueRows = 3, kPerWord = 4;
};

inline __m512 multiply_add(F32, __m512 sum, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
inline __m512 multiply_add(BF16, __m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

inline int64_t int8_part(const KVLayout& layout) { return (int64_t{layout.k_words} * 4 + 63) / 64 * 64; }

// Scores of R rows over T tiles, in the unit that stored_scale() gives.
template <class Format, int R, int T, bool kFetch>
inline void score_block(const Segment& work, int row, int tile) {
  const KVLayout& layout = *work.layout;
  const uint8_t* q = work.queries + row * work.query_stride;
  const uint8_t* const* tiles = work.tiles + tile;
  __m512 sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_ps();
  for (int w = 0; w < layout.k_words; ++w) {
    __m512i keys[T];
    for (int t = 0; t < T; ++t) {
      keys[t] = load_bits(tiles[t] + int64_t{w} * 64);
      if (kFetch) prefetch(tiles[t] + layout.v_offset + int64_t{w} * 64);
    }
    for (int r = 0; r < R; ++r) {
      const __m512i query = word(q + r * work.query_stride + w * 4);
      for (int t = 0; t < T; ++t) sums[r][t] = multiply_add(Format{}, sums[r][t], keys[t], query);
    }
  }
  const __m512 scale = _mm512_set1_ps(stored_scale(work));
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t)
      _mm512_storeu_ps(work.scores + (row + r) * kSegmentSlots + (tile + t) * kTileSlots,
                       _mm512_mul_ps(sums[r][t], scale));
}

template <int R, int T, bool kFetch>
inline void score_block_int8(const Segment& work, int row, int tile) {
  const KVLayout& layout = *work.layout;
  const uint8_t* q = work.queries + row * work.query_stride;
  const uint8_t* const* tiles = work.tiles + tile;
  const int64_t part = int8_part(layout);
  __m512i high[R][T], low[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) high[r][t] = low[r][t] = _mm512_setzero_si512();
  for (int w = 0; w < layout.k_words; ++w) {
    __m512i keys[T];
    for (int t = 0; t < T; ++t) {
      keys[t] = load_bits(tiles[t] + int64_t{w} * 64);
      if (kFetch) prefetch(tiles[t] + layout.v_offset + int64_t{w} * 64);
    }
    for (int r = 0; r < R; ++r) {
      const __m512i query_high = word(q + r * work.query_stride + w * 4);
      const __m512i query_low = word(q + r * work.query_stride + part + w * 4);
      for (int t = 0; t < T; ++t) {
        high[r][t] = _mm512_dpbusd_epi32(high[r][t], keys[t], query_high);
        low[r][t] = _mm512_dpbusd_epi32(low[r][t], keys[t], query_low);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    const uint8_t* tail = q + r * work.query_stride + 2 * part;
    const __m512 scale = _mm512_set1_ps(float_at(tail) * stored_scale(work));
    const __m512i high_bias = _mm512_slli_epi32(word(tail + 4), 7), low_bias = _mm512_slli_epi32(word(tail + 8), 7);
    for (int t = 0; t < T; ++t) {
      const __m512 a = _mm512_cvtepi32_ps(_mm512_sub_epi32(high[r][t], high_bias));
      const __m512 b = _mm512_cvtepi32_ps(_mm512_sub_epi32(low[r][t], low_bias));
      const __m512 dot = _mm512_fmadd_ps(b, _mm512_set1_ps(1.0f / 254.0f), a);
      const __m512 k_scales = load(tiles[t] + layout.k_scales_offset());
      _mm512_storeu_ps(work.scores + (row + r) * kSegmentSlots + (tile + t) * kTileSlots,
                       _mm512_mul_ps(_mm512_mul_ps(dot, scale), k_scales));
    }
  }
}

template <int R, int T, bool kFetch>
inline void scores_of(F32, const Segment& work, int row, int tile) {
  score_block<F32, R, T, kFetch>(work, row, tile);
}
template <int R, int T, bool kFetch>
inline void scores_of(BF16, const Segment& work, int row, int tile) {
  score_block<BF16, R, T, kFetch>(work, row, tile);
}
template <int R, int T, bool kFetch>
inline void scores_of(Int8, const Segment& work, int row, int tile) {
  score_block_int8<R, T, kFetch>(work, row, tile);
}

template <class Format, int R, bool kFetch>
void score_tiles(const Segment& work, int row, int first_tile, int end_tile) {
  int tile = first_tile;
  for (; tile + kTiles <= end_tile; tile += kTiles) scores_of<R, kTiles, kFetch>(Format{}, work, row, tile);
  if (tile + 2 <= end_tile) {
    scores_of<R, 2, kFetch>(Format{}, work, row, tile);
    tile += 2;
  }
  if (tile < end_tile) scores_of<R, 1, kFetch>(Format{}, work, row, tile);
}

// Slots of a tile that are in [first, end).
inline __mmask16 visible(int tile, int first, int end) {
  const int from = larger(first - tile * kTileSlots, 0), to = smaller(end - tile * kTileSlots, kTileSlots);
  if (from >= to) return 0;
  return static_cast<__mmask16>((0xffffu << from) & (0xffffu >> (kTileSlots - to)));
}

inline float row_maximum(const Segment& work, float* scores, int first, int end) {
  __m512 maximum = _mm512_set1_ps(-__builtin_inff());
  for (int tile = first / kTileSlots; tile * kTileSlots < end; ++tile) {
    float* at = scores + tile * kTileSlots;
    if (work.softcap != 0.0f) _mm512_storeu_ps(at, softcapped(load(at), work.softcap));
    const __m512 score = load(at);
    maximum = _mm512_mask_max_ps(maximum, visible(tile, first, end), score, maximum);  // NaN leaves the maximum alone
  }
  return _mm512_reduce_max_ps(maximum);
}

// Each writes p for the tiles of [first_tile, end_tile), 0 where the row does not see, and returns the sum.
inline float weights_of(F32, const Segment&, const float* scores, float maximum, int first, int end, int, int,
                        uint8_t* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int tile = first / kTileSlots; tile * kTileSlots < end; ++tile) {
    const __m512 t = _mm512_sub_ps(load(scores + tile * kTileSlots), _mm512_set1_ps(maximum));
    const __m512 p = _mm512_maskz_mov_ps(visible(tile, first, end), exp2_of(t));
    sum = _mm512_add_ps(sum, p);
    _mm512_storeu_ps(out + tile * 64, p);
  }
  return _mm512_reduce_add_ps(sum);
}

inline float weights_of(BF16, const Segment&, const float* scores, float maximum, int first, int end, int, int,
                        uint8_t* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int tile = first / kTileSlots; tile * kTileSlots < end; ++tile) {
    const __m512 t = _mm512_sub_ps(load(scores + tile * kTileSlots), _mm512_set1_ps(maximum));
    const __m512 p = _mm512_maskz_mov_ps(visible(tile, first, end), exp2_of(t));
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + tile * 32), rounded);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
  }
  return _mm512_reduce_add_ps(sum);
}

constexpr int kInt8Low = kSegmentSlots;         // where the low bytes of p lie behind the high ones
constexpr int kInt8Factor = 2 * kSegmentSlots;  // and what their products are multiplied with

// p * V's scale in 16 bits of the largest of them.
inline float weights_of(Int8, const Segment& work, float* scores, float maximum, int first, int end, int first_tile,
                        int end_tile, uint8_t* out) {
  const int64_t scales = work.layout->v_scales_offset();
  __m512 sum = _mm512_setzero_ps(), most = _mm512_setzero_ps(), poison = _mm512_setzero_ps();
  for (int tile = first / kTileSlots; tile * kTileSlots < end; ++tile) {
    const __mmask16 seen = visible(tile, first, end);
    const __m512 t = _mm512_sub_ps(load(scores + tile * kTileSlots), _mm512_set1_ps(maximum));
    const __m512 p = _mm512_maskz_mov_ps(seen, exp2_of(t));
    const __m512 scaled = _mm512_maskz_mul_ps(seen, p, load(work.tiles[tile] + scales));
    sum = _mm512_add_ps(sum, p);
    most = _mm512_max_ps(scaled, most);
    poison = _mm512_fmadd_ps(scaled, _mm512_setzero_ps(), poison);  // NaN if one of them is
    _mm512_storeu_ps(scores + tile * kTileSlots, scaled);
  }
  const float greatest = _mm512_reduce_max_ps(most);
  const float inverse = greatest > 1e-30f ? 65535.0f / greatest : 0.0f;
  for (int tile = first_tile; tile < end_tile; ++tile) {
    const __m512 scaled = _mm512_maskz_loadu_ps(visible(tile, first, end), scores + tile * kTileSlots);
    const __m512i weights = _mm512_cvtps_epi32(_mm512_mul_ps(scaled, _mm512_set1_ps(inverse)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + tile * kTileSlots),
                     _mm512_cvtepi32_epi8(_mm512_srli_epi32(weights, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kInt8Low + tile * kTileSlots), _mm512_cvtepi32_epi8(weights));
  }
  const float factor = greatest * (1.0f / 65535.0f) + _mm512_reduce_add_ps(poison);
  __builtin_memcpy(out + kInt8Factor, &factor, 4);
  return _mm512_reduce_add_ps(sum);
}

constexpr int kWeightBytes = kSegmentSlots * 4;  // a row's part of Segment::probabilities

// What R rows add up over words [from, to) of V: C vectors of columns from `column` on.
template <class Format, int R, int C, bool kFetch>
inline void value_block(const Segment& work, int row, int from, int to, int column, bool resume) {
  constexpr int kWords = kTileSlots / Format::kPerWord;  // of a tile
  const KVLayout& layout = *work.layout;
  const int64_t line_bytes = int64_t{layout.padded_head} * 4;
  float* out = work.out + int64_t{row} * layout.padded_head + column * 16;
  const uint8_t* weights = work.probabilities + int64_t{row} * kWeightBytes;
  __m512 sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      sums[r][c] = resume ? load(out + int64_t{r} * layout.padded_head + c * 16) : _mm512_setzero_ps();
  for (int w = from; w < to;) {
    const int tile = w / kWords, end = smaller(to, (tile + 1) * kWords);
    const uint8_t* values = work.tiles[tile] + layout.v_offset + w % kWords * line_bytes + column * 64;
    const bool fetch = kFetch && tile - work.first_tile < work.num_next;
    const uint8_t* next =
        fetch ? work.next_tiles[tile - work.first_tile] + w % kWords * line_bytes + column * 64 : nullptr;
    for (; w < end; ++w, values += line_bytes) {
      __m512i v[C];
      for (int c = 0; c < C; ++c) v[c] = load_bits(values + c * 64);
      if (fetch) {
        for (int c = 0; c < C; ++c) prefetch(next + c * 64);
        next += line_bytes;
      }
      for (int r = 0; r < R; ++r) {
        const __m512i p = word(weights + r * kWeightBytes + w * 4);
        for (int c = 0; c < C; ++c) sums[r][c] = multiply_add(Format{}, sums[r][c], v[c], p);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(out + int64_t{r} * layout.padded_head + c * 16, sums[r][c]);
}

template <int R, int C, bool kFetch>
inline void value_block_int8(const Segment& work, int row, int from, int to, int column) {
  constexpr int kWords = 4;  // of a tile
  const KVLayout& layout = *work.layout;
  const int64_t line_bytes = int64_t{layout.padded_head} * 4;
  float* out = work.out + int64_t{row} * layout.padded_head + column * 16;
  const uint8_t* weights = work.probabilities + int64_t{row} * kWeightBytes;
  __m512i high[R][C], low[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) high[r][c] = low[r][c] = _mm512_setzero_si512();
  for (int w = from; w < to;) {
    const int tile = w / kWords, end = smaller(to, (tile + 1) * kWords);
    const uint8_t* values = work.tiles[tile] + layout.v_offset + w % kWords * line_bytes + column * 64;
    const bool fetch = kFetch && tile - work.first_tile < work.num_next;
    const uint8_t* next =
        fetch ? work.next_tiles[tile - work.first_tile] + w % kWords * line_bytes + column * 64 : nullptr;
    for (; w < end; ++w, values += line_bytes) {
      __m512i v[C];
      for (int c = 0; c < C; ++c) v[c] = load_bits(values + c * 64);
      if (fetch) {
        for (int c = 0; c < C; ++c) prefetch(next + c * 64);
        next += line_bytes;
      }
      for (int r = 0; r < R; ++r) {
        const __m512i p_high = word(weights + r * kWeightBytes + w * 4);
        const __m512i p_low = word(weights + r * kWeightBytes + kInt8Low + w * 4);
        for (int c = 0; c < C; ++c) {
          high[r][c] = _mm512_dpbusd_epi32(high[r][c], p_high, v[c]);
          low[r][c] = _mm512_dpbusd_epi32(low[r][c], p_low, v[c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    const __m512 factor = _mm512_set1_ps(float_at(weights + r * kWeightBytes + kInt8Factor));
    for (int c = 0; c < C; ++c) {
      const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][c], 8), low[r][c]);
      _mm512_storeu_ps(out + int64_t{r} * layout.padded_head + c * 16, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factor));
    }
  }
}

template <int R, int C, bool kFetch>
inline void values_of(F32, const Segment& work, int row, int from, int to, int column, bool resume) {
  value_block<F32, R, C, kFetch>(work, row, from, to, column, resume);
}
template <int R, int C, bool kFetch>
inline void values_of(BF16, const Segment& work, int row, int from, int to, int column, bool resume) {
  value_block<BF16, R, C, kFetch>(work, row, from, to, column, resume);
}
template <int R, int C, bool kFetch>
inline void values_of(Int8, const Segment& work, int row, int from, int to, int column, bool) {
  value_block_int8<R, C, kFetch>(work, row, from, to, column);
}

template <class Format, int R, bool kFetch>
void sum_values(const Segment& work, int row, int from, int to, bool resume) {
  // As many columns as the registers hold beside R rows.
  constexpr int kMost = (Format::kPerWord == 4 ? 12 : 24) / R >= 8 ? 8 : 4;
  const int columns = work.layout->padded_head / 16;
  int column = 0;
  for (; column + kMost <= columns; column += kMost)
    values_of<R, kMost, kFetch>(Format{}, work, row, from, to, column, resume);
  if (kMost == 8 && column + 4 <= columns) {
    values_of<R, 4, kFetch>(Format{}, work, row, from, to, column, resume);
    column += 4;
  }
  if (column + 2 <= columns) {
    values_of<R, 2, kFetch>(Format{}, work, row, from, to, column, resume);
    column += 2;
  }
  if (column < columns) values_of<R, 1, kFetch>(Format{}, work, row, from, to, column, resume);
}

// One row, slots [from, to) that fill no words in common with its neighbours': slots beside them are left out.
template <class Format>
void sum_edge(const Segment& work, int row, int from, int to) {
  constexpr int kPerWord = Format::kPerWord, kWords = kTileSlots / kPerWord;
  if (from >= to) return;
  const KVLayout& layout = *work.layout;
  float* out = work.out + int64_t{row} * layout.padded_head;
  const uint8_t* weights = work.probabilities + int64_t{row} * kWeightBytes;
  for (int w = from / kPerWord; w * kPerWord < to; ++w) {
    uint32_t keep = 0xffffffffu;
    if (kPerWord == 2 && w * 2 < from) keep = 0xffff0000u;
    if (kPerWord == 2 && w * 2 + 1 >= to) keep &= 0x0000ffffu;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(keep));
    const uint8_t* values = work.tiles[w / kWords] + layout.v_offset + int64_t{w % kWords} * layout.padded_head * 4;
    const __m512i p = _mm512_and_si512(word(weights + w * 4), mask);
    for (int c = 0; c < layout.padded_head / 16; ++c) {
      const __m512i v = _mm512_and_si512(load_bits(values + c * 64), mask);
      _mm512_storeu_ps(out + c * 16, multiply_add(Format{}, load(out + c * 16), v, p));
    }
  }
}

// Slots that any, and that all, of some rows see.
struct Seen {
  int first, end, common_first, common_end;
};

inline Seen seen_by(const Segment& work, int row, int count) {
  Seen seen{kSegmentSlots, 0, 0, kSegmentSlots};
  for (int r = row; r < row + count; ++r) {
    if (work.first[r] < work.end[r]) {
      seen.first = smaller(seen.first, work.first[r]);
      seen.end = larger(seen.end, work.end[r]);
    }
    seen.common_first = larger(seen.common_first, work.first[r]);
    seen.common_end = smaller(seen.common_end, work.end[r]);
  }
  return seen;
}

template <class Format, int R, bool kFetch>
void sum_rows(const Segment& work, int row, const Seen& seen) {
  constexpr int kPerWord = Format::kPerWord;
  const int from = (seen.common_first + kPerWord - 1) / kPerWord, to = seen.common_end / kPerWord;
  const int64_t width = work.layout->padded_head;
  const bool together = from < to, before = !together || seen.first < from * kPerWord;
  if (before) {
    for (int64_t i = row * width; i < (row + R) * width; i += 16) _mm512_storeu_ps(work.out + i, _mm512_setzero_ps());
    for (int r = row; r < row + R; ++r)
      sum_edge<Format>(work, r, work.first[r], together ? from * kPerWord : work.end[r]);
  }
  if (!together) return;
  sum_values<Format, R, kFetch>(work, row, from, to, before);
  for (int r = row; r < row + R; ++r) sum_edge<Format>(work, r, to * kPerWord, work.end[r]);
}

template <int R, bool kFetch>
inline void sum_block(F32, const Segment& work, int row, const Seen& seen) {
  sum_rows<F32, R, kFetch>(work, row, seen);
}
template <int R, bool kFetch>
inline void sum_block(BF16, const Segment& work, int row, const Seen& seen) {
  sum_rows<BF16, R, kFetch>(work, row, seen);
}
// Integers take no order, and weights of slots that are not seen are 0.
template <int R, bool kFetch>
inline void sum_block(Int8, const Segment& work, int row, const Seen& seen) {
  sum_values<Int8, R, kFetch>(work, row, seen.first / 4, (seen.end + 3) / 4, false);
}

template <class Format, int R, bool kFetch>
void attend_rows(const Segment& work, int row) {
  const Seen seen = seen_by(work, row, R);
  if (seen.first >= seen.end) {
    for (int r = row; r < row + R; ++r) {
      work.maximum[r] = -__builtin_inff();
      work.sum[r] = 0.0f;
    }
    return;
  }
  const int first_tile = seen.first / kTileSlots, end_tile = (seen.end + kTileSlots - 1) / kTileSlots;
  score_tiles<Format, R, kFetch>(work, row, first_tile, end_tile);
  for (int r = row; r < row + R; ++r) {
    float* scores = work.scores + r * kSegmentSlots;
    const int first = work.first[r], end = work.end[r];
    const float maximum = first < end ? row_maximum(work, scores, first, end) : -__builtin_inff();
    work.maximum[r] = maximum;
    work.sum[r] = weights_of(Format{}, work, scores, maximum, first, larger(first, end), first_tile, end_tile,
                             work.probabilities + int64_t{r} * kWeightBytes);
  }
  sum_block<R, kFetch>(Format{}, work, row, seen);
}

// The first rows' blocks fetch what the others find in the cache.
template <class Format, bool kFetch>
inline void attend_block(const Segment& work, int row, int count) {
  switch (count) {
    case 1:
      return attend_rows<Format, 1, kFetch>(work, row);
    case 2:
      return attend_rows<Format, 2, kFetch>(work, row);
    case 3:
      return attend_rows<Format, 3, kFetch>(work, row);
    case 4:
      return attend_rows<Format, 4 <= Format::kRows ? 4 : 1, kFetch>(work, row);
    case 5:
      return attend_rows<Format, 5 <= Format::kRows ? 5 : 1, kFetch>(work, row);
    default:
      return attend_rows<Format, 6 <= Format::kRows ? 6 : 1, kFetch>(work, row);
  }
}

template <class Format>
void segment(const Segment& work) {
  // Blocks of like size: 8 rows are 4 and 4, not 6 and 2.
  const int num_blocks = (work.rows + Format::kRows - 1) / Format::kRows;
  for (int block = 0; block < num_blocks; ++block) {
    const int row = work.rows * block / num_blocks, end = work.rows * (block + 1) / num_blocks;
    if (block == 0)
      attend_block<Format, true>(work, row, end - row);
    else
      attend_block<Format, false>(work, row, end - row);
  }
}

void fold(int rows, int padded_head, const Partial& total, const Partial& more) {
  for (int row = 0; row < rows; ++row) {
    if (more.sum[row] == 0.0f) continue;
    float* to = total.out + int64_t{row} * padded_head;
    const float* from = more.out + int64_t{row} * padded_head;
    float a = 0.0f, b = 1.0f;
    if (total.sum[row] == 0.0f) {
      total.maximum[row] = more.maximum[row];
      total.sum[row] = more.sum[row];
      for (int i = 0; i < padded_head; i += 16) _mm512_storeu_ps(to + i, load(from + i));
      continue;
    }
    const float maximum = total.maximum[row] > more.maximum[row] ? total.maximum[row] : more.maximum[row];
    a = exp2_of(total.maximum[row] - maximum);
    b = exp2_of(more.maximum[row] - maximum);
    total.maximum[row] = maximum;
    total.sum[row] = total.sum[row] * a + more.sum[row] * b;
    const __m512 by_a = _mm512_set1_ps(a), by_b = _mm512_set1_ps(b);
    for (int i = 0; i < padded_head; i += 16)
      _mm512_storeu_ps(to + i, _mm512_fmadd_ps(load(from + i), by_b, _mm512_mul_ps(load(to + i), by_a)));
  }
}

void finish(int head_dim, float maximum, float sum, const float* total, float sink, float* out) {
  float factor = 1.0f;
  if (sink != -__builtin_inff()) {
    const float most = sink > maximum ? sink : maximum;
    factor = exp2_of(maximum - most);
    sum = sum * factor + exp2_of(sink - most);
  }
  const __m512 by = _mm512_set1_ps(factor / sum);
  for (int i = 0; i < head_dim; i += 16) {
    const int left = head_dim - i;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(load(total + i), by));
  }
}

const AttentionKernels kKernels{{&segment<F32>, &segment<BF16>, &segment<Int8>}, &fold, &finish};

}  // namespace

const AttentionKernels& attention_kernels_avx512() { return kKernels; }

}  // namespace maitred
