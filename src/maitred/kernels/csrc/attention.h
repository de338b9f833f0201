// Ragged paged attention: prefill chunks, decode rows and mixtures of them in one call.
//
// **The same bits whatever the load.** A query's result is folded, in order, from segments of 256 positions counted
// from the start of its context. Within a segment its scores come first, then their exact maximum, then
// p = exp2(score - maximum), rounded as the pool's dtype asks, then the sum of p * V in order of position. Nothing in
// that depends on which queries share the call, on chunks, blocks, threads, or who computed which segment. Slots that a
// query does not see are left out of the arithmetic, not multiplied by zero: they may hold anything.
//
// Work is handed out as items: some queries of one request with the heads that share a K/V head, so that K and V are
// read once for the group; or a single query with several K/V heads, whose cells lie side by side in the pool, because
// memory is fastest in long runs. An item that is much of the step is handed out segment by segment, and whoever
// finishes its last one folds. Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867; segments folded apart:
// Flash-Decoding, Dao et al. 2023. Paged attention: Kwon et al. 2023, arXiv:2309.06180.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"
#include "kv_pool.h"
#include "team.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr int kSegmentSlots = 256;
constexpr int kSegmentTiles = kSegmentSlots / kTileSlots;
// Room for a row's scores: rows of a power of two would meet on few sets of a cache.
constexpr int kScoreStride = kSegmentSlots + kTileSlots;
constexpr int kMaxRows = 192;   // query rows of an item: queries x heads
constexpr int kBlockRows = 48;  // of them, those that are computed at once
constexpr int kSweepGroup = 8;  // most query heads of a K/V head for items of several K/V heads

struct AttentionOp {
  int layer;  // of its group's, in the pool
  int group;
  int num_heads;
  float scale;           // multiplies q.k; positive
  float softcap;         // c: score becomes c * tanh(score / c); 0: none
  const float* sinks;    // [num_heads] a logit a head that only adds to the denominator; null: none
  bool rotated = false;  // an int8 pool's heads are left as H out / block, for a reader that would rotate them again
};

// Queries first_token .. of one request and heads first_head .. of some K/V heads (of one, if there are many queries),
// over all segments they see.
struct AttentionItem {
  int row;
  int first_token;
  int num_queries;
  int kv_head;
  int num_kv_heads;
  int first_head;
  int num_heads;
  int first_segment;
  int end_segment;
  int64_t partials;  // floats into the partials where handed out by segments, else -1
};

struct AttentionUnit {
  int item;
  int first_segment;
  int end_segment;
};

// How a step's attention is divided, for all layers of one window. Built once a step by one thread; reusable.
class AttentionPlan {
 public:
  // window 0: none. sees_all: a query sees all tokens of its request up to the step's last one, those behind it too.
  // Throws std::invalid_argument when num_kv_heads does not divide num_heads.
  AttentionPlan(const KVLayout& layout, int num_heads, int window, bool sees_all, int num_threads);
  // From now on what threads leave for each other lies in `memory`, with room for steps of so many tokens.
  void share(SharedMemory& memory, int max_tokens, int max_positions);
  void build(const StepRows& step);

  const std::vector<AttentionItem>& items() const { return items_; }
  const std::vector<AttentionUnit>& units() const { return units_; }
  int window() const { return window_; }
  // Position behind the last one that the row's query at `position` sees.
  int end_seen(const StepRows& step, int row, int position) const {
    return (sees_all_ ? step.positions[step.first_tokens[row + 1] - 1] : position) + 1;
  }
  int64_t num_partial_floats() const { return num_partial_floats_; }
  float* partials() { return partials_; }
  std::atomic<int>& segments_done(int item) { return segments_done_[item]; }

 private:
  int divide_heads(const StepRows& step) const;
  void add_row(const StepRows& step, int row);
  void add_single(const StepRows& step, int row);
  void divide();

