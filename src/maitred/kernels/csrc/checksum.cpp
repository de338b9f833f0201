#include "checksum.h"

#include <cstring>
#include <vector>

namespace maitred {
namespace {

constexpr int64_t kPiece = 1 << 20;
constexpr int kLanes = 8;                         // chains of multiplications that run beside each other
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;  // odd, so that multiplying loses nothing

inline uint64_t join(uint64_t sum, uint64_t word) {
  sum = (sum ^ word) * kFactor;
  return sum ^ (sum >> 32);
}

uint64_t checksum_piece(const uint8_t* data, int64_t size) {
  uint64_t lanes[kLanes], words[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<uint64_t>(lane) + 1;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(sizeof words) <= size; i += sizeof words) {
    std::memcpy(words, data + i, sizeof words);
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = join(lanes[lane], words[lane]);
  }
  if (i < size) {
    std::memset(words, 0, sizeof words);
    std::memcpy(words, data + i, static_cast<size_t>(size - i));
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = join(lanes[lane], words[lane]);
  }
  uint64_t sum = static_cast<uint64_t>(size);
  for (uint64_t lane : lanes) sum = join(sum, lane);
  return sum;
}

}  // namespace

uint64_t checksum(ThreadPool& pool, const uint8_t* data, int64_t size) {
  const int64_t num_pieces = (size + kPiece - 1) / kPiece;
  std::vector<uint64_t> sums(static_cast<size_t>(num_pieces));
  WorkCounter counter;
  const auto body = [&](const Worker&) {
    for (int64_t piece = counter.take(); piece < num_pieces; piece = counter.take()) {
      const int64_t begin = piece * kPiece, count = size - begin < kPiece ? size - begin : kPiece;
      sums[static_cast<size_t>(piece)] = checksum_piece(data + begin, count);
    }
  };
  if (num_pieces < 2)
    body(Worker{0, 1, nullptr});
  else
    pool.run(body);
  uint64_t sum = static_cast<uint64_t>(size);
  for (uint64_t piece : sums) sum = join(sum, piece);
  return sum;
}

}  // namespace maitred
