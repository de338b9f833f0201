#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "qkv.h"

namespace maitred {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

int64_t round_up_64(int64_t n) { return (n + 63) / 64 * 64; }

// Where things lie in a worker's scratch memory.
struct Places {
  int64_t queries, scores, probabilities, first, end, part_maximum, part_sum, part_out, maximum, sum, out, clean,
      gathered, turned, bytes;
};

Places places(const KVLayout& layout, bool gathers) {
  Places p{};
  int64_t at = 0;
  const auto take = [&](int64_t bytes) {
    const int64_t here = at;
    at += round_up_64(bytes);
    return here;
  };
  const int64_t rows = kMaxRows, block = kBlockRows;
  p.queries = take(rows * query_head_bytes(layout));
  p.scores = take(block * kScoreStride * 4);
  p.probabilities = take(block * kSegmentSlots * 4);
  p.first = take(rows * 4);
  p.end = take(rows * 4);
  p.part_maximum = take(block * 4);
  p.part_sum = take(block * 4);
  p.part_out = take(block * layout.padded_head * 4);
  p.maximum = take(rows * 4);
  p.sum = take(rows * 4);
  p.out = take(rows * layout.padded_head * 4);
  p.clean = take(kSegmentTiles * layout.scales_offset());
  p.gathered = take(gathers ? kSegmentTiles * layout.block_bytes : 0);
  p.turned = take(layout.latent ? kSegmentTiles * layout.scales_offset() : 0);
  p.bytes = (at + 4095) / 4096 * 4096 + 192;  // threads' scratch must not fall on the same cache sets
  return p;
}

// Everything a worker needs to compute units of one op.
struct Job {
  const AttentionOp& op;
  AttentionPlan& plan;
  const KVLayout& tile_layout;
  const KVPool& pool;
  const StepRows& step;
  const uint8_t* queries;
  float* out;
  int64_t out_stride;
  const AttentionKernels& kernels;
  Places at;
  uint8_t* scratch;
  const QKVKernels& formats;

