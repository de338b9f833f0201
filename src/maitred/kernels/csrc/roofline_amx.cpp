// Peaks of AMX: four independent sums in tile registers. f32 and streaming are AVX-512's.
#include <immintrin.h>

#include "roofline.h"
#include "tiles_amx.h"

namespace maitred {
namespace {

constexpr int kSums = 4, kRows = 16, kChannels = 16;

uint64_t read(const uint8_t* from, int64_t bytes) { return kRooflineAvx512.read(from, bytes); }

void fill_tiles(uint8_t value) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = kRows;
  }
  configure_tiles(config);
  alignas(64) uint8_t bytes[64];
  for (uint8_t& byte : bytes) byte = value;
  _tile_loadd(4, bytes, 0);
  _tile_loadd(5, bytes, 0);
  _tile_loadd(6, bytes, 0);
  _tile_loadd(7, bytes, 0);
}

uint64_t fold_tiles() {
  alignas(64) uint64_t sums[kRows * 8];
  uint64_t folded = 0;
  const auto fold = [&] {
    for (uint64_t value : sums) folded ^= value;
  };
  _tile_stored(0, sums, 64);
  fold();
  _tile_stored(1, sums, 64);
  fold();
  _tile_stored(2, sums, 64);
  fold();
  _tile_stored(3, sums, 64);
  fold();
  release_tiles();
  return folded;
}

struct Int8 {
  static constexpr int kPerRow = 64;  // values of a tile's row
  static void multiply() {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
};

struct Bf16 {
  static constexpr int kPerRow = 32;
  static void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

template <class Product>
int64_t work_tiles(int64_t rounds, uint64_t* sink) {
  fill_tiles(1);
  for (int64_t round = 0; round < rounds; ++round) Product::multiply();
  *sink += fold_tiles();
  return rounds * kSums * kRows * kChannels * Product::kPerRow * 2;
}

int64_t work(DType dtype, int64_t rounds, uint64_t* sink) {
  if (dtype == DType::f32) return kRooflineAvx512.work(dtype, rounds, sink);
  return dtype == DType::bf16 ? work_tiles<Bf16>(rounds, sink) : work_tiles<Int8>(rounds, sink);
}

}  // namespace

const RooflineKernels kRooflineAmx{&read, &work};

}  // namespace maitred
