// How a step's attention is divided among the threads. See attention.h.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace maitred {
namespace {

// An item above this part of a thread's share is handed out segment by segment.
constexpr int kItemsPerThread = 8;
// What a segment costs besides its rows' arithmetic, in rows: K and V come from memory.
constexpr int kRowsPerRead = 8;
// Chunks are cut until there are so many items of them for each thread.
constexpr int kItemsOfRowPerThread = 4;
// Single queries' heads are divided until there are this many segments of them for each thread.
constexpr int kSegmentsPerThread = 4;

}  // namespace

AttentionPlan::AttentionPlan(const KVLayout& layout, int num_heads, int window, bool sees_all, int num_threads)
    : num_heads_(num_heads),
      num_kv_heads_(layout.num_kv_heads),
      group_(num_heads / layout.num_kv_heads),
      sweeps_(layout.tiled && !layout.latent && num_heads / layout.num_kv_heads <= kSweepGroup),
      padded_head_(layout.padded_head),
      window_(window),
      sees_all_(sees_all),
      num_threads_(num_threads) {
  if (num_heads < 1 || num_heads % layout.num_kv_heads != 0)
    throw std::invalid_argument(std::to_string(num_heads) + " attention heads cannot share " +
                                std::to_string(layout.num_kv_heads) + " key/value heads");
  if (window < 0) throw std::invalid_argument("a window of " + std::to_string(window) + " tokens");
}

void AttentionPlan::share(SharedMemory& memory, int max_tokens, int max_positions) {
  // Fewer items are handed out by segments than these, for each of them is more than its part of a thread's share; an
  // item has so many rows at most, and the step so many in all.
  const int64_t rows = std::min(int64_t{kItemsPerThread} * num_threads_ * kMaxRows, int64_t{max_tokens} * num_heads_);
  const int64_t segments = (max_positions + kSegmentSlots - 1) / kSegmentSlots;
  capacity_floats_ = rows * segments * (padded_head_ + 2);
  capacity_items_ = static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(num_heads_);
  partials_ = reinterpret_cast<float*>(memory.take(capacity_floats_ * static_cast<int64_t>(sizeof(float))));
  segments_done_ = reinterpret_cast<std::atomic<int>*>(
      memory.take(static_cast<int64_t>(capacity_items_ * sizeof(std::atomic<int>))));
  shares_ = true;
}

void AttentionPlan::build(const StepRows& step) {
  items_.clear();
  slots_.clear();
  units_.clear();
  num_partial_floats_ = 0;
  parts_ = divide_heads(step);
  for (int row = 0; row < step.num_rows; ++row) {
    const bool single = step.first_tokens[row + 1] - step.first_tokens[row] == 1;
    if (single && sweeps_)
      add_single(step, row);
    else
      add_row(step, row);
  }
  divide();
}

int AttentionPlan::divide_heads(const StepRows& step) const {
  int64_t segments = 0;
  for (int row = 0; row < step.num_rows; ++row) {
    const int first = step.first_tokens[row];
    if (step.first_tokens[row + 1] - first != 1) continue;
    const int slots = step.positions[first] + 1;
    segments += ((window_ == 0 ? slots : std::min(slots, window_)) + kSegmentSlots - 1) / kSegmentSlots;
  }
  const int heads_of_part = std::max(1, kBlockRows / group_);  // K/V heads, as a block has room for
  int parts = (num_kv_heads_ + heads_of_part - 1) / heads_of_part;
  while (num_threads_ > 1 && parts * 2 <= num_kv_heads_ &&
         segments * parts < int64_t{kSegmentsPerThread} * num_threads_)
    parts *= 2;
  return std::min(parts, num_kv_heads_);
}

void AttentionPlan::add_single(const StepRows& step, int row) {
  const int token = step.first_tokens[row], position = step.positions[token];
  const int seen = window_ == 0 ? 0 : std::max(0, position - window_ + 1);
  for (int part = 0; part < parts_; ++part) {
    const int from = num_kv_heads_ * part / parts_, to = num_kv_heads_ * (part + 1) / parts_;
    items_.push_back({row, token, 1, from, to - from, from * group_, (to - from) * group_, seen / kSegmentSlots,
                      position / kSegmentSlots + 1, -1});
    slots_.push_back(position + 1 - seen);
  }
}

