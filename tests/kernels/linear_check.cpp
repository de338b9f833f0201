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
  std::printf("%s: %s; dtype %d, n %d, k %d, gated %d, m %d\n", isa, what, static_cast<int>(shape.dtype), shape.n,
              shape.k, shape.gated, m);
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

// What is packed from float32; the other block formats come as a file's blocks.
bool can_be_random(DType dtype) { return dtype < DType::f8 || dtype == DType::q4_1 || dtype == DType::q8_0; }

// Any bytes are codes and parts; the f16 heads are made small and positive.
SourceRows random_blocks(const LinearShape& shape, std::vector<uint8_t>& blocks) {
  const SourceType type = shape.dtype == DType::q4_0   ? SourceType::q4_0
                          : shape.dtype == DType::q5_0 ? SourceType::q5_0
                          : shape.dtype == DType::q5_1 ? SourceType::q5_1
                          : shape.dtype == DType::q4_z ? SourceType::q4_z
                          : shape.dtype == DType::q8_z ? SourceType::q8_z
                          : shape.dtype == DType::q8_w ? SourceType::q8_w
                          : shape.dtype == DType::f8   ? SourceType::f8
                          : shape.dtype == DType::q4_k ? SourceType::q4_k
                          : shape.dtype == DType::q5_k ? SourceType::q5_k
                                                       : SourceType::q6_k;
  const int bytes = source_block_bytes(type), per_row = shape.k / source_block_values(type);
  blocks.resize(static_cast<size_t>(shape.n) * per_row * bytes);
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(static_cast<int>(random_value() * 128.0f) + 128);
  const uint16_t head = float_to_f16(block_form(shape.dtype).parts ? 0x1p-12f : 0x1p-5f);
  const float wide = type == SourceType::f8 ? 0x1p-9f : 0x1p-8f;
  for (size_t at = type == SourceType::q6_k ? 208 : 0; at < blocks.size(); at += bytes) {
    std::memcpy(blocks.data() + at, &head, 2);
    if (block_form(shape.dtype).minimum) std::memcpy(blocks.data() + at + 2, &head, 2);
    if (type == SourceType::f8 || type == SourceType::q8_w) std::memcpy(blocks.data() + at, &wide, 4);
  }
  return SourceRows{type, blocks.data(), static_cast<int64_t>(per_row) * bytes, shape.n};
}

void check_shape(Isa isa, LinearShape shape, const LinearOut& how) {
  const LinearKernels &plain = linear_kernels(Isa::plain), &kernels = linear_kernels(isa);
  const std::vector<float> matrix = random_values(static_cast<int64_t>(shape.n) * shape.k);
  const std::vector<float> bias = random_values(shape.n), norm = random_values(shape.k);
  const int kMost = 100;
  const std::vector<float> x = random_values(static_cast<int64_t>(kMost) * shape.k);
  Aligned packed(packed_bytes(shape));
  std::vector<uint8_t> blocks;
  SourceRows rows{SourceType::f32, matrix.data(), shape.k * 4, shape.n};
  if (!can_be_random(shape.dtype)) rows = random_blocks(shape, blocks);
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
  for (DType dtype :
       {DType::f32, DType::bf16, DType::int8, DType::f16, DType::f8, DType::q4_0, DType::q4_1, DType::q5_0, DType::q5_1,
        DType::q8_0, DType::q4_z, DType::q8_z, DType::q8_w, DType::q4_k, DType::q5_k, DType::q6_k})
    for (int n : {1, 33, 70})
      for (int k : {1, 5, 130, 192, 515, 512}) {
        if (!can_be_random(dtype) ? k != 512 : k == 512) continue;
        LinearOut how{};
        check_shape(isa, {dtype, n, k, false, n == 33}, how);
        how.softcap = 3.0f;
        check_shape(isa, {dtype, n, k, false, true}, how);
        how.ending = Ending::add;
        how.alpha = 0.25f;
        check_shape(isa, {dtype, n, k, false, n == 33}, how);
        how.ending = Ending::gate;
        for (GateAct act : {GateAct::silu, GateAct::gelu, GateAct::gelu_tanh}) {
          how.act = act;
          check_shape(isa, {dtype, 2 * n, k, true, n == 33}, how);
        }
      }
  const std::vector<uint8_t> memory(8192);
  uint64_t sink = roofline_kernels(isa).read(memory.data(), 8192);
  for (DType dtype : {DType::f32, DType::bf16, DType::int8, DType::q4_1})
    check(roofline_kernels(isa).work(dtype, 3, &sink) > 0, "no work done", {dtype, 0, 0, false, false}, 0,
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
