// The tile registers as attention uses them. For attention_amx.cpp.
#pragma once

#include "kv_pool.h"
#include "tiles_amx.h"

namespace maitred {
namespace {

constexpr int kTileRows = 16, kTileWords = 16;  // of a whole tile; a word is 4 bytes
constexpr int kSumTiles = 4;                    // registers 0 to 3 are sums
constexpr int kQueries = 4, kKeys = 5;          // rows x 16 words, 16 words x 16 slots
// A head's last words where they fill no tile; once scores are made, weights of 16 slots in bf16 and their values.
constexpr int kTailQueries = 6, kTailKeys = 7, kWeights = 6, kValues = 7;

template <int V>
struct Index {
  static constexpr int value = V;
};

// f(Index<0>), f(Index<1>) .. f(Index<N - 1>): registers' numbers are part of their instructions.
template <int N, class F>
inline void each(const F& f) {
  if constexpr (N > 1) each<N - 1>(f);
  f(Index<N - 1>{});
}

// As assembly, because GCC 12's intrinsics take numbers as literals only, and do not say that a load reads memory.
template <int T>
inline void zero_tile() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int Sum, int A, int B>
inline void add_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
inline void add_signed_unsigned() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}
template <int Sum, int A, int B>
inline void add_unsigned_signed() {
  __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(A), "i"(B));
}

// Sums, queries and weights have `height` rows; the last pair of registers is of `words` words.
inline void configure(int height, int words) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(height);
    config.row_bytes[tile] = 64;
  }
  config.rows[kKeys] = kTileWords;
  config.row_bytes[kWeights] = static_cast<uint16_t>(words * 4);
  config.rows[kValues] = static_cast<uint8_t>(words);
  configure_tiles(config);
}

constexpr int kPairs = kTileSlots / 2;  // words of a tile of bf16 values

inline void configure_scores(int height, int tail) { configure(height, tail == 0 ? kPairs : tail); }

inline void configure_values(int height, int tail) {
  if (tail != 0 && tail != kPairs) configure(height, kPairs);
}

}  // namespace
}  // namespace maitred
