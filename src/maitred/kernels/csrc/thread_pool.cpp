#include "thread_pool.h"

#include <sched.h>

#include <stdexcept>
#include <string>

#include "gate.h"

namespace maitred {
namespace {

constexpr int kUsedBits = 15;
constexpr int64_t kStop = -1;

bool run_on(const int* cpus, std::size_t count) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (std::size_t i = 0; i < count; ++i) {
    if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return false;
    CPU_SET(cpus[i], &set);
  }
  return sched_setaffinity(0, sizeof set, &set) == 0;
#else
  (void)cpus, (void)count;
  return false;
#endif
}

void check_count(int num_threads, int most) {
  if (num_threads < 1 || num_threads > most)
    throw std::invalid_argument("a thread pool of " + std::to_string(num_threads) + " threads; it takes 1 to " +
                                std::to_string(most));
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), num_used_(num_threads) {
  check_count(num_threads, (1 << kUsedBits) - 1);
  begins_ = std::make_unique<Gate[]>(static_cast<std::size_t>(num_threads));
  for (int index = 1; index < num_threads; ++index) threads_.emplace_back([this, index] { work(index); });
}

ThreadPool::~ThreadPool() {
  round_.store(kStop);
  for (int index = 1; index < num_threads_; ++index) begins_[index].open();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::use(int num_threads) {
  check_count(num_threads, num_threads_);
  if (num_threads == num_used_) return;
  num_used_ = num_threads_;  // all of them change places
  const bool all = num_threads == num_threads_;
  if (!cpus_.empty())
    run([&](const Worker& worker) {
      if (all)
        run_on(&cpus_[static_cast<std::size_t>(worker.index)], 1);
      else
        run_on(cpus_.data(), cpus_.size());
    });
  num_used_ = num_threads;
}

bool ThreadPool::bind(const std::vector<int>& cpus) {
  if (static_cast<int>(cpus.size()) < num_threads_) return false;
  std::atomic<bool> bound{true};
  run([&](const Worker& worker) {
    if (!run_on(&cpus[static_cast<std::size_t>(worker.index)], 1)) bound.store(false);
  });
  if (bound.load()) cpus_.assign(cpus.begin(), cpus.begin() + num_threads_);
  return bound.load();
}

void ThreadPool::run(const std::function<void(const Worker&)>& body) {
  const int count = num_used_;
  if (count > 1) {
    body_ = &body;
    barrier_.expect(count);
    running_.store(count - 1, std::memory_order_relaxed);
    const int64_t number = (round_.load(std::memory_order_relaxed) >> kUsedBits) + 1;
    round_.store(number << kUsedBits | count, std::memory_order_release);
    for (int index = 1; index < count; ++index) begins_[index].open();
  }
  body(Worker{0, count, &barrier_});
  if (count > 1) ends_.wait([&] { return running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::work(int index) {
  for (int64_t seen = 0;;) {
    begins_[index].wait([&] { return round_.load(std::memory_order_acquire) != seen; });
    seen = round_.load(std::memory_order_acquire);
    if (seen == kStop) return;
    const int count = static_cast<int>(seen & ((1 << kUsedBits) - 1));
    if (index >= count) continue;
    (*body_)(Worker{index, count, &barrier_});
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) ends_.open();
  }
}

}  // namespace maitred