  float* floats(int64_t place) const { return reinterpret_cast<float*>(scratch + place); }
  int32_t* ints(int64_t place) const { return reinterpret_cast<int32_t*>(scratch + place); }
};

int first_position(const Job& job, const AttentionItem& item) { return job.step.positions[item.first_token]; }

// Slots of a segment that some query of the item sees: [first, end).
struct Span {
  int first, end;
};

Span span_of(const Job& job, const AttentionItem& item, int segment) {
  const int position = first_position(job, item), window = job.plan.window();
  const int seen = window == 0 ? 0 : std::max(0, position - window + 1);
  const int base = segment * kSegmentSlots;
  const int end = job.plan.end_seen(job.step, item.row, position + item.num_queries - 1);
  return {std::max(seen - base, 0), std::min(end - base, kSegmentSlots)};
}

// Copy one tile's visible slots out of blocks that are not whole tiles, into the form that the kernels take.
void gather_tile(const Job& job, const AttentionItem& item, int first, int end, uint8_t* tile) {
  const KVLayout& from = job.pool.layout_of(job.op.layer);
  const KVLayout& to = job.tile_layout;
  const int per_word = to.values_per_word, value_bytes = 4 / per_word;
  const int32_t* table = job.step.table(job.op.group, item.row);
  for (int position = first; position < end; ++position) {
    const int lane = position % kTileSlots;
    const uint8_t* cell = job.pool.block_of(job.op.layer, table[position / from.block_size]) +
                          item.kv_head * from.head_stride + position % from.block_size * from.cell_bytes;
    for (int word = 0; word < to.k_words; ++word) {
      const int bytes = std::min(per_word, to.head_dim - word * per_word) * value_bytes;
      std::memcpy(tile + (int64_t{word} * kTileSlots + lane) * 4, cell + word * 4, static_cast<std::size_t>(bytes));
    }
    if (to.latent) continue;
    const uint8_t* value = cell + from.v_offset;
    uint8_t* target =
        tile + to.v_offset + int64_t{lane / per_word} * to.padded_head * 4 + lane % per_word * value_bytes;
    for (int i = 0; i < to.head_dim; ++i)
      std::memcpy(target + int64_t{i} * 4, value + i * value_bytes, static_cast<std::size_t>(value_bytes));
    if (to.dtype == DType::int8) {
      std::memcpy(tile + to.scales_offset() + lane * 4, cell + from.cell_bytes - 8, 4);
      std::memcpy(tile + to.v_offset + to.scales_offset() + lane * 4, cell + from.cell_bytes - 4, 4);
    }
  }
}

// One tile's slots from its first on, which keys behind it are coded with, out of cells of int4.
void expand_tile(const Job& job, const AttentionItem& item, int position, int end, uint8_t* tile) {
  const KVLayout& from = job.pool.layout_of(job.op.layer);
  const int32_t* table = job.step.table(job.op.group, item.row);
  const uint8_t* cells[kTileSlots];
  for (int at = position; at < end; ++at)
    cells[at - position] = job.pool.block_of(job.op.layer, table[at / from.block_size]) +
                           item.kv_head * from.head_stride + at % from.block_size * from.cell_bytes;
  job.formats.expand(from, cells, end - position, job.tile_layout, tile);
}

// The tiles of a segment, by place in it; gathered into scratch where the pool has none.
void find_tiles(const Job& job, const AttentionItem& item, int segment, Span span, const uint8_t** tiles) {
  const KVLayout& layout = job.pool.layout_of(job.op.layer);
  const int base = segment * kSegmentSlots;
  const int32_t* table = job.step.table(job.op.group, item.row);
  for (int tile = span.first / kTileSlots; tile * kTileSlots < span.end; ++tile) {
    const int position = base + tile * kTileSlots;
    if (layout.tiled) {
      tiles[tile] =
          job.pool.block_of(job.op.layer, table[position / layout.block_size]) +
          (int64_t{position % layout.block_size / kTileSlots} * layout.num_kv_heads + item.kv_head) * layout.cell_bytes;
    } else {
      uint8_t* gathered = job.scratch + job.at.gathered + tile * job.tile_layout.block_bytes;
      const int end = std::min(position + kTileSlots, base + span.end);
      if (layout.dtype == DType::q4_1)
        expand_tile(job, item, position, end, gathered);
      else
        gather_tile(job, item, std::max(position, base + span.first), end, gathered);
      tiles[tile] = gathered;
    }
  }
}

// V of the tiles: behind K, or turned out of it.
void find_values(const Job& job, const Segment& work, const uint8_t** values) {
  for (int tile = work.first_tile; tile < work.end_tile; ++tile) {
    values[tile] = work.tiles[tile] + work.layout->v_offset;
    if (!work.layout->latent) continue;
    uint8_t* turned = job.scratch + job.at.turned + tile * work.layout->scales_offset();
    job.formats.turn(*work.layout, work.tiles[tile], turned);
    values[tile] = turned;
  }
}

// Rows of an item are query by query, the group's heads of a query side by side.
void copy_queries(const Job& job, const AttentionItem& item) {
  const int64_t head_bytes = query_head_bytes(job.tile_layout);
  const std::size_t bytes = static_cast<std::size_t>(item.num_heads * head_bytes);
  uint8_t* target = job.scratch + job.at.queries;
  for (int query = 0; query < item.num_queries; ++query, target += bytes) {
    const int64_t token = item.first_token + query;
    std::memcpy(target, job.queries + (token * job.op.num_heads + item.first_head) * head_bytes, bytes);
  }
}

// What each row sees of a segment.
void find_ranges(const Job& job, const AttentionItem& item, int segment, int32_t* first, int32_t* end) {
  const int window = job.plan.window(), base = segment * kSegmentSlots;
  int row = 0;
  for (int query = 0; query < item.num_queries; ++query) {
    const int position = first_position(job, item) + query;
    const int seen = window == 0 ? 0 : std::max(0, position - window + 1);
    const int end_seen = job.plan.end_seen(job.step, item.row, position);
    for (int head = 0; head < item.num_heads; ++head, ++row) {
      first[row] = std::min(std::max(seen - base, 0), kSegmentSlots);
      end[row] = std::max(std::min(end_seen - base, kSegmentSlots), 0);
    }
  }
}

// A segment as the item's queries see it; rows and what is written for them come block by block.
Segment describe_segment(const Job& job, const AttentionItem& item, int segment, const uint8_t** tiles,
                         const uint8_t** values) {
  const Span span = span_of(job, item, segment);
  find_tiles(job, item, segment, span, tiles);
  find_ranges(job, item, segment, job.ints(job.at.first), job.ints(job.at.end));
  Segment work{};
  work.layout = &job.tile_layout;
  work.num_heads = item.num_kv_heads;
  work.query_stride = query_head_bytes(job.tile_layout);
  work.tiles = tiles;
  work.first_tile = span.first / kTileSlots;
  work.end_tile = (span.end + kTileSlots - 1) / kTileSlots;
  work.values = values;
  find_values(job, work, values);
  work.scale = job.op.scale;
  work.softcap = job.op.softcap;
  work.scores = job.floats(job.at.scores);
  work.probabilities = job.scratch + job.at.probabilities;
  work.clean = job.scratch + job.at.clean;
  return work;
}

void compute_block(const Job& job, Segment& work, int row, int rows, const Partial& part) {
  work.rows = rows;
  work.queries = job.scratch + job.at.queries + row * work.query_stride;
  work.first = job.ints(job.at.first) + row;
  work.end = job.ints(job.at.end) + row;
  work.maximum = part.maximum;
  work.sum = part.sum;
  work.out = part.out;
  job.kernels.segment[static_cast<int>(work.layout->dtype)](work);
}

void start(int rows, const Partial& total) {
  std::fill(total.maximum, total.maximum + rows, -std::numeric_limits<float>::infinity());
  std::fill(total.sum, total.sum + rows, 0.0f);
}

float* place_of(const Job& job, const AttentionItem& item, int query) {
  return job.out + (int64_t{item.first_token} + query) * job.out_stride +
         int64_t{item.first_head} * job.tile_layout.value_dim;
}

// The output's lines into the cache before they are written: they lie far apart.
#if defined(__x86_64__)
__attribute__((target("prfchw")))
#endif
void fetch_output(const Job& job, const AttentionItem& item, int query, int end) {
  for (; query < end; ++query) {
    const float* out = place_of(job, item, query);
    for (int i = 0; i < item.num_heads * job.tile_layout.value_dim; i += 16) __builtin_prefetch(out + i, 1, 2);
  }
}

void finish(const Job& job, const AttentionItem& item, const Partial& total, int query, int end) {
  const int value_dim = job.tile_layout.value_dim;
  int row = query * item.num_heads;
  for (; query < end; ++query) {
    float* out = place_of(job, item, query);
    for (int i = 0; i < item.num_heads; ++i, ++row, out += value_dim) {
      const float sink = job.op.sinks == nullptr ? -std::numeric_limits<float>::infinity()
                                                 : job.op.sinks[item.first_head + i] * kLog2E;
      job.kernels.finish(value_dim, total.maximum[row], total.sum[row],
                         total.out + int64_t{row} * job.tile_layout.padded_head, sink, out);
      if (job.tile_layout.dtype == DType::int8 && !job.op.rotated) job.formats.rotate(out, value_dim);
    }
  }
}

// Tiles of a segment from its first on, for fetching ahead: the last again where there are fewer, and any memory where
// the pool has none.
void find_next_tiles(const Job& job, const AttentionItem* item, int segment, const uint8_t** tiles) {
  std::fill(tiles, tiles + kSegmentTiles, job.scratch);
  if (item == nullptr || !job.pool.layout_of(job.op.layer).tiled) return;
  const Span span = span_of(job, *item, segment);
  const int first = span.first / kTileSlots, end = (span.end + kTileSlots - 1) / kTileSlots;
  const uint8_t* found[kSegmentTiles];
  find_tiles(job, *item, segment, span, found);
  for (int i = 0; i < kSegmentTiles; ++i) tiles[i] = found[std::min(first + i, end - 1)];
}

Partial partial_of(AttentionPlan& plan, const AttentionItem& item, int segment, int padded_head) {
  const int64_t rows = int64_t{item.num_queries} * item.num_heads;
  float* at = plan.partials() + item.partials + (segment - item.first_segment) * rows * (padded_head + 2);
  return {at + rows * padded_head, at + rows * (padded_head + 1), at};
}

Partial from_row(const Partial& part, int row, int padded_head) {
  return {part.maximum + row, part.sum + row, part.out + int64_t{row} * padded_head};
}

// A block's rows are folded and written while they are in the nearest cache.
void run_unit(const Job& job, const AttentionUnit& unit, const AttentionUnit* next) {
  const AttentionItem& item = job.plan.items()[unit.item];
  const int rows = item.num_queries * item.num_heads, padded_head = job.tile_layout.padded_head;
  const int block_rows = std::max(1, kBlockRows / item.num_heads) * item.num_heads;
  const Partial part{job.floats(job.at.part_maximum), job.floats(job.at.part_sum), job.floats(job.at.part_out)};
  const Partial total{job.floats(job.at.maximum), job.floats(job.at.sum), job.floats(job.at.out)};
  copy_queries(job, item);
  const bool split = item.partials >= 0;
  for (int segment = unit.first_segment; segment < unit.end_segment; ++segment) {
    const bool first = segment == unit.first_segment, last = segment + 1 == unit.end_segment;
    const uint8_t *tiles[kSegmentTiles], *values[kSegmentTiles], *next_tiles[kSegmentTiles];
    if (!last)
      find_next_tiles(job, &item, segment + 1, next_tiles);
    else
      find_next_tiles(job, next == nullptr ? nullptr : &job.plan.items()[next->item],
                      next == nullptr ? 0 : next->first_segment, next_tiles);
    Segment work = describe_segment(job, item, segment, tiles, values);
    for (int row = 0; row < rows; row += block_rows) {
      const int end = std::min(row + block_rows, rows);
      work.next_tiles = row == 0 ? next_tiles : nullptr;
      if (split) {
        compute_block(job, work, row, end - row,
                      from_row(partial_of(job.plan, item, segment, padded_head), row, padded_head));
        continue;
      }
      if (last) fetch_output(job, item, row / item.num_heads, end / item.num_heads);
      const Partial sum = from_row(total, row, padded_head);
      compute_block(job, work, row, end - row, first ? sum : part);
      if (!first) job.kernels.fold(end - row, padded_head, sum, part);
      if (last) finish(job, item, total, row / item.num_heads, end / item.num_heads);
    }
  }
  if (!split) return;
  const int num_segments = item.end_segment - item.first_segment;
  std::atomic<int>& done = job.plan.segments_done(unit.item);
  if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < num_segments) return;
  done.store(0, std::memory_order_relaxed);
  start(rows, total);
  for (int segment = item.first_segment; segment < item.end_segment; ++segment)
    job.kernels.fold(rows, padded_head, total, partial_of(job.plan, item, segment, padded_head));
  finish(job, item, total, 0, item.num_queries);
}

}  // namespace

