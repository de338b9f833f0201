// How threads wait for each other, in one process or in several: they spin, and then sleep on a word of memory.
#pragma once

#include <chrono>

#include "thread_pool.h"

namespace maitred {

// Longer than nearly all meetings take, and than the way from one step's call to the next: with 50, sleeping and waking
// between steps of 5 ms cost 4% of them. A fraction of the time slice for which a thread waits whose processor others
// have.
constexpr std::chrono::microseconds kSpin{500};
constexpr int kSpinsBetweenLooks = 32;  // at the clock

// Sleeps as long as the word is `seen` and nobody wakes; may wake for nothing.
void sleep_while(std::atomic<int>& word, int seen);
void wake_all(std::atomic<int>& word);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Done>
void Gate::wait(const Done& done) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point end{};
  for (int spins = 1; !done(); ++spins) {
    pause();
    if (spins % kSpinsBetweenLooks != 0) continue;
    const Clock::time_point now = Clock::now();
    if (end == Clock::time_point{}) end = now + kSpin;
    if (now < end) continue;
    num_sleeping_.fetch_add(1);
    for (;;) {
      const int seen = num_opened_.load();
      // Either open() sees who sleeps, or who goes to sleep sees that it is done.
      std::atomic_thread_fence(std::memory_order_seq_cst);
      if (done()) break;
      sleep_while(num_opened_, seen);
    }
    num_sleeping_.fetch_sub(1);
    return;
  }
}

}  // namespace maitred
