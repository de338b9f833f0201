#include "adapters.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace maitred {
namespace {

constexpr int kMostSlots = 4096, kMostSharedRank = 1024;  // of adapters that ranks share

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t value_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Floats of a row of sums behind a panel: of the linear's tile by tile, gate and up of one tile side by side.
int panel_place(const LinearShape& shape, int panel) {
  if (!shape.gated) return panel * kPanel;
  const int half = num_panels(shape) / 2;
  return panel < half ? panel * kTile : (panel - half) * kTile + kPanel;
}

void check_part(const LowRank& part, const LinearShape& shape) {
  int panels = 0;
  bool fits = part.rank > 0 && part.rank % kRanksAtOnce == 0 && (part.dtype == DType::f32 || part.dtype == DType::bf16);
  for (const PanelRun& run : part.runs) {
    fits = fits && run.num_panels >= 0 && run.first_rank >= 0 && run.num_ranks >= 0 &&
           run.num_ranks <= part.rank - run.first_rank && run.num_panels <= num_panels(shape) - panels;
    if (fits) panels += run.num_panels;
  }
  if (!fits || panels != num_panels(shape))
    throw std::invalid_argument("an adapter of rank " + std::to_string(part.rank) + " does not fit a linear of " +
                                std::to_string(num_panels(shape)) + " panels");
}

}  // namespace

int num_panels(const LinearShape& shape) { return num_tiles(shape) * (kTile / kPanel); }

int64_t a_bytes(const LowRank& adapter, const LinearShape& shape) {
  return int64_t{adapter.rank} * low_rank_k(shape.k) * value_bytes(adapter.dtype);
}

int64_t b_bytes(const LowRank& adapter) {
  int64_t values = 0;
  for (const PanelRun& run : adapter.runs) values += int64_t{run.num_panels} * run.num_ranks * kPanel;
  return values * value_bytes(adapter.dtype);
}

// An adapter as other ranks find it; addresses as offsets into shared_bytes.
struct Adapters::Published {
  static constexpr int kMostLinears = 1024, kMostRuns = 8;
  struct Part {
    int64_t a, b;
    DType dtype;
    int rank, num_runs;
    PanelRun runs[kMostRuns];
  };
  int64_t version;  // 0: none was ever here
  Part parts[kMostLinears];
};

Adapters::Adapters(int max_rows, int num_threads, Isa isa, Team* team)
    : max_rows_(max_rows), num_threads_(num_threads), kernels_(low_rank_kernels(isa)), team_(team) {
  if (team == nullptr) return;
  // Addresses: what is not touched is no memory.
  published_ = reinterpret_cast<Published*>(team->memory().take(kMostSlots * int64_t{sizeof(Published)}));
  shared_bytes_ = team->memory().take(kSharedBytes);
  sum_stride_ = kMostSharedRank;
  sums_ = std::make_unique<Pages>(max_rows_ * sum_stride_ * static_cast<int64_t>(sizeof(float)), &team->memory());
}

void Adapters::release_shared(int64_t offset, int64_t num_bytes) {
  constexpr int64_t kPage = 4096;
  if (shared_bytes_ == nullptr || offset < 0 || num_bytes < 1 || offset % kPage != 0 ||
      offset + num_bytes > kSharedBytes)
    throw std::invalid_argument("no such memory of adapters");
  madvise(shared_bytes_ + offset, static_cast<size_t>(round_up(num_bytes, kPage)), MADV_REMOVE);
}

void Adapters::publish(int slot, const std::vector<LowRank>& parts) {
  if (slot >= kMostSlots || parts.size() > static_cast<size_t>(Published::kMostLinears))
    throw std::invalid_argument("ranks share " + std::to_string(kMostSlots) + " adapters at most");
  Published& to = published_[slot];
  for (size_t i = 0; i < parts.size(); ++i) {
    const LowRank& from = parts[i];
    Published::Part part{};
    if (from.rank > 0) {
      part = Published::Part{from.a - shared_bytes_,
                             from.b - shared_bytes_,
                             from.dtype,
                             from.rank,
                             static_cast<int>(from.runs.size()),
                             {}};
      if (part.num_runs > Published::kMostRuns || from.rank > kMostSharedRank || part.a < 0 || part.b < 0 ||
          part.a + a_bytes(from, linears_[i].shape) > kSharedBytes || part.b + b_bytes(from) > kSharedBytes)
        throw std::invalid_argument("an adapter that ranks cannot share: of rank " + std::to_string(from.rank));
      std::copy(from.runs.begin(), from.runs.end(), part.runs);
    }
    to.parts[i] = part;
  }
  ++to.version;
}

