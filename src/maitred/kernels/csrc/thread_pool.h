// Threads that carry out one step together: each runs the whole list of operations and meets the others at barriers.
//
// Waiting spins for a while and then sleeps, so a step's hundreds of barriers cost about a microsecond each and an idle
// engine costs nothing. Work inside an operation is handed out by a WorkCounter, so that a thread that loses its core
// to another process holds up nobody for longer than one share; which thread computes a share never changes its result.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace maitred {

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait();

 private:
  const int count_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> generation_{0};
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
  explicit ThreadPool(int num_threads);  // throws std::invalid_argument below 1; the caller of run() is one of them
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Binds each thread, the caller among them, to one of these processors, thread i to cpus[i]; false where the system
  // cannot or a processor is not this process's. For a process that does nothing else, since what the caller starts
  // from then on is bound as it is.
  bool bind(const std::vector<int>& cpus);

  // Calls body once on every thread and returns when all have; one caller at a time. body must not throw.
  void run(const std::function<void(const Worker&)>& body);

 private:
  void work(int index);

  const int num_threads_;
  Barrier barrier_;
  std::vector<std::thread> threads_;
  const std::function<void(const Worker&)>* body_ = nullptr;
  alignas(64) std::atomic<int> round_{0};
  alignas(64) std::atomic<int> running_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
};

}  // namespace maitred
