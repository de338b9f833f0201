// The products of attention: queries with keys, weights with values. For attention_avx512.cpp.
#pragma once

#include "attention_avx512_formats.h"

namespace maitred {
namespace {

// Scores of R rows over T tiles, in the unit that stored_scale() gives.
template <class Format, int R, int T, bool kFetch>
inline void score_block(const Segment& work, const Cells& cells, int row, int tile) {
  const uint8_t* q = work.queries + row * work.query_stride;
  const uint8_t *at[T], *ahead[T];
  for (int t = 0; t < T; ++t) at[t] = cells.at(tile + t), ahead[t] = cells.next(tile + t);
  const int k_words = work.layout->k_words;
  typename Format::Sum sums[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = Format::zero();
  if (kFetch && Format::kInteger)
    for (int t = 0; t < T; ++t) {
      prefetch(ahead[t] + work.layout->scales_offset());
      prefetch(at[t] + work.layout->v_offset + work.layout->scales_offset());
    }
  for (int w = 0; w < k_words; ++w) {
    __m512i keys[T];
    for (int t = 0; t < T; ++t) {
      keys[t] = load_bits(at[t] + int64_t{w} * 64);
      if (kFetch) prefetch(ahead[t] + int64_t{w} * 64);
    }
    for (int r = 0; r < R; ++r) {
      const auto query = Format::query(work, q + r * work.query_stride + w * 4);
      for (int t = 0; t < T; ++t) sums[r][t] = Format::add_key(sums[r][t], keys[t], query);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sums[r][t] = Format::held(sums[r][t]);
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t)
      _mm512_storeu_ps(work.scores + (row + r) * kScoreStride + (tile + t) * kTileSlots,
                       Format::score(work, sums[r][t], q + r * work.query_stride, at[t]));
}

template <class Format, int R, bool kFetch>
inline void score_tiles(const Segment& work, const Cells& cells, int row, int first_tile, int end_tile) {
  int tile = first_tile;
  for (; tile + kTiles <= end_tile; tile += kTiles) score_block<Format, R, kTiles, kFetch>(work, cells, row, tile);
  if (tile + 2 <= end_tile) {
    score_block<Format, R, 2, kFetch>(work, cells, row, tile);
    tile += 2;
  }
  if (tile < end_tile) score_block<Format, R, 1, kFetch>(work, cells, row, tile);
}

// What R rows add up over words [from, to) of V: C vectors of columns from `column` on.
template <class Format, int R, int C, bool kFetch>
inline void value_block(const Segment& work, const Cells& cells, int row, int from, int to, int column, bool resume) {
  constexpr int kWords = kTileSlots / Format::kPerWord;  // of a tile
  const int64_t width = work.layout->padded_head, line_bytes = width * 4;
  float* out = work.out + row * width + column * 16;
  const uint8_t* weights = work.probabilities + int64_t{row} * Format::kWeightBytes;
  typename Format::Sum sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = resume ? Format::resumed(out + r * width + c * 16) : Format::zero();
  for (int w = from; w < to;) {
    const int tile = w / kWords, end = smaller(to, (tile + 1) * kWords);
    const int64_t at = w % kWords * line_bytes + column * 64;
    const uint8_t* values = cells.at(tile) + at;
    const uint8_t* ahead = cells.next(tile) + at;
    for (; w < end; ++w, values += line_bytes, ahead += line_bytes) {
      __m512i v[C];
      for (int c = 0; c < C; ++c) {
        v[c] = load_bits(values + c * 64);
        if (kFetch) prefetch(ahead + c * 64);
      }
      for (int r = 0; r < R; ++r) {
        const auto weight = Format::weight(weights + r * Format::kWeightBytes + w * 4);
        for (int c = 0; c < C; ++c) sums[r][c] = Format::add_value(sums[r][c], v[c], weight);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) Format::store(out + r * width + c * 16, Format::held(sums[r][c]));
}

template <class Format, int R, bool kFetch>
inline void sum_values(const Segment& work, const Cells& cells, int row, int from, int to, bool resume) {
  constexpr int kMost = Format::kSums / R >= 8 ? 8 : Format::kSums / R >= 4 ? 4 : Format::kSums / R >= 2 ? 2 : 1;
  const int columns = work.layout->padded_head / 16;
  int column = 0;
  for (; column + kMost <= columns; column += kMost)
    value_block<Format, R, kMost, kFetch>(work, cells, row, from, to, column, resume);
  if constexpr (kMost >= 8) {
    if (column + 4 <= columns) {
      value_block<Format, R, 4, kFetch>(work, cells, row, from, to, column, resume);
      column += 4;
    }
  }
  if constexpr (kMost >= 4) {
    if (column + 2 <= columns) {
      value_block<Format, R, 2, kFetch>(work, cells, row, from, to, column, resume);
      column += 2;
    }
  }
  for (; column < columns; ++column) value_block<Format, R, 1, kFetch>(work, cells, row, from, to, column, resume);
}

// One row, slots [from, to) that fill no words in common with its neighbours': slots beside them are left out.
template <class Format>
void sum_edge(const Segment& work, const Cells& cells, int row, int from, int to) {
  constexpr int kPerWord = Format::kPerWord, kWords = kTileSlots / kPerWord;
  if (from >= to) return;
  const KVLayout& layout = *work.layout;
  float* out = work.out + int64_t{row} * layout.padded_head;
  const uint8_t* weights = work.probabilities + int64_t{row} * Format::kWeightBytes;
  for (int w = from / kPerWord; w * kPerWord < to; ++w) {
    uint32_t keep = 0xffffffffu;
    if (kPerWord == 2 && w * 2 < from) keep = 0xffff0000u;
    if (kPerWord == 2 && w * 2 + 1 >= to) keep &= 0x0000ffffu;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(keep));
    const uint8_t* values = cells.at(w / kWords) + int64_t{w % kWords} * layout.padded_head * 4;
    const __m512i weight = _mm512_and_si512(word(weights + w * 4), mask);
    for (int c = 0; c < layout.padded_head / 16; ++c) {
      const __m512i value = _mm512_and_si512(load_bits(values + c * 64), mask);
      _mm512_storeu_ps(out + c * 16, Format::add_value(load(out + c * 16), value, weight));
    }
  }
}

// From the integers of value_block() to numbers.
inline void finish_int8(const Segment& work, int row, int end_row) {
  const int width = work.layout->padded_head;
  for (; row < end_row; ++row) {
    float* out = work.out + int64_t{row} * width;
    const __m512 factor =
        _mm512_set1_ps(float_at(work.probabilities + int64_t{row} * Int8::kWeightBytes + Int8::kFactor));
    for (int i = 0; i < width; i += 16)
      _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_cvtepi32_ps(load_bits(out + i)), factor));
  }
}

}  // namespace
}  // namespace maitred
