#include "gate.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace maitred {

#if defined(__linux__)
static_assert(sizeof(std::atomic<int>) == sizeof(int) && std::atomic<int>::is_always_lock_free);

void sleep_while(std::atomic<int>& word, int seen) { syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0); }

void wake_all(std::atomic<int>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
namespace {

std::mutex mutex;  // one for all words, which rarely sleep
std::condition_variable wake;

}  // namespace

void sleep_while(std::atomic<int>& word, int seen) {
  std::unique_lock<std::mutex> lock(mutex);
  wake.wait(lock, [&] { return word.load() != seen; });
}

void wake_all(std::atomic<int>&) {
  {
    std::lock_guard<std::mutex> lock(mutex);
  }  // who holds it is about to sleep
  wake.notify_all();
}
#endif

void Gate::open() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_relaxed) == 0) return;
  num_opened_.fetch_add(1);
  wake_all(num_opened_);
}

void Barrier::wait() {
  const int generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    gate_.open();
    return;
  }
  gate_.wait([&] { return generation_.load(std::memory_order_acquire) != generation || abandoned(); });
}

void Barrier::abandon() {
  abandoned_.store(true, std::memory_order_release);
  gate_.open();
}

}  // namespace maitred
