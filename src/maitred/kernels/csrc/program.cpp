#include "program.h"

#include <time.h>

#include <algorithm>
#include <stdexcept>

namespace maitred {
namespace {

// One thread alone is timed by the processor time it had, so that its neighbours do not count; several by the clock,
// since their waiting for each other is part of the matter.
int64_t now_ns(bool alone) {
  timespec now;
  clock_gettime(alone ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void check_below(const char* what, int got, int limit) {
  if (got >= 0 && got < limit) return;
  throw std::invalid_argument("a step has " + std::string(what) + " " + std::to_string(got) +
                              "; the program takes 0 to " + std::to_string(limit - 1));
}

}  // namespace

Program::Program(ThreadPool& threads, KVPool& pool, const Limits& limits, Isa isa, Team* team)
    : threads_(threads), pool_(pool), limits_(limits), isa_(isa), team_(team) {
  reserve_of_team();
}

void Program::reserve_of_team() {
  if (team_ == nullptr) return;
  const int block_size = pool_.layout().block_size;  // and one more block for what is planned ahead
  const int64_t blocks_of_row = (limits_.max_positions + block_size - 1) / block_size + 1;
  team_->reserve(limits_.max_tokens, limits_.max_logits, num_groups_ * limits_.max_tokens * blocks_of_row);
}

void Program::place_layers(const std::vector<LayerPlace>& places) {
  places_ = places;
  for (const LayerPlace& place : places) {
    if (place.group < 0 || place.layer < 0 || place.layer >= pool_.num_model_layers())
      throw std::invalid_argument("layer " + std::to_string(place.layer) + " of a group, in a KV pool of " +
                                  std::to_string(pool_.num_model_layers()));
    num_groups_ = std::max(num_groups_, place.group + 1);
  }
  if (num_groups_ > 1) reserve_of_team();  // more than the constructor did
}

void* Program::add_bytes(int64_t num_bytes) {
  SharedMemory* const shared = team_ != nullptr ? &team_->memory() : nullptr;
  buffers_.push_back(std::make_unique<Pages>(num_bytes > 0 ? num_bytes : 1, shared));
  return buffers_.back()->begin();
}

void* Program::add_own_bytes(int64_t num_bytes) {
  buffers_.push_back(std::make_unique<Pages>(num_bytes > 0 ? num_bytes : 1));
  return buffers_.back()->begin();
}

float* Program::add_rows(int64_t num_rows, int64_t width) {
  return static_cast<float*>(add_bytes(num_rows * width * static_cast<int64_t>(sizeof(float))));
}

void Program::add(std::string name, int num_counters, Body body, Shares shares) {
  ops_.push_back(Op{std::move(name), std::move(body), num_counters_, shares});
  num_counters_ += num_counters;
}

int64_t Program::buffer_bytes() const {
  int64_t total = 0;
  for (const auto& buffer : buffers_) total += buffer->num_bytes();
  return total;
}

void Program::run(const StepRows& rows, bool goes_on) {
  check(rows);
  check_logits(rows, rows.num_tokens);
  last_num_tokens_ = rows.num_tokens;
  begin(rows, false);
  if (num_kv_writes_ > 0) pool_.begin_run();
  run_all(rows, goes_on);
  if (team_ != nullptr) team_->check();
}

void Program::run_logits(const StepRows& rows) {
  check_logits(rows, last_num_tokens_);
  for (const Planner& plan : logits_planners_) plan(rows);
  begin(rows, true);
  run_ops(rows, first_logits_op_, end_of(rows));
  if (team_ != nullptr) team_->check();
}

void Program::serve() {
  make_counters();
  StepRows rows;
  for (bool only_logits; team_->wait(rows, only_logits);) {
    if (!only_logits) {
      run_all(rows);
      continue;
    }
    for (const Planner& plan : logits_planners_) plan(rows);
    run_ops(rows, first_logits_op_, ops_.size());
  }
}

void Program::run_all(const StepRows& rows, bool goes_on) {
  for (const Planner& plan : planners_) plan(rows);
  run_ops(rows, goes_on ? first_state_op_ : 0, end_of(rows));
}

// The other ranks are not told that a step pools: they all make logits.
size_t Program::end_of(const StepRows& rows) const {
  if (rows.num_logits == 0) return first_logits_op_;
  return rows.pools && team_ == nullptr && first_output_op_ > 0 ? first_output_op_ : ops_.size();
}

void Program::make_counters() {
  if (num_counters_made_ == num_counters_) return;
  own_counters_ = std::make_unique<WorkCounter[]>(static_cast<size_t>(num_counters_));
  counters_ = team_ == nullptr ? own_counters_.get()
                               : static_cast<WorkCounter*>(add_bytes(num_counters_ * int64_t{sizeof(WorkCounter)}));
  num_counters_made_ = num_counters_;
}

void Program::begin(const StepRows& rows, bool only_logits) {
  make_counters();
  if (team_ == nullptr) return;
  // The others left the last step by its last meeting, and enter this one by its beginning.
  for (int i = 0; i < num_counters_; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
  team_->begin(rows, only_logits);
}

void Program::run_ops(const StepRows& rows, size_t first, size_t end) {
  for (int i = 0; i < num_counters_; ++i) own_counters_[i].next.store(0, std::memory_order_relaxed);
  threads_.run([&](const Worker& own) {
    const Worker worker = team_ != nullptr ? team_->worker(own) : own;
    const bool alone = worker.count == 1;
    const bool timed = profiling_ && own.index == 0;
    int64_t before = timed ? now_ns(alone) : 0;
    for (size_t i = first; i < end; ++i) {
      Op& op = ops_[i];
      WorkCounter* const counters = op.shares == Shares::own ? own_counters_.get() : counters_;
      if (op.body(rows, counters + op.first_counter, worker)) worker.meet();
      if (worker.barrier->abandoned()) return;  // not all have written then
      if (op.writes_kv && own.index == 0) pool_.wrote_layer();
      if (!timed) continue;
      const int64_t after = now_ns(alone);
      op.nanoseconds = after - before;
      before = after;
    }
    // An operation that ends without a meeting may be the last.
    worker.meet();
  });
}

void Program::check(const StepRows& rows) const {
  if (rows.num_tokens < 1 || rows.num_rows < 1) throw std::invalid_argument("a step without tokens");
  check_below("number of tokens", rows.num_tokens, limits_.max_tokens + 1);
  if (rows.first_blocks[0] != 0 || rows.first_tokens[0] != 0 || rows.first_tokens[rows.num_rows] != rows.num_tokens)
    throw std::invalid_argument("the rows of a step do not cover its tokens");
  for (int row = 0; row < rows.num_rows; ++row) check_row(rows, row);
  for (int t = 0; t < rows.num_tokens; ++t) {
    check_below("token id", rows.token_ids[t], limits_.vocab_size);
    check_below("position", rows.positions[t], limits_.max_positions);
  }
  if (rows.num_groups != num_groups_)
    throw std::invalid_argument("a step has block tables of " + std::to_string(rows.num_groups) +
                                " groups of layers, the program " + std::to_string(num_groups_));
  for (const Planner& check : checks_) check(rows);
  for (int64_t b = 0; b < rows.num_table_blocks(); ++b) check_below("block", rows.block_tables[b], pool_.num_blocks());
}

void Program::check_row(const StepRows& rows, int row) const {
  const int first = rows.first_tokens[row], end = rows.first_tokens[row + 1];
  const std::string name = "row " + std::to_string(row) + " of a step ";
  if (first < 0 || end <= first || end > rows.num_tokens) throw std::invalid_argument(name + "has no tokens");
  for (int t = first + 1; t < end; ++t)
    if (rows.positions[t] != rows.positions[t - 1] + 1)
      throw std::invalid_argument(name + "has positions that do not follow each other");
  const int num_blocks = rows.first_blocks[row + 1] - rows.first_blocks[row];
  const int block_size = pool_.layout().block_size;
  if (num_blocks < 1 || rows.positions[end - 1] / block_size >= num_blocks)
    throw std::invalid_argument(name + "reaches position " + std::to_string(rows.positions[end - 1]) + " with " +
                                std::to_string(num_blocks) + " blocks of " + std::to_string(block_size) + " tokens");
}

void Program::check_logits(const StepRows& rows, int num_tokens) const {
  check_below("number of logits rows", rows.num_logits, limits_.max_logits + 1);
  for (int i = 0; i < rows.num_logits; ++i) check_below("token with logits", rows.logits_tokens[i], num_tokens);
}

}  // namespace maitred
