// The linear with AVX2, FMA and F16C.
//
// A tile of 32 channels is four registers, up to 3 rows x 4 sums. bf16 is widened to float32; int8 goes through 16-bit
// pair sums (vpmaddubsw) of |x| and w with x's sign, which cannot saturate for both lie in -127 .. 127.
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

// 32 bytes of each of a fifth bit: bit i of `bits` in byte i.
inline __m256i fifth_bits(uint32_t bits) {
  const __m256i bytes = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(bits)),
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
  const __m256i own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own), _mm256_set1_epi8(16));
}

// The codes of 8 channels x 4 values, `v` (0 .. 3) saying which channels.
template <int kBits>
inline __m256i block_codes(const uint8_t* codes, int step, int v) {
  if (kBits == 8) return load_bits(codes + 128 * step + 32 * v);
  const __m256i both = load_bits(codes + 64 * step + 32 * (v % 2)), nibble = _mm256_set1_epi8(15);
  __m256i found = _mm256_and_si256(v < 2 ? both : _mm256_srli_epi16(both, 4), nibble);
  if (kBits == 5) {
    uint32_t bits;
    __builtin_memcpy(&bits, codes + 512 + 16 * step + 4 * v, 4);
    found = _mm256_or_si256(found, fifth_bits(bits));
  }
  if (kBits == 6) {
    const __m256i two = load_bits(codes + 512 + 64 * (step / 2) + 32 * (v % 2));
    const int shift = 4 * (step % 2) + 2 * (v / 2);
    const __m256i moved = shift == 0   ? _mm256_slli_epi16(two, 4)
                          : shift == 2 ? _mm256_slli_epi16(two, 2)
                          : shift == 4 ? two
                                       : _mm256_srli_epi16(two, 2);
    found = _mm256_or_si256(found, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }
  return found;
}

// Products of 4 values each as 16-bit pair sums. Codes of 4, 5, 6 bits leave room for eight, four, two of them; 8 bits
// go as |q| and the row's value with q's sign, which cannot saturate: 2 * 128 * 127.
template <int kBits>
inline __m256i pair_sums(__m256i codes, __m256i four) {
  if (kBits < 8) return _mm256_maddubs_epi16(codes, four);
  const __m256i q = _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80)));
  return _mm256_maddubs_epi16(_mm256_abs_epi8(q), _mm256_sign_epi8(four, q));
}

template <DType kDType, int R>
inline void multiply_block(const uint8_t* head, const uint8_t* w, const uint8_t* rows, int64_t stride,
                           const int32_t* row_sums, int sums_stride, float* sums) {
  constexpr BlockForm kForm = block_form(kDType);
  constexpr int kHalves = 32 / kForm.block, kSteps = 8 / kHalves;
  constexpr int kAdded = kForm.bits == 4 ? 8 : kForm.bits == 5 ? 4 : kForm.bits == 6 ? 2 : 1;
  constexpr int kOffset = kForm.bits == 8 ? 0 : kForm.offset;  // 8-bit codes are signed above
  const uint8_t* codes = w + (kForm.parts ? 64 : 0);
  for (int v = 0; v < kVectors; ++v) {
    const __m256 d = kForm.wide ? load_halves(head + 16 * v, head + 64 + 16 * v) : load_f16(head + 16 * v);
    __m256 m = kForm.minimum ? load_f16(head + 64 + 16 * v) : _mm256_setzero_ps();
    if (kForm.zero) m = _mm256_mul_ps(d, _mm256_sub_ps(_mm256_set1_ps(static_cast<float>(kForm.offset)), m));
    for (int half = 0; half < kHalves; ++half) {
      __m256i acc[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int32_t* of_row = row_sums + r * sums_stride;
        acc[r] = _mm256_set1_epi32(-kOffset * (kHalves == 1 ? of_row[1] + of_row[2] : of_row[1 + half]));
      }
      for (int step = half * kSteps; step < (half + 1) * kSteps; step += kAdded) {
        __m256i pairs[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) pairs[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = step; i < step + kAdded; ++i) {
          const __m256i found = block_codes<kForm.bits>(codes, i, v);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r)
            pairs[r] = _mm256_add_epi16(pairs[r], pair_sums<kForm.bits>(found, word(rows + 4 * i + r * stride)));
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
          acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(pairs[r], _mm256_set1_epi16(1)));
      }
      const __m256 part = !kForm.parts    ? d
                          : kForm.minimum ? _mm256_mul_ps(d, widen_u8(w + 8 * v))
                                          : _mm256_mul_ps(d, widen_s8(w + 32 * half + 8 * v));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int32_t* of_row = row_sums + r * sums_stride;
        const float scale = float_of(static_cast<uint32_t>(of_row[0]));
        float* to = sums + r * kTile + 8 * v;
        __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r]), _mm256_mul_ps(part, _mm256_set1_ps(scale)),
                                   _mm256_loadu_ps(to));
        if (kForm.minimum) {
          __m256 least = m;
          if (kForm.parts) least = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(m, widen_u8(w + 32 + 8 * v)));
          y = _mm256_fmadd_ps(least, _mm256_set1_ps(scale * static_cast<float>(of_row[1] + of_row[2])), y);
        }
        _mm256_storeu_ps(to, y);
      }
    }
  }
}

