// The linears of every instruction set of this processor against the plain ones, as a program of its own, so that it
// runs where no Python of that processor is: scripts/test-neon runs it under an emulator. Prints what differs; exits 1
// then.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "bits.h"
#include "linear.h"
#include "roofline.h"

using namespace maitred;

namespace {

int failures = 0;

void check(bool good, const char* what, const LinearShape& shape, int m, const char* isa) {
  if (good) return;
  ++failures;
  std::printf("%s: %s; dtype %d, n %d, k %d, group %d, gated %d, m %d\n", isa, what, static_cast<int>(shape.dtype),
              shape.n, shape.k, shape.group, shape.gated, m);
}

uint32_t state = 1;
float random_value() {  // -1 .. 1
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
}

std::vector<float> random_values(int64_t count) {
  std::vector<float> values(count);
  for (float& value : values) value = random_value();
  return values;
}

struct Aligned {
  void* data;
  explicit Aligned(int64_t bytes) : data(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) {}
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
};

// Rows first .. first + m - 1 of x, normed and multiplied, on one thread.
std::vector<float> product(const LinearKernels& kernels, const PackedLinear& weights, const std::vector<float>& x,
                           const std::vector<float>& norm, int first, int m, const LinearOut& how) {
  const LinearShape& shape = weights.shape;
  const DType dtype = operand_dtype(shape.dtype);
  const int64_t stride = operand_row_bytes(dtype, shape.k);
  Aligned rows(m * stride);
  std::vector<float> scales(m);
  std::vector<int32_t> sums(static_cast<size_t>(m) * sums_per_row(shape) + 1);
  const Operand operand{dtype, rows.data, stride, scales.data(), sums.data()};
  const PrepareSource source{x.data() + static_cast<int64_t>(first) * shape.k, shape.k, nullptr, norm.data(), 1e-6f};
  kernels.prepare(source, shape, 0, m, operand);
  std::vector<float> y(static_cast<size_t>(m) * out_width(shape), 0.5f);
  LinearOut out = how;
  out.rows = y.data();
  out.row_stride = out_width(shape);
  WorkCounter counter;
  kernels.linear(weights, operand, m, out, counter, Worker{0, 1, nullptr});
  return y;
}

// Values as large as the products, so that an absolute bound will do.
bool close(const std::vector<float>& a, const std::vector<float>& b, float room) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::fabs(a[i] - b[i]) <= room)) return false;
  return true;
}

void check_shape(Isa isa, LinearShape shape, const LinearOut& how) {
  const LinearKernels &plain = linear_kernels(Isa::plain), &kernels = linear_kernels(isa);
  const std::vector<float> matrix = random_values(static_cast<int64_t>(shape.n) * shape.k);
  const std::vector<float> bias = random_values(shape.n), norm = random_values(shape.k);
  const int kMost = 100;
  const std::vector<float> x = random_values(static_cast<int64_t>(kMost) * shape.k);
  Aligned packed(packed_bytes(shape));
  const SourceRows rows{SourceType::f32, matrix.data(), shape.k * 4, shape.n};
  WorkCounter counter;
  pack_linear(shape, &rows, 1, bias.data(), static_cast<uint8_t*>(packed.data), counter, Worker{0, 1, nullptr});
  const PackedLinear weights{shape, static_cast<const uint8_t*>(packed.data)};
  const std::vector<float> expected = product(plain, weights, x, norm, 0, kMost, how);
  const std::vector<float> whole = product(kernels, weights, x, norm, 0, kMost, how);
  // A value that is rounded the other way in bf16 or int8 moves its products by a step of those.
  const float step = shape.dtype == DType::f32 ? 1e-5f : shape.dtype == DType::bf16 ? 2e-3f : 6e-3f;
  const float size = 1.0f + std::sqrt(static_cast<float>(shape.k));  // of products; a gated output is one of two
  check(close(whole, expected, step * size * (shape.gated ? size : 1.0f)), "off", shape, kMost, isa_name(isa));
  for (int m : {1, 2, 3, 4, 7, 13, 18, 37, 50}) {
    const std::vector<float> part = product(kernels, weights, x, norm, 5, m, how);
    const size_t at = static_cast<size_t>(5) * out_width(shape);
    check(std::memcmp(part.data(), whole.data() + at, part.size() * sizeof(float)) == 0,
          "not the same bits in other company", shape, m, isa_name(isa));
  }
}

void check_isa(Isa isa) {
  const struct {
    DType dtype;
    int group;
  } formats[] = {{DType::f32, 0},   {DType::bf16, 0},  {DType::int8, 0},
                 {DType::int4, 32}, {DType::int4, 64}, {DType::int4, 128}};
  for (const auto& format : formats)
    for (int n : {1, 33, 70})
      for (int k : {1, 5, 130, 192, 515}) {
        LinearOut how{};
        check_shape(isa, {format.dtype, n, k, format.group, false, n == 33}, how);
        how.softcap = 3.0f;
        check_shape(isa, {format.dtype, n, k, format.group, false, true}, how);
        how.ending = Ending::add;
        how.alpha = 0.25f;
        check_shape(isa, {format.dtype, n, k, format.group, false, n == 33}, how);
        how.ending = Ending::gate;
        for (GateAct act : {GateAct::silu, GateAct::gelu, GateAct::gelu_tanh}) {
          how.act = act;
          check_shape(isa, {format.dtype, 2 * n, k, format.group, true, n == 33}, how);
        }
      }
  const std::vector<uint8_t> memory(8192);
  uint64_t sink = roofline_kernels(isa).read(memory.data(), 8192);
  for (DType dtype : {DType::f32, DType::bf16, DType::int8, DType::int4})
    check(roofline_kernels(isa).work(dtype, 3, &sink) > 0, "no work done", {dtype, 0, 0, 0, false, false}, 0,
          isa_name(isa));
}

}  // namespace

int main() {
  for (Isa isa : available_isas()) {
    check_isa(isa);
    std::printf("linear: %s checked\n", isa_name(isa));
  }
  return failures == 0 ? 0 : 1;
}
