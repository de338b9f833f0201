// The linear with AVX2, FMA and F16C.
//
// A tile of 32 channels is four registers, up to 3 rows x 4 sums. bf16 is widened to float32; int8 goes through 16-bit
// pair sums (vpmaddubsw) of |x| and w with x's sign, which cannot saturate for both lie in -127 .. 127; int4 codes of 0
// .. 15 allow eight of those sums to be added before they are widened.
#include <immintrin.h>

#include "linear_driver.h"

namespace maitred {
namespace {

struct V8 {
  static constexpr int width = 8;
  __m256 v;
  static __m256i mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256i bits(V8 a) { return _mm256_castps_si256(a.v); }
  static V8 load(const float* from) { return {_mm256_loadu_ps(from)}; }
  static V8 load_part(const float* from, int n) { return {_mm256_maskload_ps(from, mask(n))}; }
  static void store(float* to, V8 a) { _mm256_storeu_ps(to, a.v); }
  static void store_part(float* to, V8 a, int n) { _mm256_maskstore_ps(to, mask(n), a.v); }
  static V8 set1(float x) { return {_mm256_set1_ps(x)}; }
  static V8 fma(V8 a, V8 b, V8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static V8 min(V8 a, V8 b) { return {_mm256_min_ps(a.v, b.v)}; }
  static V8 max(V8 a, V8 b) { return {_mm256_max_ps(a.v, b.v)}; }
  static V8 abs(V8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
  static V8 round_even(V8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static V8 select_less(V8 a, V8 b, V8 x, V8 y) {
    return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static V8 copysign(V8 a, V8 sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_and_ps(bit, sign.v), _mm256_andnot_ps(bit, a.v))};
  }
  static V8 pow2(V8 n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
  }
  static V8 max_bits(V8 a, V8 b) { return {_mm256_castsi256_ps(_mm256_max_epi32(bits(a), bits(b)))}; }
  static float largest_bits(V8 a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(bits(a)), _mm256_extracti128_si256(bits(a), 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    return float_of(static_cast<uint32_t>(_mm_cvtsi128_si32(x)));
  }
  static float sum(V8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
  }
  static float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }
  friend V8 operator+(V8 a, V8 b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend V8 operator-(V8 a, V8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
  friend V8 operator*(V8 a, V8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
  friend V8 operator/(V8 a, V8 b) { return {_mm256_div_ps(a.v, b.v)}; }
};

constexpr int kVectors = kTile / 8;

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

inline __m256i broadcast(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return _mm256_set1_epi32(four);
}

struct F32 {
  using Acc = __m256;
  static Acc zero() { return _mm256_setzero_ps(); }
  static Acc get(const float* from) { return _mm256_loadu_ps(from); }
  static void put(float* to, Acc a) { _mm256_storeu_ps(to, a); }
  struct Weights {
    __m256 one;
    explicit Weights(__m256i w) : one(_mm256_castsi256_ps(w)) {}
  };
  struct Row {
    __m256 one;
    explicit Row(__m256i x) : one(_mm256_castsi256_ps(x)) {}
  };
  static Acc dot(Acc acc, const Weights& w, const Row& x) { return _mm256_fmadd_ps(w.one, x.one, acc); }
};

struct Bf16 : F32 {
  struct Weights {  // the even values of the pairs, and the odd ones, as float32
    __m256 even, odd;
    explicit Weights(__m256i w)
        : even(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16))),
          odd(_mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))) {}
  };
  using Row = Weights;
  static Acc dot(Acc acc, const Weights& w, const Row& x) {
    return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, acc));
  }
};

struct Int8 {
  using Acc = __m256i;
  static Acc zero() { return _mm256_setzero_si256(); }
  static Acc get(const float* from) { return load(from); }
  static void put(float* to, Acc a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }
  struct Weights {
    __m256i q;
    explicit Weights(__m256i w) : q(_mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)))) {}
  };
  struct Row {
    __m256i x, size;
    explicit Row(__m256i four) : x(four), size(_mm256_abs_epi8(four)) {}
  };
  static Acc dot(Acc acc, const Weights& w, const Row& x) {
    const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_sign_epi8(w.q, x.x));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};

template <class Op, int R>
void multiply_rows(const Block& b) {
  typename Op::Acc acc[R][kVectors];
  float* sums = static_cast<float*>(b.acc);
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) acc[i / kVectors][i % kVectors] = b.first ? Op::zero() : Op::get(sums + 8 * i);
  const uint8_t* w = b.weights;
  const uint8_t* x = b.rows;
  const uint8_t* next = b.next;
  const int64_t advance = b.next_bytes;
  const int64_t second = advance > 64 ? 64 : 0;
  for (int step = 0; step < b.steps; ++step) {
    _mm_prefetch(next, _MM_HINT_T0);
    _mm_prefetch(next + second, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const typename Op::Weights weights(load(w + 32 * v));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        acc[r][v] = Op::dot(acc[r][v], weights, typename Op::Row(broadcast(x + r * b.row_stride)));
    }
    w += 128;
    x += 4;
    next += advance;
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) Op::put(sums + 8 * i, acc[i / kVectors][i % kVectors]);
}

