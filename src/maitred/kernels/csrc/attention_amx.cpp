// Attention with AMX: products of tiles of up to 16 rows for bf16 pools, and for the chunks of int8 ones. float32 and
// single queries over int8 are as AVX-512 has them, to the bit; so are chunks over int8, whose sums are integers.
//
// Scores of a tile of slots are sums over 16 words of the head after the other, its last words apart; values are added
// 16 slots after the other. Both follow from a slot's position alone, so a query's sums are the same bits in a chunk
// and by itself: a row of a product takes nothing from its neighbours, and weights of 0 add nothing to finite values.
// Tiles of V that some row does not see in full are cleaned of everything else first.
#include "attention_amx_tiles.h"
#include "attention_avx512_walk.h"
#include "attention_avx512_weights.h"

namespace maitred {
namespace {

constexpr int kWeighedRows = 8;  // no row waits for its own maximum, and scores are still near
constexpr int kFewRows = 8;      // chunks of no more over an int8 pool are left to AVX-512

// An item's rows in tiles of `height`; the last tile begins early enough to be full, and what it has in common with the
// one before comes out the same.
struct RowTiles {
  int begin, end, height, count;
  RowTiles(int first, int num_rows)
      : begin(first),
        end(first + num_rows),
        height(smaller(num_rows, kTileRows)),
        count((num_rows + kTileRows - 1) / kTileRows) {}
  int row(int tile) const { return smaller(begin + tile * kTileRows, end - height); }
};
static_assert(kBlockRows <= 4 * kTileRows, "a tile of sums for each");

// What a product fetches into the cache meanwhile: nothing, or into the first or the second level what comes next.
enum class Fetch { none, near, far };

template <Fetch kFetch>
inline void fetch(const uint8_t* at, int64_t line_bytes, int lines) {
  if (kFetch == Fetch::none) return;
  for (int i = 0; i < lines; ++i)
    _mm_prefetch(reinterpret_cast<const char*>(at + i * line_bytes), kFetch == Fetch::near ? _MM_HINT_T0 : _MM_HINT_T1);
}

// Scores of N tiles of rows over tiles [tile, end_tile) of bf16 keys.
template <Fetch kFetch, int N>
inline void score_bf16(const Segment& work, const Cells& cells, const RowTiles& rows, int tile, int end_tile) {
  const int64_t stride = work.query_stride;
  const int whole = work.layout->k_words / kTileWords * kTileWords, tail = work.layout->k_words - whole;
  const uint8_t* queries[N];
  float* scores[N];
  for (int n = 0; n < N; ++n) {
    queries[n] = work.queries + rows.row(n) * stride;
    scores[n] = work.scores + rows.row(n) * kScoreStride;
  }
  for (; tile < end_tile; ++tile) {
    const uint8_t *keys = cells.at(tile), *ahead = cells.next(tile);
    each<N>([](auto n) { zero_tile<n.value>(); });
    const uint8_t* after = cells.at(smaller(tile + 1, end_tile - 1));
    for (int w = 0; w < whole; w += kTileWords) {
      fetch<kFetch>(ahead + w * 64, 64, kTileWords);
      if (kFetch != Fetch::near)
        fetch<Fetch::near>(w + kTileWords < whole ? keys + (w + kTileWords) * 64 : after, 64, kTileWords);
      load_tile<kKeys>(keys + w * 64, 64);
      each<N>([&](auto n) {
        load_tile<kQueries>(queries[n.value] + w * 4, stride);
        add_bf16<n.value, kQueries, kKeys>();
      });
    }
    if (tail > 0) {
      fetch<kFetch>(ahead + whole * 64, 64, tail);
      load_tile<kTailKeys>(keys + whole * 64, 64);
      each<N>([&](auto n) {
        load_tile<kTailQueries>(queries[n.value] + whole * 4, stride);
        add_bf16<n.value, kTailQueries, kTailKeys>();
      });
    }
    each<N>([&](auto n) { store_tile<n.value>(scores[n.value] + tile * kTileSlots, kScoreStride * 4); });
  }
}

// A row's weights are zero where others of its tile see more.
inline void weigh_bf16(const Segment& work, int row, int head, int first_tile, int end_tile) {
  weigh_row<BF16>(work, row, head, first_tile, end_tile);
  uint8_t* weights = work.probabilities + int64_t{row} * BF16::kWeightBytes;
  const bool sees = work.first[row] < work.end[row];
  const int from = sees ? work.first[row] / kPair * kPair : kSegmentSlots;
  const int to = sees ? (work.end[row] + kPair - 1) / kPair * kPair : kSegmentSlots;
  for (int i = first_tile * kTileSlots; i < smaller(from, end_tile * kTileSlots); i += kTileSlots)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i * 2), _mm256_setzero_si256());
  for (int i = to; i < end_tile * kTileSlots; i += kTileSlots)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(weights + i * 2), _mm256_setzero_si256());
}