AttentionScratch::AttentionScratch(const KVLayout& layout, int num_threads)
    : tile_layout_(layout.tiled ? layout
                                : kv_layout(layout.dtype == DType::q4_1 ? DType::int8 : layout.dtype, 1,
                                            layout.head_dim, kTileSlots, layout.latent ? layout.value_dim : 0)),
      bytes_per_worker_(round_up_64(places(tile_layout_, !layout.tiled).bytes)),
      pages_(num_threads * bytes_per_worker_) {}

void attention(const AttentionOp& op, AttentionPlan& plan, const AttentionScratch& scratch, const KVPool& pool,
               const StepRows& step, const uint8_t* queries, float* out, int64_t out_stride, WorkCounter& counter,
               const Worker& worker, Isa isa) {
  const Job job{op,
                plan,
                scratch.tile_layout(),
                pool,
                step,
                queries,
                out,
                out_stride,
                attention_kernels(isa),
                places(scratch.tile_layout(), !pool.layout_of(op.layer).tiled),
                scratch.of_worker(worker.index),
                qkv_kernels(isa)};
  const std::vector<AttentionUnit>& units = plan.units();
  const int num_units = static_cast<int>(units.size());
  for (int unit; (unit = counter.take()) < num_units;) {
    const int next = unit + worker.count;  // as long as the threads take turns; only a hint
    run_unit(job, units[unit], next < num_units ? &units[next] : nullptr);
  }
}

const AttentionKernels& attention_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) return attention_kernels_amx();
  if (isa == Isa::avx512) return attention_kernels_avx512();
  if (isa == Isa::avx2) return attention_kernels_avx2();
#elif defined(__aarch64__)
  if (isa == Isa::neon) return attention_kernels_neon();
#endif
  (void)isa;
  return attention_kernels_plain();
}

}  // namespace maitred
