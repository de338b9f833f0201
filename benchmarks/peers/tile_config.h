// Put before every C++ file of llama.cpp. GCC 12's _tile_loadconfig says that it reads 8 bytes of the 64, so the
// compiler drops the stores to the others, and every product in AMX's tiles ends the process.
#pragma once

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*reinterpret_cast<const char (*)[64]>(config)))
#endif