template <DType kDType, int R>
void multiply_blocks(const Block& b) {
  constexpr BlockForm kForm = block_form(kDType);
  float* sums = static_cast<float*>(b.acc);
  if (b.first)
    for (int i = 0; i < R * kTile; i += 8) _mm256_storeu_ps(sums + i, _mm256_setzero_ps());
  const uint8_t *head = b.weights, *rows = b.rows;
  const int32_t* row_sums = b.sums;
  const uint8_t* next = b.next;
  for (int unit = 0; unit < b.steps; ++unit, head += kForm.unit_bytes(), next += b.next_bytes) {
    const uint8_t* w = head + kForm.head_bytes();
    for (int block = 0; block < kForm.blocks(); ++block) {
      const int lines = b.next_bytes / kForm.blocks();
      for (int line = 0; line < lines; line += 64) _mm_prefetch(next + lines * block + line, _MM_HINT_T0);
      multiply_block<kDType, R>(head, w, rows, b.row_stride, row_sums, b.sums_stride, sums);
      w += kForm.block_bytes();
      rows += 32;
      row_sums += kSumsPerBlock;
    }
  }
}

// f16 weights: a step is one value of 32 channels.
template <int R>
void multiply_f16(const Block& b) {
  __m256 acc[R][kVectors];
  float* sums = static_cast<float*>(b.acc);
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i)
    acc[i / kVectors][i % kVectors] = b.first ? _mm256_setzero_ps() : _mm256_loadu_ps(sums + 8 * i);
  const uint8_t *w = b.weights, *x = b.rows, *next = b.next;
  for (int step = 0; step < b.steps; ++step, w += 64, x += 4, next += b.next_bytes) {
    _mm_prefetch(next, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m256 weights = load_f16(w + 16 * v);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        acc[r][v] = _mm256_fmadd_ps(weights, _mm256_castsi256_ps(word(x + r * b.row_stride)), acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R * kVectors; ++i) _mm256_storeu_ps(sums + 8 * i, acc[i / kVectors][i % kVectors]);
}

using Kernel = void (*)(const Block&);
template <class Op>
constexpr Kernel kFixed[] = {&multiply_rows<Op, 1>, &multiply_rows<Op, 2>, &multiply_rows<Op, 3>};
template <DType kDType>
constexpr Kernel kBlocked[] = {&multiply_blocks<kDType, 1>, &multiply_blocks<kDType, 2>, &multiply_blocks<kDType, 3>};
constexpr Kernel kF16[] = {&multiply_f16<1>, &multiply_f16<2>, &multiply_f16<3>};

struct Avx2 {
  using V = Vec8;
  static constexpr bool kEndsFromSums = false;
  static int rows_at_once(DType) { return 3; }
  static const char* product(DType dtype) {
    const bool floats = dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
    return floats ? "vfmadd ymm" : "vpmaddubsw ymm";
  }

  static void f32(const Block& b) { kFixed<F32>[b.num_rows - 1](b); }
  static void bf16(const Block& b) { kFixed<Bf16>[b.num_rows - 1](b); }
  static void int8(const Block& b) { kFixed<Int8>[b.num_rows - 1](b); }
  static void f16(const Block& b) { kF16[b.num_rows - 1](b); }
  template <DType kDType>
  static void blocked(const Block& b) {
    kBlocked<kDType>[b.num_rows - 1](b);
  }
};

}  // namespace

const LinearKernels kLinearAvx2 = linear_driver::table<Avx2>();

}  // namespace maitred
