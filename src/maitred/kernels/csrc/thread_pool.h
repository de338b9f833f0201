// Threads that carry out one step together: each runs the whole list of operations and meets the others at barriers.
//
// Who waits spins for some microseconds, longer than most meetings take, and then sleeps, so that a step's hundreds of
// barriers cost about a microsecond each and neither an idle engine nor a thread whose partner lost its core costs
// anything. Work inside an operation is handed out by a WorkCounter, so that a thread that loses its core to another
// process holds up nobody for longer than one share; which thread computes a share, and how many there are, never
// changes its result.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace maitred {

// Where threads wait until `done()`, which other threads make true. It may lie in memory that processes share.
class Gate {
 public:
  template <class Done>
  void wait(const Done& done);
  void open();  // after the store that made it true

 private:
  alignas(64) std::atomic<int> num_sleeping_{0};
  std::atomic<int> num_opened_{0};  // while somebody slept: what sleepers watch
};

class Barrier {
 public:
  void expect(int count) { count_ = count; }  // while nobody waits
  void wait();
  // From any thread: nobody waits here any more, now or later.
  void abandon();
  bool abandoned() const { return abandoned_.load(std::memory_order_acquire); }

 private:
  int count_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
  std::atomic<bool> abandoned_{false};
  Gate gate_;
};

// Hands out the shares 0, 1, 2 ... of one operation. Reset while nobody takes.
struct alignas(64) WorkCounter {
  std::atomic<int> next{0};
  int take() { return next.fetch_add(1, std::memory_order_relaxed); }
};

// A thread's place in the pool, handed to every kernel.
struct Worker {
  int index;
  int count;
  Barrier* barrier;
  void meet() const {
    if (count > 1) barrier->wait();
  }
};

class ThreadPool {
 public:
  // Throws std::invalid_argument for less than 1 or more than 32,767; the caller of run() is one of them.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // From the next run on only the first `num_threads` take part; the others sleep. Between runs, by their caller.
  // Throws std::invalid_argument for less than 1 or more than there are.
  void use(int num_threads);
  int num_used() const { return num_used_; }

  // Binds each thread, the caller among them, to one of these processors, thread i to cpus[i]; false where the system
  // cannot or a processor is not this process's. Fewer threads than that, by use(), may run on any of them. For a
  // process that does nothing else, since what the caller starts from then on is bound as it is.
  bool bind(const std::vector<int>& cpus);

  // Calls body once on every thread in use and returns when all have; one caller at a time. body must not throw.
  void run(const std::function<void(const Worker&)>& body);

 private:
  void work(int index);

  const int num_threads_;
  int num_used_;
  Barrier barrier_;
  std::vector<int> cpus_;  // to which the threads are bound
  std::vector<std::thread> threads_;
  std::unique_ptr<Gate[]> begins_;  // one a thread, so that those that are not used sleep on
  Gate ends_;
  const std::function<void(const Worker&)>* body_ = nullptr;
  // The number of the run, and in the lowest bits how many threads take part: read at once, so that one which slept
  // through a run cannot take the number of one and the threads of another. -1: no more runs.
  alignas(64) std::atomic<int64_t> round_{0};
  alignas(64) std::atomic<int> running_{0};
};

}  // namespace maitred
