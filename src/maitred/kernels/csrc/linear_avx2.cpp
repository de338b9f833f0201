// The linear with AVX2, FMA and F16C.
//
// A tile of 32 channels is four registers, up to 3 rows x 4 sums. bf16 is widened to float32; int8 goes through 16-bit
// pair sums (vpmaddubsw) of |x| and w with x's sign, which cannot saturate for both lie in -127 .. 127; int4 codes of 0
// .. 15 allow eight of those sums to be added before they are widened.
#include "linear_driver.h"
#include "vec_avx2.h"

namespace maitred {
namespace {

constexpr int kVectors = kTile / 8;

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
    explicit Weights(__m256i w) : even(even_of(w)), odd(odd_of(w)) {}
  };
  using Row = Weights;
  static Acc dot(Acc acc, const Weights& w, const Row& x) {
    return _mm256_fmadd_ps(w.odd, x.odd, _mm256_fmadd_ps(w.even, x.even, acc));
  }
};

struct Int8 {
  using Acc = __m256i;
  static Acc zero() { return _mm256_setzero_si256(); }
  static Acc get(const float* from) { return load_bits(from); }
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
      const typename Op::Weights weights(load_bits(w + 32 * v));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][v] = Op::dot(acc[r][v], weights, typename Op::Row(word(x + r * b.row_stride)));
    }
    w += 128;
    x += 4;
    next += advance;
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) Op::put(sums + 8 * i, acc[i / kVectors][i % kVectors]);
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
      const __m256i both = load_bits(w + 32 * v);
      const __m256i low = _mm256_and_si256(both, nibble);
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m256i four = word(x + r * stride);
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
      const __m256 scale = load_bf16(w + 16 * (i % kVectors));
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
  using V = Vec8;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 3; }
  static const char* product(DType dtype) {
    const char* names[] = {"vfmadd ymm", "vfmadd ymm", "vpmaddubsw ymm", "vpmaddubsw ymm"};
    return names[static_cast<int>(dtype)];
  }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void int4(const Block& b) { kInt4[b.num_rows - 1](b); }
};

}  // namespace

const LinearKernels kLinearAvx2 = linear_driver::table<Avx2>();

}  // namespace maitred
