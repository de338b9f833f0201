// Ranks: processes that run one program together, each with the weights of its own output channels. They meet where the
// threads of one process would, and share memory: activations, keys and values, logits, work counters, the barrier and
// the step. Design note 0022.
//
// Each process maps the memory where it likes and takes the same things from it in the same order, so that they lie at
// the same places in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "thread_pool.h"
#include "types.h"

namespace maitred {

// A mapping of `fd`, in huge pages where the system has them for shared memory.
class SharedMemory {
 public:
  SharedMemory(int fd, int64_t num_bytes);  // throws std::runtime_error where it cannot be mapped
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The next bytes, 64-byte aligned, zeroed by whoever made the memory. Throws std::bad_alloc when there is no room.
  uint8_t* take(int64_t num_bytes);
  int64_t num_taken() const { return num_taken_; }

 private:
  void* mapped_;
  int64_t mapped_bytes_;
  uint8_t* begin_;
  int64_t num_bytes_;
  int64_t num_taken_ = 0;
};

// A rank's place among the others. Rank 0 says what is run; it is made first, on zeroed memory.
class Team {
 public:
  // fd: of memory that all ranks map; threads_of_each: how many a rank has. Throws std::invalid_argument for a rank
  // that cannot be, and as SharedMemory does.
  Team(int fd, int64_t num_bytes, int rank, int num_ranks, int threads_of_each);

  SharedMemory& memory() { return memory_; }
  bool leads() const { return rank_ == 0; }
  int num_threads() const { return num_threads_; }  // of all ranks
  // A thread of this rank as one of all.
  Worker worker(const Worker& own) const { return Worker{first_ + own.index, num_threads_, &shared_->barrier}; }

  // Room for steps of so many tokens with tables of so many blocks; by all ranks, once.
  void reserve(int max_tokens, int max_logits, int64_t max_blocks);

  // Of rank 0: the others run this too, or only its logits. Throws std::invalid_argument for more than was reserved,
  // std::runtime_error once a rank was lost.
  void begin(const StepRows& rows, bool only_logits);
  void check() const;  // throws std::runtime_error once a rank was lost
  void stop();         // the others' wait gives false
  // From any thread: a rank is lost, so nobody waits for it any more, and what runs throws.
  void lose(const std::string& why);
  bool lost() const { return shared_->barrier.abandoned(); }

  // Of the others: the next step that rank 0 began; false when told to stop.
  bool wait(StepRows& rows, bool& only_logits);

 private:
  struct Shared {
    Barrier barrier;
    Gate begins;
    alignas(64) std::atomic<int64_t> round;  // negative: no more
    int num_tokens, num_rows, num_logits, num_groups;
    int num_saves;
    bool only_logits, adapted, has_states;
  };
  struct Arrays {
    int32_t *token_ids, *positions, *first_tokens, *block_tables, *first_blocks, *logits_tokens, *adapters, *states,
        *saves;
  };

  const int rank_;
  const int first_;  // of this rank's threads
  const int num_threads_;
  SharedMemory memory_;
  Shared* shared_;
  Arrays arrays_{};
  int max_tokens_ = 0, max_logits_ = 0;
  int64_t max_blocks_ = 0;
  int64_t seen_ = 0;  // the round that this rank ran last
  std::atomic<bool> losing_{false};
  std::string why_;  // written before the barrier is abandoned
};

}  // namespace maitred