  int num_heads_;
  int num_kv_heads_;
  int group_;      // query heads that share a K/V head
  bool sweeps_;    // single queries take several K/V heads at once
  int parts_ = 1;  // into which the K/V heads of a single query are divided
  int padded_head_;
  int window_;
  bool sees_all_;
  int num_threads_;
  std::vector<AttentionItem> items_;
  std::vector<int64_t> slots_;  // of each item: K/V slots it reads
  std::vector<AttentionUnit> units_;
  int64_t num_partial_floats_ = 0;
  int64_t capacity_floats_ = 0;
  float* partials_ = nullptr;
  std::unique_ptr<float[]> own_partials_;
  std::size_t capacity_items_ = 0;
  std::atomic<int>* segments_done_ = nullptr;
  std::unique_ptr<std::atomic<int>[]> own_segments_done_;
  bool shares_ = false;
};

// Each thread's working memory, for all layers and windows.
class AttentionScratch {
 public:
  AttentionScratch(const KVLayout& layout, int num_threads);
  uint8_t* of_worker(int index) const { return pages_.begin() + index * bytes_per_worker_; }
  const KVLayout& tile_layout() const { return tile_layout_; }
  int64_t num_bytes() const { return pages_.num_bytes(); }

 private:
  KVLayout tile_layout_;  // the pool's, or what its slots are gathered into: one head, one tile
  int64_t bytes_per_worker_;
  Pages pages_;
};

// queries [T][num_heads][query_head_bytes] as qkv() leaves them; out [T][out_stride] gets num_heads * value_dim values
// a token. The positions of a row's tokens follow each other. Called by all workers.
void attention(const AttentionOp& op, AttentionPlan& plan, const AttentionScratch& scratch, const KVPool& pool,
               const StepRows& step, const uint8_t* queries, float* out, int64_t out_stride, WorkCounter& counter,
               const Worker& worker, Isa isa);

// One segment of 256 positions for some query rows: what the instruction sets implement.
struct Segment {
  const KVLayout* layout;  // of the tiles
  int num_heads;           // K/V heads: 1, or several and a single query
  int rows;                // of each head the same number, one head's after the other's
  const uint8_t* queries;
  int64_t query_stride;
  const uint8_t* const* tiles;   // [kSegmentTiles] K of the first head; those of [first_tile, end_tile) are there
  const uint8_t* const* values;  // V of it, likewise
  int first_tile;
  int end_tile;
  const int32_t* first;  // [rows] slots of the segment that the row sees: [first, end), perhaps none
  const int32_t* end;
  float scale;
  float softcap;
  float* scores;           // [rows][kScoreStride] scratch
  uint8_t* probabilities;  // [rows][kSegmentSlots * 4] scratch
  float* maximum;          // [rows] out; -inf where the row sees nothing
  float* sum;              // [rows] out; 0 where the row sees nothing
  uint8_t* clean;          // [kSegmentTiles][scales_offset()] scratch: copies of V
  float* out;              // [rows][padded_head] out, not divided by the sum; anything where the row sees nothing
  const uint8_t* const*
      next_tiles;  // [kSegmentTiles] what this thread will probably read next; null: what it just read
};

// Partial results of some query rows.
struct Partial {
  float* maximum;
  float* sum;
  float* out;
};

// What they share, a copy for each file.
static inline int smaller(int a, int b) { return a < b ? a : b; }
static inline int larger(int a, int b) { return a > b ? a : b; }

struct AttentionKernels {
  void (*segment[3])(const Segment& segment);  // by the pool's dtype
  // `more` into `total`, row by row; a row of sum 0 is nothing.
  void (*fold)(int rows, int padded_head, const Partial& total, const Partial& more);
  // out = total / (sum + sink's share) of one row, value_dim values; sink in powers of two, -inf for none.
  void (*finish)(int value_dim, float maximum, float sum, const float* total, float sink, float* out);
};
const AttentionKernels& attention_kernels(Isa isa);
const AttentionKernels& attention_kernels_plain();
const AttentionKernels& attention_kernels_avx2();
const AttentionKernels& attention_kernels_avx512();
const AttentionKernels& attention_kernels_amx();
const AttentionKernels& attention_kernels_neon();

}  // namespace maitred