inline __m256 bf16x8(const uint8_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Eight steps of K as 16-bit pair sums (8 * 2 * 15 * 128 fits), then widened onto acc.
template <int R>
inline void multiply_eight(const uint8_t* w, const uint8_t* x, int64_t stride, __m256i acc[R][kVectors]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i pairs[R][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) pairs[i / kVectors][i % kVectors] = _mm256_setzero_si256();
  for (int step = 0; step < 8; ++step, w += 64, x += 4) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const __m256i both = load(w + 32 * v);
      const __m256i low = _mm256_and_si256(both, nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i four = broadcast(x + r * stride);
        pairs[r][v] = _mm256_add_epi16(pairs[r][v], _mm256_maddubs_epi16(low, four));
        pairs[r][v + 2] = _mm256_add_epi16(pairs[r][v + 2], _mm256_maddubs_epi16(high, four));
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) {
    __m256i& to = acc[i / kVectors][i % kVectors];
    to = _mm256_add_epi32(to, _mm256_madd_epi16(pairs[i / kVectors][i % kVectors], _mm256_set1_epi16(1)));
  }
}

template <int R>
void multiply_int4(const Block& b) {
  float* sums = static_cast<float*>(b.acc);
  if (b.first)
    for (int i = 0; i < R * kTile; i += 8) _mm256_storeu_ps(sums + i, _mm256_setzero_ps());
  const int64_t bytes = 64 + b.group * 16;
  for (int g = 0; g < b.steps; ++g) {
    const uint8_t* w = b.weights + g * bytes;
    const uint8_t* next = b.next + static_cast<int64_t>(g) * b.next_bytes;
    for (int line = 0; line < b.next_bytes; line += 64) _mm_prefetch(next + line, _MM_HINT_T0);
    __m256i acc[R][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < R * kVectors; ++i)
      acc[i / kVectors][i % kVectors] = _mm256_set1_epi32(b.sums[i / kVectors * b.sums_stride + 2 * g]);
    for (int i = 0; i < b.group; i += 32)
      multiply_eight<R>(w + 64 + i * 16, b.rows + g * b.group + i, b.row_stride, acc);
#pragma GCC unroll 16
    for (int i = 0; i < R * kVectors; ++i) {
      const __m256 scale = bf16x8(w + 16 * (i % kVectors));
      const __m256 base = _mm256_castsi256_ps(_mm256_set1_epi32(b.sums[i / kVectors * b.sums_stride + 2 * g + 1]));
      const __m256 value = _mm256_sub_ps(_mm256_castsi256_ps(acc[i / kVectors][i % kVectors]), base);
      _mm256_storeu_ps(sums + 8 * i, _mm256_fmadd_ps(value, scale, _mm256_loadu_ps(sums + 8 * i)));
    }
  }
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>, &multiply_rows<Op, 2>, &multiply_rows<Op, 3>};
constexpr Kernel kInt4[] = {&multiply_int4<1>, &multiply_int4<2>, &multiply_int4<3>};

struct Avx2 {
  using V = V8;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 3; }
  static const char* product(DType dtype) {
    const char* names[] = {"vfmadd ymm", "vfmadd ymm", "vpmaddubsw ymm", "vpmaddubsw ymm"};
    return names[static_cast<int>(dtype)];
  }

  static V8 from_int32(const int32_t* from) { return {_mm256_cvtepi32_ps(load(from))}; }
  static void store_bf16(uint16_t* to, V8 a) {
    float values[8];
    V8::store(values, a);
    for (int i = 0; i < 8; ++i) to[i] = float_to_bf16(values[i]);
  }
  static void store_int8(int8_t* to, V8 a) {
    const __m256i q = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
  }
  static int32_t sum_int8(const int8_t* from, int n) {  // n a multiple of 32
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(0x80));
    __m256i sums = _mm256_setzero_si256();
    for (int i = 0; i < n; i += 32)
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_xor_si256(load(from + i), flip), _mm256_setzero_si256()));
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    return static_cast<int32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)) - 128 * n;
  }

  static void prefetch_to_write(const float* line) { __builtin_prefetch(line, 1); }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void int4(const Block& b) { kInt4[b.num_rows - 1](b); }
};

}  // namespace

const LinearKernels kLinearAvx2 = linear_driver::table<Avx2>();

}  // namespace maitred
