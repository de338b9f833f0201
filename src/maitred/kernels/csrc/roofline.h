// What this machine can do at most: bytes streamed from memory, and arithmetic on registers alone. Kernels are measured
// against these figures of the same run.
#pragma once

#include <cstdint>

#include "isa.h"
#include "thread_pool.h"
#include "types.h"

namespace maitred {

struct RooflineKernels {
  uint64_t (*read)(const uint8_t* from, int64_t bytes);  // bytes a multiple of 4096; returns something of all of them
  // Independent multiply-adds in registers, `rounds` times; returns operations done (a multiply and an add are two).
  int64_t (*work)(DType dtype, int64_t rounds, uint64_t* sink);
};

const RooflineKernels& roofline_kernels(Isa isa);

// Bytes a second of all threads reading `bytes` once, each its own part; the best of `repeats`.
double stream_read(const RooflineKernels& kernels, ThreadPool& pool, const uint8_t* from, int64_t bytes, int repeats);

// Operations a second of all threads; the best of `repeats` runs of a few milliseconds. Block formats multiply as int8.
double peak(const RooflineKernels& kernels, ThreadPool& pool, DType dtype, int repeats);

extern const RooflineKernels kRooflinePlain;
#if defined(__x86_64__)
extern const RooflineKernels kRooflineAvx2;
extern const RooflineKernels kRooflineAvx512;
extern const RooflineKernels kRooflineAmx;
#elif defined(__aarch64__)
extern const RooflineKernels kRooflineNeon;
#endif

}  // namespace maitred
