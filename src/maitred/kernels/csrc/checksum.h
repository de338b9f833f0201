// A 64-bit checksum of memory as fast as it can be read: tells whether bytes that were written are the bytes that came
// back. Not a defence against somebody who wants two files to have the same one.
#pragma once

#include <cstdint>

#include "thread_pool.h"

namespace maitred {

// Of pieces of 1 MiB on all threads, put together in order, so that the number of threads does not matter. Any change
// within one word of 8 bytes changes the result.
uint64_t checksum(ThreadPool& pool, const uint8_t* data, int64_t size);

}  // namespace maitred
