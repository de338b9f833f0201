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
inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
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

// The formats: the most rows of a block, as the registers allow; values in a word; whether sums are integers.
struct F32 {
  static constexpr int kRows = 6, kPerWord = 1;
  static constexpr bool kInteger = false;
};
struct BF16 {
  static constexpr int kRows = 6, kPerWord = 2;
  static constexpr bool kInteger = false;
};
struct Int8 {
  static constexpr int kRows = 3, kPerWord = 4;
  static constexpr bool kInteger = true;
};

inline __m512 multiply_add(F32, __m512 sum, __m512i a, __m512i b) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}
inline __m512 multiply_add(BF16, __m512 sum, __m512i a, __m512i b) {
  // As assembly, because GCC 12 copies the sum before and after each of its intrinsics.
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
// sum + the four products of each word; a is unsigned, b signed.
inline __m512i multiply_add(__m512i sum, __m512i a, __m512i b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

inline int64_t int8_part(const KVLayout& layout) { return (int64_t{layout.k_words} * 4 + 63) / 64 * 64; }

// Where the tiles of a segment lie for one K/V head, and what to fetch into the cache while they are read: each by tile
// of the segment.
struct Cells {
  const uint8_t* at[kSegmentTiles];
  const uint8_t* ahead[kSegmentTiles];
};

// Scores of R rows over T tiles, in the unit that stored_scale() gives.
template <class Format, int R, int T, bool kFetch>
inline void score_block(const Segment& work, const Cells& cells, int row, int tile) {
  const uint8_t* q = work.queries + row * work.query_stride;
  const uint8_t* const* at = cells.at + tile;
  const uint8_t* const* ahead = cells.ahead + tile;
  const int k_words = work.layout->k_words;
  __m512 sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int w = 0; w < k_words; ++w) {
    __m512i keys[T];
    for (int t = 0; t < T; ++t) {
      keys[t] = load_bits(at[t] + int64_t{w} * 64);
      if (kFetch) prefetch(ahead[t] + int64_t{w} * 64);
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

// From integer sums to scores; `tail` is what stands behind the query's parts, keys were stored with 128 added.
inline __m512 int8_scores(const Segment& work, const uint8_t* tail, __m512i high, __m512i low, __m512 k_scales) {
  const __m512 a = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, _mm512_slli_epi32(word(tail + 4), 7)));
  const __m512 b = _mm512_cvtepi32_ps(_mm512_sub_epi32(low, _mm512_slli_epi32(word(tail + 8), 7)));
  const __m512 dot = _mm512_fmadd_ps(b, _mm512_set1_ps(1.0f / 254.0f), a);
  return _mm512_mul_ps(_mm512_mul_ps(dot, _mm512_set1_ps(float_at(tail) * stored_scale(work))), k_scales);
}

template <int R, int T, bool kFetch>
inline void score_block_int8(const Segment& work, const Cells& cells, int row, int tile) {
  const KVLayout& layout = *work.layout;
  const uint8_t* q = work.queries + row * work.query_stride;
  const uint8_t* const* at = cells.at + tile;
  const uint8_t* const* ahead = cells.ahead + tile;
  const int64_t part = int8_part(layout);
  const int k_words = layout.k_words;
  __m512i high[R][T], low[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) high[r][t] = _mm512_setzero_si512(), low[r][t] = _mm512_setzero_si512();
  if (kFetch) {
    for (int t = 0; t < T; ++t) {
      prefetch(ahead[t] + layout.scales_offset());
      prefetch(at[t] + layout.v_offset + layout.scales_offset());
    }
  }
  for (int w = 0; w < k_words; ++w) {
    __m512i keys[T];
    for (int t = 0; t < T; ++t) {
      keys[t] = load_bits(at[t] + int64_t{w} * 64);
      if (kFetch) prefetch(ahead[t] + int64_t{w} * 64);
    }
    for (int r = 0; r < R; ++r) {
      const __m512i query_high = word(q + r * work.query_stride + w * 4);
      const __m512i query_low = word(q + r * work.query_stride + part + w * 4);
      for (int t = 0; t < T; ++t) {
        high[r][t] = multiply_add(high[r][t], keys[t], query_high);
        low[r][t] = multiply_add(low[r][t], keys[t], query_low);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    const uint8_t* tail = q + r * work.query_stride + 2 * part;
    for (int t = 0; t < T; ++t)
      _mm512_storeu_ps(work.scores + (row + r) * kSegmentSlots + (tile + t) * kTileSlots,
                       int8_scores(work, tail, high[r][t], low[r][t], load(at[t] + layout.scales_offset())));
  }
}

template <class Format, int R, int T, bool kFetch>
inline void scores_of(const Segment& work, const Cells& cells, int row, int tile) {
  if constexpr (Format::kInteger)
    score_block_int8<R, T, kFetch>(work, cells, row, tile);
  else
    score_block<Format, R, T, kFetch>(work, cells, row, tile);
}

template <class Format, int R, bool kFetch>
inline void score_tiles(const Segment& work, const Cells& cells, int row, int first_tile, int end_tile) {
  int tile = first_tile;
  for (; tile + kTiles <= end_tile; tile += kTiles) scores_of<Format, R, kTiles, kFetch>(work, cells, row, tile);
  if (tile + 2 <= end_tile) {
    scores_of<Format, R, 2, kFetch>(work, cells, row, tile);
    tile += 2;
  }
  if (tile < end_tile) scores_of<Format, R, 1, kFetch>(work, cells, row, tile);
}

// Slots of a tile that are in [first, end).
inline __mmask16 visible(int tile, int first, int end) {
  if (first <= tile * kTileSlots && (tile + 1) * kTileSlots <= end) return 0xffff;
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
inline float weights_of(F32, const Segment&, int, const float* scores, float maximum, int first, int end, int, int,
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

inline float weights_of(BF16, const Segment&, int, const float* scores, float maximum, int first, int end, int, int,
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
inline float weights_of(Int8, const Segment& work, int head, float* scores, float maximum, int first, int end,
                        int first_tile, int end_tile, uint8_t* out) {
  const int64_t scales = work.layout->v_offset + work.layout->scales_offset() + head * work.layout->head_stride;
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

// From a row's scores to its weights, their sum and maximum; `head` is its K/V head.
template <class Format>
inline void weigh_row(const Segment& work, int row, int head, int first_tile, int end_tile) {
  float* scores = work.scores + row * kSegmentSlots;
  const int first = work.first[row], end = work.end[row];
  const float maximum = first < end ? row_maximum(work, scores, first, end) : -__builtin_inff();
  work.maximum[row] = maximum;
  work.sum[row] = weights_of(Format{}, work, head, scores, maximum, first, larger(first, end), first_tile, end_tile,
                             work.probabilities + int64_t{row} * kWeightBytes);
}

// What R rows add up over words [from, to) of V: C vectors of columns from `column` on.
template <class Format, int R, int C, bool kFetch>
inline void value_block(const Segment& work, const Cells& cells, int row, int from, int to, int column, bool resume) {
  constexpr int kWords = kTileSlots / Format::kPerWord;  // of a tile
  const int64_t width = work.layout->padded_head, line_bytes = width * 4;
  float* out = work.out + row * width + column * 16;
  const uint8_t* weights = work.probabilities + int64_t{row} * kWeightBytes;
  __m512 sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = resume ? load(out + r * width + c * 16) : _mm512_setzero_ps();
  for (int w = from; w < to;) {
    const int tile = w / kWords, end = smaller(to, (tile + 1) * kWords);
    const int64_t at = w % kWords * line_bytes + column * 64;
    const uint8_t* values = cells.at[tile] + at;
    const uint8_t* ahead = cells.ahead[tile] + at;
    for (; w < end; ++w, values += line_bytes, ahead += line_bytes) {
      __m512i v[C];
      for (int c = 0; c < C; ++c) {
        v[c] = load_bits(values + c * 64);
        if (kFetch) prefetch(ahead + c * 64);
      }
      for (int r = 0; r < R; ++r) {
        const __m512i p = word(weights + r * kWeightBytes + w * 4);
        for (int c = 0; c < C; ++c) sums[r][c] = multiply_add(Format{}, sums[r][c], v[c], p);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) _mm512_storeu_ps(out + r * width + c * 16, sums[r][c]);
}

// The same in integers, which stay so in `out` until finish_int8().
template <int R, int C, bool kFetch>
inline void value_block_int8(const Segment& work, const Cells& cells, int row, int from, int to, int column,
                             bool resume) {
  constexpr int kWords = 4;  // of a tile
  const int64_t width = work.layout->padded_head, line_bytes = width * 4;
  float* out = work.out + row * width + column * 16;
  const uint8_t* weights = work.probabilities + int64_t{row} * kWeightBytes;
  __m512i high[R][C], low[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) {
      high[r][c] = _mm512_setzero_si512();
      low[r][c] = resume ? load_bits(out + r * width + c * 16) : _mm512_setzero_si512();
    }
  for (int w = from; w < to;) {
    const int tile = w / kWords, end = smaller(to, (tile + 1) * kWords);
    const int64_t at = w % kWords * line_bytes + column * 64;
    const uint8_t* values = cells.at[tile] + at;
    const uint8_t* ahead = cells.ahead[tile] + at;
    for (; w < end; ++w, values += line_bytes, ahead += line_bytes) {
      __m512i v[C];
      for (int c = 0; c < C; ++c) {
        v[c] = load_bits(values + c * 64);
        if (kFetch) prefetch(ahead + c * 64);
      }
      for (int r = 0; r < R; ++r) {
        const __m512i p_high = word(weights + r * kWeightBytes + w * 4);
        const __m512i p_low = word(weights + r * kWeightBytes + kInt8Low + w * 4);
        for (int c = 0; c < C; ++c) {
          high[r][c] = multiply_add(high[r][c], p_high, v[c]);
          low[r][c] = multiply_add(low[r][c], p_low, v[c]);
        }
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      _mm512_storeu_si512(out + r * width + c * 16, _mm512_add_epi32(_mm512_slli_epi32(high[r][c], 8), low[r][c]));
}

// From the integers of value_block_int8 to numbers.
inline void finish_int8(const Segment& work, int row, int end_row) {
  const int width = work.layout->padded_head;
  for (; row < end_row; ++row) {
    float* out = work.out + int64_t{row} * width;
    const __m512 factor = _mm512_set1_ps(float_at(work.probabilities + int64_t{row} * kWeightBytes + kInt8Factor));
    for (int i = 0; i < width; i += 16)
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtepi32_ps(load_bits(out + i)), factor));
  }
}

template <class Format, int R, int C, bool kFetch>
inline void values_of(const Segment& work, const Cells& cells, int row, int from, int to, int column, bool resume) {
  if constexpr (Format::kInteger)
    value_block_int8<R, C, kFetch>(work, cells, row, from, to, column, resume);
  else
    value_block<Format, R, C, kFetch>(work, cells, row, from, to, column, resume);
}

template <class Format, int R, bool kFetch>
inline void sum_values(const Segment& work, const Cells& cells, int row, int from, int to, bool resume) {
  constexpr int kSums = Format::kInteger ? 12 : 24;  // that the registers hold
  constexpr int kMost = kSums / R >= 8 ? 8 : kSums / R >= 4 ? 4 : kSums / R >= 2 ? 2 : 1;
  const int columns = work.layout->padded_head / 16;
  int column = 0;
  for (; column + kMost <= columns; column += kMost)
    values_of<Format, R, kMost, kFetch>(work, cells, row, from, to, column, resume);
  if constexpr (kMost >= 8) {
    if (column + 4 <= columns) {
      values_of<Format, R, 4, kFetch>(work, cells, row, from, to, column, resume);
      column += 4;
    }
  }
  for (; column < columns; ++column) values_of<Format, R, 1, kFetch>(work, cells, row, from, to, column, resume);
}

// One row, slots [from, to) that fill no words in common with its neighbours': slots beside them are left out.
template <class Format>
void sum_edge(const Segment& work, const uint8_t* const* cells, int row, int from, int to) {
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
    const uint8_t* values = cells[w / kWords] + int64_t{w % kWords} * layout.padded_head * 4;
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
void sum_rows(const Segment& work, const Cells& values, int row, const Seen& seen) {
  constexpr int kPerWord = Format::kPerWord;
  const int from = (seen.common_first + kPerWord - 1) / kPerWord, to = seen.common_end / kPerWord;
  const int64_t width = work.layout->padded_head;
  const bool together = from < to, before = !together || seen.first < from * kPerWord;
  if (before) {
    for (int64_t i = row * width; i < (row + R) * width; i += 16) _mm512_storeu_ps(work.out + i, _mm512_setzero_ps());
    for (int r = row; r < row + R; ++r)
      sum_edge<Format>(work, values.at, r, work.first[r], together ? from * kPerWord : work.end[r]);
  }
  if (!together) return;
  sum_values<Format, R, kFetch>(work, values, row, from, to, before);
  for (int r = row; r < row + R; ++r) sum_edge<Format>(work, values.at, r, to * kPerWord, work.end[r]);
}

template <class Format, int R, bool kFetch>
void attend_rows(const Segment& work, const Cells& keys, const Cells& values, int row) {
  const Seen seen = seen_by(work, row, R);
  if (seen.first >= seen.end) {
    for (int r = row; r < row + R; ++r) {
      work.maximum[r] = -__builtin_inff();
      work.sum[r] = 0.0f;
    }
    return;
  }
  const int first_tile = seen.first / kTileSlots, end_tile = (seen.end + kTileSlots - 1) / kTileSlots;
  score_tiles<Format, R, kFetch>(work, keys, row, first_tile, end_tile);
  for (int r = row; r < row + R; ++r) weigh_row<Format>(work, r, 0, first_tile, end_tile);
  if constexpr (Format::kInteger)  // takes no order, and weights of slots that are not seen are 0
    sum_values<Format, R, kFetch>(work, values, row, seen.first / 4, (seen.end + 3) / 4, false);
  else
    sum_rows<Format, R, kFetch>(work, values, row, seen);
  if constexpr (Format::kInteger) finish_int8(work, row, row + R);
}

// The first block of rows fetches what the others find in the cache.
template <class Format, bool kFetch>
inline void attend_block(const Segment& work, const Cells& keys, const Cells& values, int row, int count) {
  switch (count) {
    case 1:
      return attend_rows<Format, 1, kFetch>(work, keys, values, row);
    case 2:
      return attend_rows<Format, 2, kFetch>(work, keys, values, row);
    case 3:
      return attend_rows<Format, 3, kFetch>(work, keys, values, row);
    case 4:
      return attend_rows<Format, 4 <= Format::kRows ? 4 : 1, kFetch>(work, keys, values, row);
    case 5:
      return attend_rows<Format, 5 <= Format::kRows ? 5 : 1, kFetch>(work, keys, values, row);
    default:
      return attend_rows<Format, 6 <= Format::kRows ? 6 : 1, kFetch>(work, keys, values, row);
  }
}

// Queries of one K/V head. K fetches V, V fetches what comes next.
template <class Format>
void attend_head(const Segment& work) {
  Cells keys, values;
  for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
    const int place = tile - work.first_tile;
    keys.at[tile] = work.tiles[tile];
    keys.ahead[tile] = values.at[tile] = work.tiles[tile] + work.layout->v_offset;
    values.ahead[tile] = place < work.num_next ? work.next_tiles[place] : values.at[tile];
  }
  // Blocks of like size: 8 rows are 4 and 4, not 6 and 2.
  const int num_blocks = (work.rows + Format::kRows - 1) / Format::kRows;
  for (int block = 0; block < num_blocks; ++block) {
    const int row = work.rows * block / num_blocks, end = work.rows * (block + 1) / num_blocks;
    if (block == 0)
      attend_block<Format, true>(work, keys, values, row, end - row);
    else
      attend_block<Format, false>(work, keys, values, row, end - row);
  }
}

// A single query over several K/V heads. A few tiles at a time, head by head as they lie in memory, so that each tile
// is a long run of reading; K of all heads, then the weights, then V of all heads. Each sum is the one of attend_rows.
template <class Format, int R>
void sweep(const Segment& work) {
  constexpr int kPerWord = Format::kPerWord, kWords = kTileSlots / kPerWord;
  constexpr int kAtOnce = Format::kInteger ? 2 * kTiles : kTiles;  // 16 KB of K or V with a head of 128
  const int64_t stride = work.layout->head_stride, v_offset = work.layout->v_offset;
  const int first = work.first[0], end = work.end[0], first_tile = work.first_tile, end_tile = work.end_tile;
  Cells cells;
  for (int tile = first_tile; tile < end_tile; tile += kAtOnce) {
    const int last = smaller(tile + kAtOnce, end_tile);
    for (int head = 0; head < work.num_heads; ++head) {
      for (int t = tile; t < last; ++t) {
        cells.at[t] = work.tiles[t] + head * stride;
        cells.ahead[t] = head + 1 < work.num_heads ? cells.at[t] + stride
                         : t + kAtOnce < end_tile  ? work.tiles[t + kAtOnce]
                                                   : work.tiles[first_tile + t - tile] + v_offset;
      }
      score_tiles<Format, R, true>(work, cells, head * R, tile, last);
    }
  }
  for (int row = 0; row < work.rows; ++row) weigh_row<Format>(work, row, row / R, first_tile, end_tile);
  // Whole words of all rows, and slots beside them; no such in integers, where weights of slots not seen are 0.
  const int from = Format::kInteger ? first / 4 : (first + kPerWord - 1) / kPerWord;
  const int to = Format::kInteger ? (end + 3) / 4 : end / kPerWord;
  const int head_end = smaller(from * kPerWord, end), tail = larger(to * kPerWord, head_end);
  for (int64_t i = 0; i < int64_t{work.rows} * work.layout->padded_head; i += 16)
    _mm512_storeu_ps(work.out + i, _mm512_setzero_ps());
  for (int tile = first_tile; tile < end_tile; tile += kAtOnce) {
    const int last = smaller(tile + kAtOnce, end_tile);
    const int begin_word = larger(from, tile * kWords), end_word = smaller(to, last * kWords);
    for (int head = 0; head < work.num_heads; ++head) {
      for (int t = tile; t < last; ++t) {
        const int next = t - tile;
        cells.at[t] = work.tiles[t] + v_offset + head * stride;
        cells.ahead[t] = head + 1 < work.num_heads ? cells.at[t] + stride
                         : t + kAtOnce < end_tile  ? work.tiles[t + kAtOnce] + v_offset
                         : next < work.num_next    ? work.next_tiles[next]
                                                   : cells.at[t];
      }
      if constexpr (kPerWord == 2)
        if (tile == first_tile)
          for (int row = head * R; row < (head + 1) * R; ++row) sum_edge<Format>(work, cells.at, row, first, head_end);
      if (begin_word < end_word) sum_values<Format, R, true>(work, cells, head * R, begin_word, end_word, true);
      if constexpr (kPerWord == 2)
        if (last == end_tile)
          for (int row = head * R; row < (head + 1) * R; ++row) sum_edge<Format>(work, cells.at, row, tail, end);
    }
  }
  if constexpr (Format::kInteger) finish_int8(work, 0, work.rows);
}

template <class Format>
void segment(const Segment& work) {
  if (work.num_heads == 1) return attend_head<Format>(work);
  switch (work.rows / work.num_heads) {
    case 1:
      return sweep<Format, 1>(work);
    case 2:
      return sweep<Format, 2>(work);
    case 3:
      return sweep<Format, 3>(work);
    case 4:
      return sweep<Format, 4>(work);
    case 5:
      return sweep<Format, 5>(work);
    case 6:
      return sweep<Format, 6>(work);
    case 7:
      return sweep<Format, 7>(work);
    default:
      return sweep<Format, 8>(work);  // kSweepGroup
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