// What rank 0 last loaded there.
void Adapters::find(int slot) {
  if (slot >= kMostSlots || published_[slot].version == 0) return;
  if (found_.size() <= static_cast<size_t>(slot)) found_.resize(static_cast<size_t>(slot) + 1);
  const Published& from = published_[slot];
  if (found_[static_cast<size_t>(slot)] == from.version) return;
  std::vector<LowRank> parts;
  for (size_t i = 0; i < linears_.size(); ++i) {
    const Published::Part& part = from.parts[i];
    parts.push_back(LowRank{part.dtype, part.rank, shared_bytes_ + part.a, shared_bytes_ + part.b,
                            std::vector<PanelRun>(part.runs, part.runs + part.num_runs)});
  }
  make_room(parts);
  if (slots_.size() <= static_cast<size_t>(slot)) slots_.resize(static_cast<size_t>(slot) + 1);
  slots_[static_cast<size_t>(slot)] = std::move(parts);
  found_[static_cast<size_t>(slot)] = from.version;
}

int Adapters::add_linear(const LinearShape& shape, bool few) {
  linears_.push_back(Linear{shape, few, {}});
  return static_cast<int>(linears_.size()) - 1;
}

void Adapters::check(const std::vector<LowRank>& parts) const {
  if (parts.size() != linears_.size())
    throw std::invalid_argument("an adapter with parts for " + std::to_string(parts.size()) + " linears of " +
                                std::to_string(linears_.size()));
  for (size_t i = 0; i < parts.size(); ++i)
    if (parts[i].rank != 0) check_part(parts[i], linears_[i].shape);
}

void Adapters::load(int slot, std::vector<LowRank> parts) {
  if (slot < 0) throw std::invalid_argument("an adapter for slot " + std::to_string(slot));
  if (team_ != nullptr) publish(slot, parts);
  make_room(parts);
  if (slots_.size() <= static_cast<size_t>(slot)) slots_.resize(static_cast<size_t>(slot) + 1);
  slots_[static_cast<size_t>(slot)] = std::move(parts);
  slot_of_token_.clear();
}

void Adapters::unload(int slot) {
  if (slot >= 0 && loaded(slot)) slots_[static_cast<size_t>(slot)].clear();
  slot_of_token_.clear();
}

void Adapters::make_room(const std::vector<LowRank>& parts) {
  constexpr int64_t kFloat = sizeof(float), kLine = 64 / kFloat;
  int64_t rank = 0;
  for (const LowRank& part : parts) rank = std::max<int64_t>(rank, part.rank);
  if (deltas_ == nullptr) {
    int64_t panels = 0;
    for (const Linear& linear : linears_) {
      panels = std::max<int64_t>(panels, num_panels(linear.shape));
      row_stride_ = std::max(row_stride_, operand_row_bytes(DType::f32, linear.shape.k) / kFloat);
    }
    delta_stride_ = panels * kPanel + kLine;  // rows a power of two apart would push each other out of a cache
    rows_ = std::make_unique<Pages>(num_threads_ * kAdapterRows * row_stride_ * kFloat);
    deltas_ = std::make_unique<Pages>(max_rows_ * delta_stride_ * kFloat);
  }
  if (sum_stride_ < rank) {
    sum_stride_ = round_up(rank, kLine);
    sums_ = std::make_unique<Pages>(max_rows_ * sum_stride_ * kFloat);
  }
}

void Adapters::plan(const StepRows& step) {
  slot_of_token_.clear();
  for (int row = 0; step.adapters != nullptr && row < step.num_rows; ++row) {
    const int slot = step.adapters[row];
    if (slot >= 0 && team_ != nullptr && !team_->leads()) find(slot);
    if (slot < -1 || (slot >= 0 && !loaded(slot)))
      throw std::invalid_argument("row " + std::to_string(row) + " of a step has adapter " + std::to_string(slot) +
                                  ", which is not loaded");
    slot_of_token_.insert(slot_of_token_.end(),
                          static_cast<size_t>(step.first_tokens[row + 1] - step.first_tokens[row]), slot);
  }
  group(slot_of_token_, all_);
  aim(false);
  plan_logits(step);
}

void Adapters::plan_logits(const StepRows& step) {
  std::vector<int32_t> slots;
  for (int i = 0; !slot_of_token_.empty() && i < step.num_logits; ++i)
    slots.push_back(slot_of_token_[static_cast<size_t>(step.logits_tokens[i])]);
  group(slots, few_);
  aim(true);
}

void Adapters::group(const std::vector<int32_t>& slots, Rows& rows) {
  rows.order.clear();
  rows.blocks.clear();
  rows.num_rows = static_cast<int>(slots.size());
  for (int row = 0; row < rows.num_rows; ++row)
    if (slots[static_cast<size_t>(row)] >= 0) rows.order.push_back(row);
  const auto slot_at = [&](size_t place) { return slots[static_cast<size_t>(rows.order[place])]; };
  std::stable_sort(rows.order.begin(), rows.order.end(),
                   [&](int a, int b) { return slots[static_cast<size_t>(a)] < slots[static_cast<size_t>(b)]; });
  for (size_t place = 0; place < rows.order.size(); ++place) {
    Block* last = rows.blocks.empty() ? nullptr : &rows.blocks.back();
    if (last != nullptr && last->slot == slot_at(place) && last->count < kAdapterRows)
      ++last->count;
    else
      rows.blocks.push_back(Block{slot_at(place), static_cast<int>(place), 1});
  }
}