// N tiles of rows and C of columns: what tiles [tile, end_tile) of bf16 values add to `out`, or what they come to.
template <Fetch kFetch, int N, int C>
inline void value_tiles(const Segment& work, const Cells& cells, const RowTiles& rows, int tile, int end_tile,
                        int column, bool resume) {
  const int64_t width = work.layout->padded_head, line_bytes = width * 4;
  float* out[N];
  const uint8_t* weights[N];
  for (int n = 0; n < N; ++n) {
    out[n] = work.out + rows.row(n) * width + column * 16;
    weights[n] = work.probabilities + int64_t{rows.row(n)} * BF16::kWeightBytes;
  }
  each<N * C>([&](auto i) {
    if (resume)
      load_tile<i.value>(out[i.value / C] + i.value % C * 16, line_bytes);
    else
      zero_tile<i.value>();
  });
  for (; tile < end_tile; ++tile) {
    const uint8_t *values = cells.at(tile) + column * 64, *ahead = cells.next(tile) + column * 64;
    if (N == 1) load_tile<kWeights>(weights[0] + tile * kTileSlots * 2, BF16::kWeightBytes);
    const uint8_t* after = cells.at(smaller(tile + 1, end_tile - 1)) + column * 64;
    each<C>([&](auto c) {
      fetch<kFetch>(ahead + c.value * 64, line_bytes, kTileSlots / 2);
      if (kFetch != Fetch::near) fetch<Fetch::near>(after + c.value * 64, line_bytes, kTileSlots / 2);
      load_tile<kValues>(values + c.value * 64, line_bytes);
      each<N>([&](auto n) {
        if (N > 1) load_tile<kWeights>(weights[n.value] + tile * kTileSlots * 2, BF16::kWeightBytes);
        add_bf16<n.value * C + c.value, kWeights, kValues>();
      });
    });
  }
  each<N * C>([&](auto i) { store_tile<i.value>(out[i.value / C] + i.value % C * 16, line_bytes); });
}

template <Fetch kFetch, int N>
inline void sum_bf16(const Segment& work, const Cells& cells, const RowTiles& rows, int tile, int end_tile,
                     bool resume) {
  constexpr int kColumns = kSumTiles / N;
  const int columns = work.layout->padded_head / 16;
  int column = 0;
  for (; column + kColumns <= columns; column += kColumns)
    value_tiles<kFetch, N, kColumns>(work, cells, rows, tile, end_tile, column, resume);
  for (; column < columns; ++column) value_tiles<kFetch, N, 1>(work, cells, rows, tile, end_tile, column, resume);
}

// A copy of a tile of bf16 values with zeros in all slots but [first, end).
inline void clean_tile(const KVLayout& layout, const uint8_t* values, int first, int end, uint8_t* out) {
  for (int w = 0; w < kTileSlots / 2; ++w) {
    const uint32_t low = 2 * w >= first && 2 * w < end ? 0x0000ffffu : 0;
    const uint32_t high = 2 * w + 1 >= first && 2 * w + 1 < end ? 0xffff0000u : 0;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(low | high));
    for (int c = 0; c < layout.padded_head / 16; ++c, values += 64, out += 64)
      _mm512_storeu_si512(out, _mm512_and_si512(load_bits(values), mask));
  }
}

// Whether a clean tile holds finite values only.
inline bool is_finite(const KVLayout& layout, const uint8_t* values) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 found = 0;
  for (int i = 0; i < layout.padded_head / 2; ++i)
    found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(load_bits(values + i * 64), exponent), exponent);
  return found == 0;
}

