// Attention with AVX-512: bf16 dot products for a bf16 pool, VNNI for an int8 one, fused multiply-adds for float32.
//
// Rows are taken in blocks of a few and 16 slots are a vector, so that a word of K or V that was loaded meets every row
// of its block. While K is read, V of the same tile is fetched into the cache, and while V is read, what comes next.
#include "attention_avx512_products.h"
#include "attention_avx512_walk.h"
#include "attention_avx512_weights.h"

namespace maitred {
namespace {

template <class Format, int R, bool kFetch>
void sum_rows(const Segment& work, const Cells& values, int row, const Seen& seen) {
  constexpr int kPerWord = Format::kPerWord;
  const int from = (seen.common_first + kPerWord - 1) / kPerWord, to = seen.common_end / kPerWord;
  const int64_t width = work.layout->padded_head;
  const bool together = from < to, before = !together || seen.first < from * kPerWord;
  if (before) {
    for (int64_t i = row * width; i < (row + R) * width; i += 16) _mm512_storeu_ps(work.out + i, _mm512_setzero_ps());
    for (int r = row; r < row + R; ++r)
      sum_edge<Format>(work, values, r, work.first[r], together ? from * kPerWord : work.end[r]);
  }
  if (!together) return;
  sum_values<Format, R, kFetch>(work, values, row, from, to, before);
  for (int r = row; r < row + R; ++r) sum_edge<Format>(work, values, r, to * kPerWord, work.end[r]);
}

template <class Format, int R, bool kFetch>
void attend_rows(const Segment& work, const Cells& keys, const Cells& values, int row) {
  const Seen seen = seen_by(work, row, R);
  const int first_tile = seen.first / kTileSlots, end_tile = (seen.end + kTileSlots - 1) / kTileSlots;
  if (seen.first < seen.end) score_tiles<Format, R, kFetch>(work, keys, row, first_tile, end_tile);
  for (int r = row; r < row + R; ++r) work.maximum[r] = find_maximum(work, r);
  for (int r = row; r < row + R; ++r) weigh_row<Format>(work, r, 0, first_tile, end_tile);
  if (seen.first >= seen.end) return;
  if constexpr (Format::kInteger) {  // takes no order, and weights of slots that are not seen are 0
    sum_values<Format, R, kFetch>(work, values, row, seen.first / 4, (seen.end + 3) / 4, false);
    finish_int8(work, row, row + R);
  } else {
    sum_rows<Format, R, kFetch>(work, values, row, seen);
  }
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
  const Cells keys{work.tiles, 0, work.values, 0, 0};
  const Cells values{work.values, 0, work.next_tiles == nullptr ? work.tiles : work.next_tiles, -work.first_tile, 0};
  // Blocks of like size: 8 rows are 4 and 4, not 6 and 2.
  const int num_blocks = (work.rows + Format::kRows - 1) / Format::kRows;
  for (int block = 0; block < num_blocks; ++block) {
    const int row = work.rows * block / num_blocks, end = work.rows * (block + 1) / num_blocks;
    if (block == 0 && work.next_tiles != nullptr)
      attend_block<Format, true>(work, keys, values, row, end - row);
    else
      attend_block<Format, false>(work, keys, values, row, end - row);
  }
}

// A single query over several K/V heads; each sum is the one of attend_rows.
template <class Format, int R>
void sweep(const Segment& work) {
  constexpr int kPerWord = Format::kPerWord, kWords = kTileSlots / kPerWord;
  const int first = work.first[0], end = work.end[0];
  Walk walk(work);
  for (; walk.in(0); walk.advance())
    score_tiles<Format, R, true>(work, walk.cells(), walk.head() * R, walk.tile(), walk.end_tile());
  for (int row = 0; row < work.rows; ++row) work.maximum[row] = find_maximum(work, row);
  for (int row = 0; row < work.rows; ++row) weigh_row<Format>(work, row, row / R, work.first_tile, work.end_tile);
  // Whole words of all rows, and slots beside them; no such in integers, where weights of slots not seen are 0.
  const int from = Format::kInteger ? first / 4 : (first + kPerWord - 1) / kPerWord;
  const int to = Format::kInteger ? (end + 3) / 4 : end / kPerWord;
  const int head_end = smaller(from * kPerWord, end), tail = larger(to * kPerWord, head_end);
  for (int64_t i = 0; i < int64_t{work.rows} * work.layout->padded_head; i += 16)
    _mm512_storeu_ps(work.out + i, _mm512_setzero_ps());
  for (; walk.in(1); walk.advance()) {
    const Cells cells = walk.cells();
    const int row = walk.head() * R;
    const int begin_word = larger(from, walk.tile() * kWords), end_word = smaller(to, walk.end_tile() * kWords);
    if constexpr (kPerWord == 2)
      if (walk.tile() == work.first_tile)
        for (int r = row; r < row + R; ++r) sum_edge<Format>(work, cells, r, first, head_end);
    if (begin_word < end_word) sum_values<Format, R, true>(work, cells, row, begin_word, end_word, true);
    if constexpr (kPerWord == 2)
      if (walk.end_tile() == work.end_tile)
        for (int r = row; r < row + R; ++r) sum_edge<Format>(work, cells, r, tail, end);
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
    if (total.sum[row] == 0.0f) {
      total.maximum[row] = more.maximum[row];
      total.sum[row] = more.sum[row];
      for (int i = 0; i < padded_head; i += 16) _mm512_storeu_ps(to + i, load(from + i));
      continue;
    }
    const float maximum = total.maximum[row] > more.maximum[row] ? total.maximum[row] : more.maximum[row];
    const float a = exp2_of(total.maximum[row] - maximum), b = exp2_of(more.maximum[row] - maximum);
    total.maximum[row] = maximum;
    total.sum[row] = total.sum[row] * a + more.sum[row] * b;
    const __m512 by_a = _mm512_set1_ps(a), by_b = _mm512_set1_ps(b);
    for (int i = 0; i < padded_head; i += 16)
      _mm512_storeu_ps(to + i, _mm512_fmadd_ps(load(from + i), by_b, _mm512_mul_ps(load(to + i), by_a)));
  }
}

void finish(int value_dim, float maximum, float sum, const float* total, float sink, float* out) {
  float factor = 1.0f;
  if (sink != -__builtin_inff()) {
    const float most = sink > maximum ? sink : maximum;
    factor = exp2_of(maximum - most);
    sum = sum * factor + exp2_of(sink - most);
  }
  const __m512 by = _mm512_set1_ps(factor / sum);
  for (int i = 0; i < value_dim; i += 16) {
    _mm512_mask_storeu_ps(out + i, first_lanes(value_dim - i), _mm512_mul_ps(load(total + i), by));
  }
}

const AttentionKernels kKernels{{&segment<F32>, &segment<BF16>, &segment<Int8>}, &fold, &finish};

}  // namespace

const AttentionKernels& attention_kernels_avx512() { return kKernels; }

}  // namespace maitred
