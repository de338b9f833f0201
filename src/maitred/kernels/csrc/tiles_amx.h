// AMX's tile registers: eight of up to 16 rows x 64 bytes. For *_amx.cpp alone.
//
// A thread configures them before it multiplies and releases them when its share is done: configured tiles are state
// that the system saves and that keeps a core from sleeping deeply.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace maitred {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};  // of each tile; only the first eight exist
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the processor reads 64 bytes");

inline void configure_tiles(const TileConfig& config) {
  // GCC's intrinsic claims to read 8 bytes only, so stores to the others would be dropped.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

}  // namespace
}  // namespace maitred