// A tile of V that not all rows see alike and that is not finite: each row by itself, over what it sees. Strides of 0
// make all rows of a tile the same.
void sum_apart(const Segment& work, const uint8_t* values, const RowTiles& rows, int tile, uint8_t* clean) {
  const int columns = work.layout->padded_head / 16;
  const int64_t line_bytes = columns * 64;
  for (int row = rows.begin; row < rows.end; ++row) {
    const int first = work.first[row] - tile * kTileSlots, end = work.end[row] - tile * kTileSlots;
    if (first >= smaller(end, kTileSlots) || end <= 0) continue;
    clean_tile(*work.layout, values, first, end, clean);
    load_tile<kWeights>(work.probabilities + int64_t{row} * BF16::kWeightBytes + tile * kTileSlots * 2, 0);
    for (int column = 0; column < columns; ++column) {
      float* out = work.out + (int64_t{row} * columns + column) * 16;
      load_tile<0>(out, 0);
      load_tile<kValues>(clean + column * 64, line_bytes);
      add_bf16<0, kWeights, kValues>();
      store_tile<0>(out, 0);
    }
  }
}

// A chunk's rows of one K/V head, N tiles of them.
template <Fetch kFetch, int N>
void attend_bf16(const Segment& work) {
  const RowTiles rows(0, work.rows);
  const Seen seen = seen_by(work, 0, work.rows);
  const int first_tile = seen.first / kTileSlots, end_tile = (seen.end + kTileSlots - 1) / kTileSlots;
  score_bf16<kFetch, N>(work, {work.tiles, 0, work.values, 0, 0}, rows, first_tile, end_tile);
  for (int from = 0; from < work.rows; from += kWeighedRows) {
    const int to = smaller(from + kWeighedRows, work.rows);
    for (int row = from; row < to; ++row) work.maximum[row] = find_maximum(work, row);
    for (int row = from; row < to; ++row) weigh_bf16(work, row, 0, first_tile, end_tile);
  }
  configure_values(rows.height, work.layout->k_words % kTileWords);
  const uint8_t* values[kSegmentTiles];
  bool apart[kSegmentTiles];
  const int64_t clean_bytes = work.layout->scales_offset();
  for (int tile = first_tile; tile < end_tile; ++tile) {
    const int slot = tile * kTileSlots;
    values[tile] = work.values[tile];
    apart[tile] = false;
    if (seen.common_first <= slot && slot + kTileSlots <= seen.common_end) continue;
    uint8_t* clean = work.clean + tile * clean_bytes;
    clean_tile(*work.layout, values[tile], seen.first - slot, seen.end - slot, clean);
    apart[tile] = !is_finite(*work.layout, clean);
    values[tile] = clean;
  }
  const bool fetches = kFetch != Fetch::none;
  const Cells cells{values, 0, fetches ? work.next_tiles : values, fetches ? -work.first_tile : 0, 0};
  for (int tile = first_tile, end; tile < end_tile; tile = end) {
    for (end = tile; end < end_tile && !apart[end];) ++end;
    if (tile < end || tile == first_tile) sum_bf16<kFetch, N>(work, cells, rows, tile, end, tile > first_tile);
    if (end == end_tile) break;
    sum_apart(work, work.values[end], rows, end, work.clean + end * clean_bytes);
    ++end;
  }
}

// A single query over several K/V heads; each row's sums are those of attend_bf16.
void sweep_bf16(const Segment& work) {
  const int group = work.rows / work.num_heads, first = work.first[0], end = work.end[0];
  Walk walk(work);
  for (; walk.in(0); walk.advance())
    score_bf16<Fetch::near, 1>(work, walk.cells(), {walk.head() * group, group}, walk.tile(), walk.end_tile());
  for (int row = 0; row < work.rows; ++row) work.maximum[row] = find_maximum(work, row);
  for (int row = 0; row < work.rows; ++row) weigh_bf16(work, row, row / group, work.first_tile, work.end_tile);
  configure_values(group, work.layout->k_words % kTileWords);
  for (; walk.in(1); walk.advance()) {
    Cells cells = walk.cells();
    const uint8_t* values[kSegmentTiles];
    for (int tile = walk.tile(); tile < walk.end_tile(); ++tile) {
      const int slot = tile * kTileSlots;
      values[tile] = cells.at(tile);
      if (first <= slot && slot + kTileSlots <= end) continue;
      values[tile] = work.clean + (tile - walk.tile()) * work.layout->scales_offset();
      clean_tile(*work.layout, cells.at(tile), first - slot, end - slot,
                 work.clean + (tile - walk.tile()) * work.layout->scales_offset());
    }
    cells.tiles = values;
    cells.shift = 0;
    sum_bf16<Fetch::near, 1>(work, cells, {walk.head() * group, group}, walk.tile(), walk.end_tile(),
                             walk.tile() > work.first_tile);
  }
}

