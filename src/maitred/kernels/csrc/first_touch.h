// First touch of a KV pool's memory, ahead of need. The system gives a page when it is first written, and zeroing a
// huge page takes as long as many an operation, in a virtual machine longer than some steps; a step that begins the
// next huge page of every layer at once would wait for all of them, one after the other.
//
// Memory comes in groups of neighbouring blocks, as many as fill the pool's grain in one layer; a group has a unit in
// each layer. All threads share out the units of groups that a step is the first to use. Blocks that nobody had are
// handed out in order, so each thread also touches one unit a step of the group that comes next.
#pragma once

#include <cstdint>
#include <vector>

#include "kv_pool.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

class FirstTouch {
 public:
  // num_threads: of all ranks, which share the pool's memory.
  FirstTouch(const KVPool& pool, int num_threads);

  // Before a step, by one thread (of each rank: all plan the same).
  void plan(const StepRows& step);
  // By all threads, with one fresh counter; nobody has to wait for it, for who comes first is given the page.
  void touch(WorkCounter& counter) const;

  int num_planned() const { return static_cast<int>(units_.size()); }  // units, by the last plan

 private:
  struct Unit {
    int group, layer;
  };
  void use(int group);

  const KVPool& pool_;
  const int num_threads_, group_blocks_;
  std::vector<uint8_t> used_;      // by group: whether a step had a block of it
  int next_ = 0, next_layer_ = 0;  // group that is touched ahead, and the first layer of it that is not yet
  std::vector<Unit> units_;
};

}  // namespace maitred
