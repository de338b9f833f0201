// Adapters of a program's linears: which are loaded, which rows of a step are whose, and the work shared out.
//
// What an adapter adds is in no operation of its own: A x of a linear is computed where the linear's rows are made
// ready, B of that where the linear begins, and the linear's ending adds it (LinearOut::deltas). A row without an
// adapter has none, and a step without such rows does nothing more than before.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "isa.h"
#include "kv_pool.h"
#include "linear.h"
#include "low_rank.h"
#include "team.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

// Panels of B that lie together, and the ranks that reach them: a matrix stacked of several has only its own.
struct PanelRun {
  int num_panels;
  int first_rank, num_ranks;
};

// What an adapter adds to one linear; rank 0: nothing.
struct LowRank {
  DType dtype;  // f32 or bf16
  int rank;
  const uint8_t* a;
  const uint8_t* b;
  std::vector<PanelRun> runs;  // over all panels: of the stacked matrix, each half of a gated pair for itself
};

int num_panels(const LinearShape& shape);
int64_t a_bytes(const LowRank& adapter, const LinearShape& shape);
int64_t b_bytes(const LowRank& adapter);

// The adapters of a program and their rows in a step. Loaded, unloaded and planned for by one thread, between steps.
//
// Ranks that run a program together (team.h) have all of every adapter in memory that they share, and read what is
// added to their own tiles. Rank 0 loads, and leaves there what the others find when a step names the slot.
class Adapters {
 public:
  // num_threads: of all ranks.
  Adapters(int max_rows, int num_threads, Isa isa, Team* team);

  // Memory for adapters where there are ranks, of which those parts are memory that are used; null for one process.
  uint8_t* shared_bytes() const { return shared_bytes_; }
  static constexpr int64_t kSharedBytes = int64_t{1} << 36;
  void release_shared(int64_t offset, int64_t num_bytes);  // whole pages of it

  // A linear that adapters may add to, by the number that its operations ask with. few: as in program_ops.h.
  int add_linear(const LinearShape& shape, bool few);

  const LinearShape& shape(int linear) const { return linears_[static_cast<size_t>(linear)].shape; }

  // Throws std::invalid_argument for parts (one for each linear) whose ranks or panels are not those of the linears.
  void check(const std::vector<LowRank>& parts) const;
  // Parts that were checked. What they point to is the caller's as long as it is loaded. Logits of the step before have
  // no adapter then.
  void load(int slot, std::vector<LowRank> parts);
  void unload(int slot);

  // Before a step, and before more logits of it. Throws std::invalid_argument for a slot that holds nothing.
  void plan(const StepRows& step);
  void plan_logits(const StepRows& step);

  // Whether any row of the step has something added in this linear. Only then come the two below.
  bool active(int linear) const { return !linears_[static_cast<size_t>(linear)].deltas.empty(); }
  // A x of all rows that have an adapter; all workers with one fresh counter.
  void project(int linear, const PrepareSource& source, WorkCounter& counter, const Worker& worker);
  // B of that for tiles [first, first + count) of the linear, once all have projected; by those who have its weights.
  void expand(int linear, int first, int count, WorkCounter& counter, const Worker& worker);
  // What LinearOut takes, once all have expanded.
  const float* const* deltas(int linear) const { return linears_[static_cast<size_t>(linear)].deltas.data(); }

 private:
  struct Linear {
    LinearShape shape;
    bool few;
    std::vector<const float*> deltas;  // by row of the linear, null for rows without; empty where no row has one
  };
  struct Block {  // rows of one adapter, [first, first + count) of Rows::order
    int slot, first, count;
  };
  struct Rows {
    std::vector<int32_t> order;  // rows of the linear that have an adapter, adapter after adapter
    std::vector<Block> blocks;
    int num_rows = 0;  // of the linear
  };

  const LowRank& part(int slot, int linear) const {
    return slots_[static_cast<size_t>(slot)][static_cast<size_t>(linear)];
  }
  const Rows& rows_of(const Linear& linear) const { return linear.few ? few_ : all_; }
  bool loaded(int slot) const {
    return slot < static_cast<int>(slots_.size()) && !slots_[static_cast<size_t>(slot)].empty();
  }
  void make_room(const std::vector<LowRank>& parts);
  void publish(int slot, const std::vector<LowRank>& parts);
  void find(int slot);
  void group(const std::vector<int32_t>& slots, Rows& rows);
  void aim(bool few);
  void expand_panels(const LowRank& part, const Linear& linear, const Block& block, int first, int end);

  const int max_rows_, num_threads_;
  const LowRankKernels& kernels_;
  Team* const team_;
  struct Published;  // of a slot
  uint8_t* shared_bytes_ = nullptr;
  Published* published_ = nullptr;  // [kMostSlots]
  std::vector<int64_t> found_;      // by slot, the version that is here
  std::vector<Linear> linears_;
  std::vector<std::vector<LowRank>> slots_;  // empty: none is loaded
  std::vector<int32_t> slot_of_token_;       // of the last step; empty: no row has one
  Rows all_, few_;
  int64_t row_stride_ = 0, sum_stride_ = 0, delta_stride_ = 0;  // floats
  std::unique_ptr<Pages> rows_, sums_, deltas_;  // of each thread; by place in order; made when an adapter is loaded
};

}  // namespace maitred
