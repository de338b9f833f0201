// Peaks of the plain path: what the compiler makes of loops over short arrays. It has no narrow products, so every
// format's peak is that of the arithmetic it is carried out in.
#include "bits.h"
#include "roofline.h"

namespace maitred {
namespace {

uint64_t read(const uint8_t* from, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t at = 0; at < bytes; at += 64) {
    uint64_t line[8];
    std::memcpy(line, from + at, 64);
    for (int i = 0; i < 8; ++i) sums[i] ^= line[i];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
}

template <class T>
int64_t multiply_add(int64_t rounds, T factor, T term, uint64_t* sink) {
  constexpr int kLanes = 32;
  T x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<T>(i);
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kLanes; ++i) x[i] = x[i] * factor + term;
  for (int i = 0; i < kLanes; ++i) *sink += static_cast<uint64_t>(static_cast<int64_t>(x[i]));
  return rounds * kLanes * 2;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  if (dtype == DType::f32 || dtype == DType::bf16) return multiply_add<float>(rounds, 0.5f, 1.0f, sink);
  return multiply_add<uint32_t>(rounds, 5u, 3u, sink);
}

}  // namespace

const RooflineKernels kRooflinePlain{&read, &work};

}  // namespace maitred
