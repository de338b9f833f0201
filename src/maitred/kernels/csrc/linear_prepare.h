// Rows of activations as a linear's weights take them: normed, rotated, rounded and padded. K and what is local to whom
// as linear_driver.h has it.
#pragma once

#include <cstring>

#include "bits.h"
#include "linear.h"
#include "rotate.h"
#include "vector_math.h"

namespace maitred {
namespace linear_driver {

static inline int divide_up(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

template <class V>
inline void put(float* to, V y, int left) {
  if (left >= V::width)
    V::store(to, y);
  else
    V::store_part(to, y, left);
}

template <class V>
inline V get(const float* from, int left) {
  return left >= V::width ? V::load(from) : V::load_part(from, left);
}

template <class V>
inline float sum_of_squares(const float* x, int k) {
  V a = V::set1(0.0f), b = a, c = a, d = a;
  int i = 0;
  for (; i + 4 * V::width <= k; i += 4 * V::width) {
    const V v0 = V::load(x + i), v1 = V::load(x + i + V::width);
    const V v2 = V::load(x + i + 2 * V::width), v3 = V::load(x + i + 3 * V::width);
    a = V::fma(v0, v0, a);
    b = V::fma(v1, v1, b);
    c = V::fma(v2, v2, c);
    d = V::fma(v3, v3, d);
  }
  for (; i < k; i += V::width) {
    const V v = get<V>(x + i, k - i);
    a = V::fma(v, v, a);
  }
  return V::sum((a + b) + (c + d));
}

// The row that the linear sees, V::width values at a time: x, or x * inverse * weight.
template <class V>
struct NormedRow {
  const float* x;
  const float* weight;
  float inverse;
  int k;
  V at(int i) const {
    const V v = get<V>(x + i, k - i);
    return weight == nullptr ? v : v * V::set1(inverse) * get<V>(weight + i, k - i);
  }
};

template <class V>
inline NormedRow<V> normed_row(const PrepareSource& source, int k, int i) {
  const float* x = source.rows + (source.index != nullptr ? source.index[i] : i) * source.row_stride;
  NormedRow<V> row{x, source.norm_weight, 1.0f, k};
  if (source.norm_weight != nullptr)
    row.inverse = 1.0f / V::root(sum_of_squares<V>(x, k) / static_cast<float>(k) + source.eps);
  return row;
}

template <class V>
void layer_norm(float* x, int k, const float* weight, const float* bias, float eps) {
  V sum = V::set1(0.0f);
  for (int i = 0; i < k; i += V::width) sum = sum + get<V>(x + i, k - i);
  const V mean = V::set1(V::sum(sum) / static_cast<float>(k));
  for (int i = 0; i < k; i += V::width) put(x + i, get<V>(x + i, k - i) - mean, k - i);
  const V inverse = V::set1(1.0f / V::root(sum_of_squares<V>(x, k) / static_cast<float>(k) + eps));
  for (int i = 0; i < k; i += V::width) {
    const V scaled = get<V>(x + i, k - i) * inverse * get<V>(weight + i, k - i);
    put(x + i, scaled + get<V>(bias + i, k - i), k - i);
  }
}

template <class V>
inline float largest(const NormedRow<V>& row, int begin, int end) {
  V most = V::set1(0.0f);
  for (int i = begin; i < end; i += V::width) most = V::max_bits(most, V::abs(row.at(i)));
  return V::largest_bits(most);
}

template <class V>
inline void clear_padding(int k, int8_t* to) {
  const int padded = static_cast<int>(operand_row_bytes(DType::int8, k));
  const int written = divide_up(k, V::width) * V::width;
  if (written < padded) std::memset(to + written, 0, padded - written);
}

static inline float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

template <class K>
inline void prepare_int8(const NormedRow<typename K::V>& row, int8_t* to, float& scale, int32_t* sums) {
  using V = typename K::V;
  scale = largest<V>(row, 0, row.k) / 127.0f;
  const V inverse = V::set1(inverse_of(scale));
  for (int i = 0; i < row.k; i += V::width) V::store_int8(to + i, row.at(i) * inverse);
  clear_padding<V>(row.k, to);
  sums[0] = -128 * V::sum_int8(to, static_cast<int>(operand_row_bytes(DType::int8, row.k)));
}

static inline int32_t sum_of_sixteen(const int8_t* from) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += from[i];
  return sum;
}

// For block formats: a scale for every 32 values, and their sums (block_form.h).
template <class K>
inline void prepare_blocks(const NormedRow<typename K::V>& row, int blocks, int8_t* to, int32_t* sums) {
  using V = typename K::V;
  clear_padding<V>(row.k, to);
  for (int block = 0; block < blocks; ++block, sums += kSumsPerBlock) {
    const int begin = 32 * block, end = begin + 32 < row.k ? begin + 32 : row.k;
    const float scale = largest<V>(row, begin, end) / 127.0f;
    const V inverse = V::set1(inverse_of(scale));
    for (int i = begin; i < end; i += V::width) V::store_int8(to + i, row.at(i) * inverse);
    sums[0] = static_cast<int32_t>(bits_of(scale));
    sums[1] = sum_of_sixteen(to + begin);
    sums[2] = sum_of_sixteen(to + begin + 16);
  }
}

template <class K>
inline void prepare_bf16(const NormedRow<typename K::V>& row, uint16_t* to) {
  using V = typename K::V;
  for (int i = 0; i < row.k; i += V::width) V::store_bf16(to + i, row.at(i));
  const int padded = static_cast<int>(operand_row_bytes(DType::bf16, row.k) / 2);
  const int written = divide_up(row.k, V::width) * V::width;
  if (written < padded) std::memset(to + written, 0, (padded - written) * sizeof(uint16_t));
}

template <class V>
inline void prepare_f32(const NormedRow<V>& row, float* to) {
  for (int i = 0; i < row.k; i += V::width) V::store(to + i, row.at(i));
  const int padded = static_cast<int>(operand_row_bytes(DType::f32, row.k) / 4);
  const int written = divide_up(row.k, V::width) * V::width;
  if (written < padded) std::memset(to + written, 0, (padded - written) * sizeof(float));
}

template <class K>
void prepare(const PrepareSource& source, const LinearShape& shape, int first, int last, const Operand& out) {
  using V = typename K::V;
  const auto room = [&](bool wanted) { return wanted ? operand_row_bytes(DType::f32, shape.k) : 64; };
  const bool sorts = source.order != nullptr,
             rotates = shape.dtype == DType::int8 && !source.rotated && rotation_block(shape.k) > 1;
  float* const rotated = static_cast<float*>(__builtin_alloca_with_align(room(rotates || sorts), 8 * 64));
  float* const sorted = static_cast<float*>(__builtin_alloca_with_align(room(sorts), 8 * 64));
  for (int i = first; i < last; ++i) {
    NormedRow<V> row = normed_row<V>(source, shape.k, i);
    if (sorts) {
      prepare_f32(row, rotated);
      for (int j = 0; j < shape.k; ++j) sorted[j] = rotated[source.order[j]];
      row = NormedRow<V>{sorted, nullptr, 1.0f, shape.k};
    }
    uint8_t* to = static_cast<uint8_t*>(out.rows) + i * out.row_stride;
    if (operand_dtype(shape.dtype) == DType::f32) prepare_f32(row, reinterpret_cast<float*>(to));
    if (operand_dtype(shape.dtype) == DType::bf16) prepare_bf16<K>(row, reinterpret_cast<uint16_t*>(to));
    int32_t* const sums = out.sums + static_cast<int64_t>(i) * sums_per_row(shape);
    if (is_blocked(shape.dtype))
      prepare_blocks<K>(row, sums_per_row(shape) / kSumsPerBlock, reinterpret_cast<int8_t*>(to), sums);
    if (rotates) {
      prepare_f32(row, rotated);
      rotate(rotated, shape.k);
      row = NormedRow<V>{rotated, nullptr, 1.0f, shape.k};
    }
    if (shape.dtype == DType::int8) prepare_int8<K>(row, reinterpret_cast<int8_t*>(to), out.scales[i], sums);
    if (source.rotated) out.scales[i] *= static_cast<float>(rotation_block(shape.k));
  }
}

}  // namespace linear_driver
}  // namespace maitred
