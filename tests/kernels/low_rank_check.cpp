// Low-rank products of every instruction set of this processor against the plain ones, as linear_check.cpp for linears.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "bits.h"
#include "low_rank.h"

using namespace maitred;

namespace {

int failures = 0;

uint32_t state = 1;
float random_value() {  // -1 .. 1
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
}

std::vector<float> random_values(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = random_value();
  return values;
}

// The values' bytes as an adapter of that format has them.
std::vector<uint8_t> packed(DType dtype, const std::vector<float>& values) {
  const size_t size = dtype == DType::f32 ? 4 : 2;
  std::vector<uint8_t> bytes(values.size() * size + 64);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = float_to_bf16(values[i]);
    std::memcpy(bytes.data() + i * size, dtype == DType::f32 ? static_cast<const void*>(&values[i]) : &half, size);
  }
  return bytes;
}

struct Case {
  DType dtype;
  int rank, k, panels;
};

// B (A x) of rows first .. first + count - 1, normed.
std::vector<float> product(const LowRankKernels& kernels, const Case& shape, const std::vector<uint8_t>& a,
                           const std::vector<uint8_t>& b, const std::vector<float>& x, const std::vector<float>& norm,
                           int first, int count) {
  const int64_t stride = operand_row_bytes(DType::f32, shape.k) / 4;
  std::vector<float> rows(static_cast<size_t>(count * stride)), sums(static_cast<size_t>(count * shape.rank));
  const PrepareSource source{x.data(), shape.k, nullptr, norm.data(), 1e-6f};
  for (int i = 0; i < count; ++i) kernels.row(source, shape.k, first + i, rows.data() + i * stride);
  kernels.project(LowRankA{shape.dtype, shape.rank, shape.k, a.data()}, rows.data(), stride, count, sums.data(),
                  shape.rank);
  std::vector<float> y(static_cast<size_t>(count * shape.panels * kPanel));
  const LowRankB panels{shape.dtype, shape.panels, shape.rank, b.data(), y.data(), kPanel};
  kernels.expand(panels, sums.data(), shape.rank, count, shape.panels * kPanel);
  return y;
}

void check(Isa isa, const Case& shape) {
  const LowRankKernels& kernels = low_rank_kernels(isa);
  const auto a = packed(shape.dtype, random_values(int64_t{shape.rank} * low_rank_k(shape.k)));
  const auto b = packed(shape.dtype, random_values(int64_t{shape.panels} * shape.rank * kPanel));
  const auto x = random_values(int64_t{kAdapterRows} * shape.k), norm = random_values(shape.k);
  const auto all = product(kernels, shape, a, b, x, norm, 0, kAdapterRows);
  const auto plain = product(kLowRankPlain, shape, a, b, x, norm, 0, kAdapterRows);
  const size_t width = static_cast<size_t>(shape.panels * kPanel);
  bool near = true, same = true;
  for (size_t i = 0; i < all.size(); ++i)
    near = near && std::fabs(all[i] - plain[i]) < 1e-3f + 1e-4f * std::fabs(plain[i]);
  for (int first = 0; first < kAdapterRows; ++first)
    for (int count = 1; first + count <= kAdapterRows; ++count) {
      const auto some = product(kernels, shape, a, b, x, norm, first, count);
      for (size_t i = 0; i < some.size(); ++i) same = same && bits_of(some[i]) == bits_of(all[first * width + i]);
    }
  if (near && same) return;
  ++failures;
  std::printf("%s: %s; dtype %d, rank %d, k %d\n", isa_name(isa), near ? "bits depend on the rows beside" : "wrong",
              static_cast<int>(shape.dtype), shape.rank, shape.k);
}

}  // namespace

int main() {
  for (const Isa isa : available_isas()) {
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const Case& shape : {Case{dtype, 4, 1, 1}, Case{dtype, 16, 96, 3}, Case{dtype, 8, 250, 2}})
        check(isa, shape);
    std::printf("low rank: %s checked\n", isa_name(isa));
  }
  return failures == 0 ? 0 : 1;
}