template <Fetch kFetch>
void attend_bf16(const Segment& work) {
  switch ((work.rows + kTileRows - 1) / kTileRows) {
    case 1:
      return attend_bf16<kFetch, 1>(work);
    case 2:
      return attend_bf16<kFetch, 2>(work);
    case 3:
      return attend_bf16<kFetch, 3>(work);
    default:
      return attend_bf16<kFetch, 4>(work);
  }
}

void segment_bf16(const Segment& work) {
  const int height = work.num_heads > 1 ? work.rows / work.num_heads : smaller(work.rows, kTileRows);
  configure_scores(height, work.layout->k_words % kTileWords);
  if (work.num_heads > 1) {
    sweep_bf16(work);
  } else if (work.next_tiles == nullptr) {
    attend_bf16<Fetch::none>(work);
  } else {
    attend_bf16<Fetch::far>(work);
  }
  release_tiles();
}

// Scores of N tiles of rows, from the n-th, over a tile of int8 keys.
template <Fetch kFetch, int N>
inline void score_int8(const Segment& work, const RowTiles& rows, int first, int tile) {
  const KVLayout& layout = *work.layout;
  const int64_t stride = work.query_stride, part = int8_part(layout);
  const int whole = layout.k_words / kTileWords * kTileWords, tail = layout.k_words - whole;
  const uint8_t *keys = work.tiles[tile], *ahead = keys + layout.v_offset;
  alignas(64) int32_t sums[2 * N][kTileRows][kTileSlots];
  each<2 * N>([](auto i) { zero_tile<i.value>(); });
  for (int w = 0; w < whole; w += kTileWords) {
    fetch<kFetch>(ahead + w * 64, 64, kTileWords);
    load_tile<kKeys>(keys + w * 64, 64);
    each<2 * N>([&](auto i) {
      const uint8_t* query = work.queries + rows.row(first + i.value / 2) * stride + i.value % 2 * part;
      load_tile<kQueries>(query + w * 4, stride);
      add_signed_unsigned<i.value, kQueries, kKeys>();
    });
  }
  if (tail > 0) {
    fetch<kFetch>(ahead + whole * 64, 64, tail);
    load_tile<kTailKeys>(keys + whole * 64, 64);
    each<2 * N>([&](auto i) {
      const uint8_t* query = work.queries + rows.row(first + i.value / 2) * stride + i.value % 2 * part;
      load_tile<kTailQueries>(query + whole * 4, stride);
      add_signed_unsigned<i.value, kTailQueries, kTailKeys>();
    });
  }
  each<2 * N>([&](auto i) { store_tile<i.value>(sums[i.value], 64); });
  const __m512 key_scales = load(keys + layout.scales_offset());
  for (int n = 0; n < N; ++n) {
    const int row = rows.row(first + n), height = rows.height;
    const uint8_t* tail = work.queries + row * stride + 2 * part;
    float* scores = work.scores + row * kScoreStride + tile * kTileSlots;
    for (int i = 0; i < height; ++i, tail += stride, scores += kScoreStride)
      _mm512_storeu_ps(scores,
                       Int8::score({load_bits(sums[2 * n][i]), load_bits(sums[2 * n + 1][i])}, tail, key_scales));
  }
}

constexpr int kGathered = 4;  // tiles of int8 values that fill a tile of products