void AttentionPlan::add_row(const StepRows& step, int row) {
  const int first = step.first_tokens[row], num_tokens = step.first_tokens[row + 1] - first;
  if (num_tokens == 0) return;
  const int num_parts = (group_ + kBlockRows - 1) / kBlockRows;  // of a group of very many heads
  const int queries_of_block = std::max(1, kBlockRows / ((group_ + num_parts - 1) / num_parts));
  const int num_blocks = (num_tokens + queries_of_block - 1) / queries_of_block;
  // K and V are read once for the blocks of an item, but each thread must find some items.
  const int wanted = kItemsOfRowPerThread * num_threads_;
  const int most = std::clamp(num_blocks * num_kv_heads_ / wanted, 1, kMaxRows / kBlockRows);
  const int num_cuts = (num_blocks + most - 1) / most;
  const int queries = (num_blocks + num_cuts - 1) / num_cuts * queries_of_block;
  for (int offset = 0; offset < num_tokens; offset += queries) {
    const int count = std::min(queries, num_tokens - offset);
    const int position = step.positions[first + offset], last = end_seen(step, row, position + count - 1) - 1;
    const int seen = window_ == 0 ? 0 : std::max(0, position - window_ + 1);
    for (int head = 0; head < num_heads_; head += group_) {
      for (int part = 0; part < num_parts; ++part) {
        const int from = group_ * part / num_parts, to = group_ * (part + 1) / num_parts;
        items_.push_back({row, first + offset, count, head / group_, 1, head + from, to - from, seen / kSegmentSlots,
                          last / kSegmentSlots + 1, -1});
        slots_.push_back(last + 1 - seen);
      }
    }
  }
}

void AttentionPlan::divide() {
  const int num_items = static_cast<int>(items_.size());
  std::vector<int64_t> costs(items_.size());
  int64_t total = 0;
  for (int i = 0; i < num_items; ++i) {
    costs[i] = slots_[i] * (kRowsPerRead * items_[i].num_kv_heads + items_[i].num_queries * items_[i].num_heads);
    total += costs[i];
  }
  std::vector<int64_t> unit_costs;
  for (int i = 0; i < num_items; ++i) {
    AttentionItem& item = items_[i];
    const int num_segments = item.end_segment - item.first_segment;
    if (num_threads_ == 1 || num_segments == 1 || costs[i] * num_threads_ * kItemsPerThread <= total) {
      units_.push_back({i, item.first_segment, item.end_segment});
      unit_costs.push_back(costs[i]);
      continue;
    }
    item.partials = num_partial_floats_;
    num_partial_floats_ += int64_t{num_segments} * item.num_queries * item.num_heads * (padded_head_ + 2);
    for (int segment = item.first_segment; segment < item.end_segment; ++segment) {
      units_.push_back({i, segment, segment + 1});
      unit_costs.push_back(costs[i] / num_segments);
    }
  }
  // The longest first, so that the threads end together; equals stay in order, heads of a request side by side.
  std::vector<int> order(units_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return unit_costs[a] > unit_costs[b]; });
  std::vector<AttentionUnit> sorted(units_.size());
  for (std::size_t i = 0; i < order.size(); ++i) sorted[i] = units_[order[i]];
  units_.swap(sorted);
  if (shares_ && (num_partial_floats_ > capacity_floats_ || items_.size() > capacity_items_))
    throw std::length_error("a step's attention has " + std::to_string(items_.size()) + " items and " +
                            std::to_string(num_partial_floats_) + " partial results; ranks share room for less");
  if (num_partial_floats_ > capacity_floats_) {
    capacity_floats_ = num_partial_floats_;
    own_partials_.reset(new float[static_cast<std::size_t>(capacity_floats_)]);
    partials_ = own_partials_.get();
  }
  if (items_.size() > capacity_items_) {
    capacity_items_ = items_.size();
    own_segments_done_.reset(new std::atomic<int>[capacity_items_]());  // each is back at 0 when its op is done
    segments_done_ = own_segments_done_.get();
  }
}

}  // namespace maitred