void Adapters::aim(bool few) {
  for (size_t i = 0; i < linears_.size(); ++i) {
    Linear& linear = linears_[i];
    if (linear.few != few) continue;
    linear.deltas.clear();
    const Rows& rows = rows_of(linear);
    for (const Block& block : rows.blocks) {
      if (part(block.slot, static_cast<int>(i)).rank == 0) continue;
      if (linear.deltas.empty()) linear.deltas.resize(static_cast<size_t>(rows.num_rows));
      for (int place = block.first; place < block.first + block.count; ++place)
        linear.deltas[static_cast<size_t>(rows.order[static_cast<size_t>(place)])] =
            reinterpret_cast<const float*>(deltas_->begin()) + place * delta_stride_;
    }
  }
}

void Adapters::project(int linear, const PrepareSource& source, WorkCounter& counter, const Worker& worker) {
  const Linear& of = linears_[static_cast<size_t>(linear)];
  const Rows& rows = rows_of(of);
  float* own = reinterpret_cast<float*>(rows_->begin()) + worker.index * kAdapterRows * row_stride_;
  float* sums = reinterpret_cast<float*>(sums_->begin());
  const int num_blocks = static_cast<int>(rows.blocks.size());
  for (int i = counter.take(); i < num_blocks; i = counter.take()) {
    const Block& block = rows.blocks[static_cast<size_t>(i)];
    const LowRank& adapter = part(block.slot, linear);
    if (adapter.rank == 0) continue;
    for (int row = 0; row < block.count; ++row)
      kernels_.row(source, of.shape.k, rows.order[static_cast<size_t>(block.first + row)], own + row * row_stride_);
    kernels_.project(LowRankA{adapter.dtype, adapter.rank, of.shape.k, adapter.a}, own, row_stride_, block.count,
                     sums + block.first * sum_stride_, sum_stride_);
  }
}

void Adapters::expand(int linear, int first, int count, WorkCounter& counter, const Worker& worker) {
  constexpr int kLeastTiles = 8, kSharesOfAThread = 16;
  const Linear& of = linears_[static_cast<size_t>(linear)];
  const Rows& rows = rows_of(of);
  const int num_blocks = static_cast<int>(rows.blocks.size()), half = num_panels(of.shape) / 2;
  const int wanted = (kSharesOfAThread * worker.count + num_blocks - 1) / num_blocks;
  const int shares = std::max(1, std::min(wanted, count / kLeastTiles));  // of a block
  for (int i = counter.take(); i < num_blocks * shares; i = counter.take()) {
    const Block& block = rows.blocks[static_cast<size_t>(i / shares)];
    const LowRank& adapter = part(block.slot, linear);
    if (adapter.rank == 0) continue;
    const int share = i % shares, tile = first + count * share / shares, end = first + count * (share + 1) / shares;
    if (of.shape.gated) {
      expand_panels(adapter, of, block, tile, end);
      expand_panels(adapter, of, block, half + tile, half + end);
    } else {
      expand_panels(adapter, of, block, 2 * tile, 2 * end);
    }
  }
}

// Panels [first, end), run by run; of a gated pair they are of one half.
void Adapters::expand_panels(const LowRank& part, const Linear& linear, const Block& block, int first, int end) {
  const LinearShape& shape = linear.shape;
  const float* sums = reinterpret_cast<const float*>(sums_->begin()) + block.first * sum_stride_;
  float* to = reinterpret_cast<float*>(deltas_->begin()) + block.first * delta_stride_;
  const uint8_t* b = part.b;
  int begins = 0;
  for (const PanelRun& run : part.runs) {
    const int64_t panel_bytes = int64_t{run.num_ranks} * kPanel * value_bytes(part.dtype);
    const int panel = std::max(begins, first), count = std::min(begins + run.num_panels, end) - panel;
    if (count > 0) {
      const LowRankB panels{part.dtype,
                            count,
                            run.num_ranks,
                            b + (panel - begins) * panel_bytes,
                            to + panel_place(shape, panel),
                            shape.gated ? kTile : kPanel};
      kernels_.expand(panels, sums + run.first_rank, sum_stride_, block.count, delta_stride_);
    }
    b += run.num_panels * panel_bytes;
    begins += run.num_panels;
  }
}

const LowRankKernels& low_rank_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx:
    case Isa::avx512:
      return kLowRankAvx512;
    case Isa::avx2:
      return kLowRankAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return kLowRankNeon;
#endif
    default:
      return kLowRankPlain;
  }
}

}  // namespace maitred
