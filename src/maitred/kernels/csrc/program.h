// A compiled decoder: a flat list of operations over static buffers, which all threads run together, step by step.
//
// Python says which operations (model/program.py); here each is a function that every thread calls, with the threads
// meeting after those that say so. Buffers are made once, for the most tokens of a step, and never grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isa.h"
#include "kv_pool.h"
#include "team.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

// Floats of a row that fill an odd number of cache lines: a linear writes columns of many rows, and in a cache, rows a
// power of two apart would push each other out.
inline int64_t odd_lines(int64_t width) {
  constexpr int64_t kLine = 64 / sizeof(float);
  return ((width + kLine - 1) / kLine | 1) * kLine;
}

class Program {
 public:
  // Called by every thread of the pool; must not throw. True: nobody goes on before all have returned. False is for
  // work that each thread does for itself alone.
  using Body = std::function<bool(const StepRows& rows, WorkCounter* counters, const Worker& worker)>;

  // Whose threads take from an operation's counters: everybody's, or those of the rank whose weights it reads.
  enum class Shares : uint8_t { all, own };

  struct Op {
    std::string name;
    Body body;
    int first_counter;
    Shares shares;
    int64_t nanoseconds = 0;  // of the last run, on the first thread
    bool writes_kv = false;   // of the next layer; workers meet after it
  };

  // Where the keys and values of a layer are: in the pool's layer of that number, by the tables of a group.
  struct LayerPlace {
    int group, layer;
  };

  // What a step is checked against, since a wrong index would read memory that is not ours.
  struct Limits {
    int max_tokens;     // of a step
    int max_logits;     // rows of logits of a run
    int vocab_size;     // token ids are below it
    int max_positions;  // positions are below it
  };

  // team: the ranks that run it together, each with the same operations in the same order; null for one process.
  Program(ThreadPool& threads, KVPool& pool, const Limits& limits, Isa isa, Team* team);

  const Limits& limits() const { return limits_; }
  int num_threads() const { return team_ != nullptr ? team_->num_threads() : threads_.num_threads(); }  // of all ranks
  // Threads of this process that take part, of which the worker is one.
  int own_threads(const Worker& worker) const { return team_ != nullptr ? threads_.num_threads() : worker.count; }
  Team* team() const { return team_; }
  const KVPool& pool() const { return pool_; }
  // Of each layer; before the first operation. Without it all are in one group, in their order.
  void place_layers(const std::vector<LayerPlace>& places);
  LayerPlace place(int layer) const {
    return places_.empty() ? LayerPlace{0, layer} : places_.at(static_cast<size_t>(layer));
  }
  int num_groups() const { return num_groups_; }
  Isa isa() const { return isa_; }

  void* add_bytes(int64_t num_bytes);      // zeroed, 64-byte aligned, as long as the program lives; ranks share them
  void* add_own_bytes(int64_t num_bytes);  // the same, for this process alone
  float* add_rows(int64_t num_rows, int64_t width);
  void add(std::string name, int num_counters, Body body, Shares shares = Shares::all);
  // The operation added last writes a layer's keys and values; told are those of a program that writes all layers.
  void mark_kv_write(int layer) {
    if (layer == num_kv_writes_) ops_.back().writes_kv = true, ++num_kv_writes_;
  }
  // Called by one thread before the others join a step, with what may throw.
  using Planner = std::function<void(const StepRows& rows)>;
  void add_planner(Planner planner) { planners_.push_back(std::move(planner)); }
  // Called with a step before it is run; throws std::invalid_argument for one that cannot be.
  void add_check(Planner check) { checks_.push_back(std::move(check)); }
  // The same before more logits of the step; rows as run_logits has them.
  void add_logits_planner(Planner planner) { logits_planners_.push_back(std::move(planner)); }
  // Operations added from here on make logits; the rows before them stay, so they may run again for other tokens.
  void begin_logits() { first_logits_op_ = ops_.size(); }
  // Operations added from here on make logits of those rows; a step that pools leaves them out.
  void begin_output() { first_output_op_ = ops_.size(); }

  // Operations before this one are left out of steps that go on from what the last one left in the buffers.
  void begin_state() { first_state_op_ = ops_.size(); }

  // Throws std::invalid_argument for a step that the buffers, the model or the pool cannot take. Without logits_tokens
  // the operations that make logits are left out. goes_on: from the state, for a program of one process.
  void run(const StepRows& rows, bool goes_on = false);
  // Logits of other tokens of the last step; only logits_tokens and num_logits are read.
  void run_logits(const StepRows& rows);
  // Of the other ranks: runs what rank 0 runs, until that says to stop.
  void serve();

  void set_profiling(bool on) { profiling_ = on; }
  const std::vector<Op>& ops() const { return ops_; }
  int64_t buffer_bytes() const;

 private:
  void check(const StepRows& rows) const;
  void check_row(const StepRows& rows, int row) const;
  void check_logits(const StepRows& rows, int num_tokens) const;
  void make_counters();
  void reserve_of_team();
  void run_all(const StepRows& rows, bool goes_on = false);
  void begin(const StepRows& rows, bool only_logits);
  void run_ops(const StepRows& rows, size_t first, size_t end);
  size_t end_of(const StepRows& rows) const;

  ThreadPool& threads_;
  KVPool& pool_;
  const Limits limits_;
  const Isa isa_;
  Team* const team_;
  std::vector<Planner> planners_, logits_planners_, checks_;
  std::vector<Op> ops_;
  std::vector<LayerPlace> places_;
  int num_groups_ = 1;
  std::vector<std::unique_ptr<Pages>> buffers_;
  std::unique_ptr<WorkCounter[]> own_counters_;  // of all operations; made when the first step runs
  WorkCounter* counters_ = nullptr;              // the same, or those that ranks share
  int num_counters_ = 0;
  int num_counters_made_ = 0;
  size_t first_state_op_ = 0;
  size_t first_logits_op_ = 0;
  size_t first_output_op_ = 0;
  int last_num_tokens_ = 0;
  int num_kv_writes_ = 0;
  bool profiling_ = false;
};

}  // namespace maitred
