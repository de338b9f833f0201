#include "roofline.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace maitred {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Read by nobody, so that the work that led to it is not optimised away.
volatile uint64_t sink;

}  // namespace

const RooflineKernels& roofline_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::amx:
      return kRooflineAmx;
    case Isa::avx512:
      return kRooflineAvx512;
    case Isa::avx2:
      return kRooflineAvx2;
#elif defined(__aarch64__)
    case Isa::neon:
      return kRooflineNeon;
#endif
    default:
      return kRooflinePlain;
  }
}

double stream_read(const RooflineKernels& kernels, ThreadPool& pool, const uint8_t* from, int64_t bytes, int repeats) {
  const int64_t part = bytes / pool.num_threads() / 4096 * 4096;
  double best = 0.0;
  for (int i = 0; i < repeats; ++i) {
    const Clock::time_point start = Clock::now();
    pool.run([&](const Worker& worker) { sink = kernels.read(from + worker.index * part, part); });
    best = std::max(best, static_cast<double>(part * pool.num_threads()) / seconds_since(start));
  }
  return best;
}

double peak(const RooflineKernels& kernels, ThreadPool& pool, DType dtype, int repeats) {
  int64_t rounds = 1000;
  double best = 0.0;
  for (int i = 0; i < repeats; ++i) {
    std::vector<int64_t> done(pool.num_threads());
    const Clock::time_point start = Clock::now();
    pool.run([&](const Worker& worker) {
      uint64_t left = 0;
      done[worker.index] = kernels.work(dtype, rounds, &left);
      sink = left;
    });
    const double seconds = seconds_since(start);
    int64_t total = 0;
    for (int64_t one : done) total += one;
    best = std::max(best, static_cast<double>(total) / seconds);
    if (seconds < 3e-3) rounds *= 2, --i;  // long enough to be measured
  }
  return best;
}

}  // namespace maitred
