#include "thread_pool.h"

#include <sched.h>

#include <stdexcept>
#include <string>

namespace maitred {
namespace {

constexpr int kSpinsBeforeYield = 4096;    // tens of microseconds: longer than the wait at most barriers
constexpr int kSpinsBeforeSleep = 200000;  // about a millisecond: longer than the gap between two steps

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool bind_to(int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  return sched_setaffinity(0, sizeof only, &only) == 0;
#else
  (void)cpu;
  return false;
#endif
}

}  // namespace

void Barrier::wait() {
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
    if (spins < kSpinsBeforeYield)
      pause();
    else
      sched_yield();  // the other thread may be waiting for this core
  }
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), barrier_(num_threads) {
  if (num_threads < 1)
    throw std::invalid_argument("a thread pool of " + std::to_string(num_threads) + " threads; it needs at least 1");
  for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { work(index); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

bool ThreadPool::bind(const std::vector<int>& cpus) {
  if (static_cast<int>(cpus.size()) < num_threads_) return false;
  std::atomic<bool> bound{true};
  run([&](const Worker& worker) {
    if (!bind_to(cpus[static_cast<std::size_t>(worker.index)])) bound.store(false);
  });
  return bound.load();
}

void ThreadPool::run(const std::function<void(const Worker&)>& body) {
  if (num_threads_ > 1) {
    body_ = &body;
    running_.store(num_threads_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  body(Worker{0, num_threads_, &barrier_});
  for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < kSpinsBeforeYield)
      pause();
    else
      sched_yield();
  }
}

void ThreadPool::work(int index) {
  int seen = 0;
  for (;;) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen && spins < kSpinsBeforeSleep; ++spins) pause();
    if (round_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    (*body_)(Worker{index, num_threads_, &barrier_});
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace maitred