// V of tiles [tile, end_tile) as lines of 64 slots' words: [tile / 4][word of 4 slots][padded head].
inline void gather_int8(const Segment& work, int tile, int end_tile) {
  const int64_t bytes = work.layout->scales_offset();
  for (; tile < end_tile; ++tile) {
    const uint8_t* values = work.values[tile];
    for (int64_t i = 0; i < bytes; i += 64) _mm512_storeu_si512(work.clean + tile * bytes + i, load_bits(values + i));
  }
}

template <int N>
inline void sum_int8(const Segment& work, const RowTiles& rows, int first, int group, int end_group, int column) {
  const int64_t width = work.layout->padded_head, line_bytes = width * 4;
  alignas(64) int32_t sums[2 * N][kTileRows][kTileSlots];
  each<2 * N>([](auto i) { zero_tile<i.value>(); });
  for (; group < end_group; ++group) {
    load_tile<kKeys>(work.clean + group * kTileWords * line_bytes + column * 64, line_bytes);
    each<2 * N>([&](auto i) {
      const uint8_t* weights =
          work.probabilities + int64_t{rows.row(first + i.value / 2)} * Int8::kWeightBytes + i.value % 2 * Int8::kLow;
      load_tile<kQueries>(weights + group * kGathered * kTileSlots, Int8::kWeightBytes);
      add_unsigned_signed<i.value, kQueries, kKeys>();
    });
  }
  each<2 * N>([&](auto i) { store_tile<i.value>(sums[i.value], 64); });
  for (int n = 0; n < N; ++n) {
    const int row = rows.row(first + n), height = rows.height;
    const uint8_t* factor = work.probabilities + int64_t{row} * Int8::kWeightBytes + Int8::kFactor;
    float* out = work.out + row * width + column * 16;
    for (int i = 0; i < height; ++i, factor += Int8::kWeightBytes, out += width) {
      const __m512i sum =
          _mm512_add_epi32(_mm512_slli_epi32(load_bits(sums[2 * n][i]), 8), load_bits(sums[2 * n + 1][i]));
      _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(float_at(factor))));
    }
  }
}

void segment_int8(const Segment& work) {
  if (work.num_heads > 1 || work.rows <= kFewRows)
    return attention_kernels_avx512().segment[static_cast<int>(DType::int8)](work);
  const RowTiles rows(0, work.rows);
  const Seen seen = seen_by(work, 0, work.rows);
  const int first_tile = seen.first / kTileSlots, end_tile = (seen.end + kTileSlots - 1) / kTileSlots;
  configure_scores(rows.height, work.layout->k_words % kTileWords);
  for (int tile = first_tile; tile < end_tile; ++tile)
    for (int n = 0; n < rows.count; n += 2) {
      if (n == 0 && work.next_tiles != nullptr && rows.count > 1)
        score_int8<Fetch::far, 2>(work, rows, n, tile);
      else
        n + 1 < rows.count ? score_int8<Fetch::none, 2>(work, rows, n, tile)
                           : score_int8<Fetch::none, 1>(work, rows, n, tile);
    }
  const int group = first_tile / kGathered, end_group = (end_tile + kGathered - 1) / kGathered;
  for (int from = 0; from < work.rows; from += kWeighedRows) {
    const int to = smaller(from + kWeighedRows, work.rows);
    for (int row = from; row < to; ++row) work.maximum[row] = find_maximum(work, row);
    for (int row = from; row < to; ++row) weigh_row<Int8>(work, row, 0, group * kGathered, end_group * kGathered);
  }
  gather_int8(work, first_tile, end_tile);
  for (int n = 0; n < rows.count; n += 2)
    for (int column = 0; column < work.layout->padded_head / 16; ++column)
      n + 1 < rows.count ? sum_int8<2>(work, rows, n, group, end_group, column)
                         : sum_int8<1>(work, rows, n, group, end_group, column);
  release_tiles();
}

}  // namespace

const AttentionKernels& attention_kernels_amx() {
  static const AttentionKernels kernels = [] {
    AttentionKernels k = attention_kernels_avx512();
    k.segment[static_cast<int>(DType::bf16)] = &segment_bf16;
    k.segment[static_cast<int>(DType::int8)] = &segment_int8;
    return k;
  }();
  return kernels;
}

}  // namespace maitred
