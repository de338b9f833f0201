// maitred.kernels._native: packing, unpacking and single linears, for loading and for tests. Steps call the C++ itself.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "linear.h"
#include "roofline.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace maitred {
namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using ConstMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using ConstVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Index = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// A run of rows: address of the first, number of rows, bytes from one to the next, "float32" | "bfloat16" | "float16".
using Source = std::tuple<uint64_t, int, int64_t, std::string>;

template <class E>
E named(const std::string& name, std::initializer_list<std::pair<const char*, E>> choices) {
  std::string known;
  for (const auto& choice : choices) {
    if (name == choice.first) return choice.second;
    known += (known.empty() ? "" : ", ") + std::string(choice.first);
  }
  throw std::invalid_argument("'" + name + "' is none of " + known);
}

SourceType source_type(const std::string& name) {
  return named<SourceType>(
      name, {{"float32", SourceType::f32}, {"bfloat16", SourceType::bf16}, {"float16", SourceType::f16},
             {"Q4_0", SourceType::q4_0},   {"Q4_1", SourceType::q4_1},     {"Q5_0", SourceType::q5_0},
             {"Q5_1", SourceType::q5_1},   {"Q8_0", SourceType::q8_0},     {"Q2_K", SourceType::q2_k},
             {"Q3_K", SourceType::q3_k},   {"Q4_K", SourceType::q4_k},     {"Q5_K", SourceType::q5_k},
             {"Q6_K", SourceType::q6_k},   {"IQ4_NL", SourceType::iq4_nl}, {"IQ4_XS", SourceType::iq4_xs},
             {"MXFP4", SourceType::mxfp4}, {"Q4_Z", SourceType::q4_z},     {"Q8_Z", SourceType::q8_z},
             {"Q8_W", SourceType::q8_w},   {"F8_128", SourceType::f8}});
}

DType dtype_named(const std::string& name) {
  return named<DType>(name, {{"float32", DType::f32},
                             {"bfloat16", DType::bf16},
                             {"int8", DType::int8},
                             {"float16", DType::f16},
                             {"q4_0", DType::q4_0},
                             {"q4_1", DType::q4_1},
                             {"q5_0", DType::q5_0},
                             {"q5_1", DType::q5_1},
                             {"q8_0", DType::q8_0},
                             {"fp8", DType::f8},
                             {"q4_z", DType::q4_z},
                             {"q8_z", DType::q8_z},
                             {"q8_w", DType::q8_w},
                             {"q4_k", DType::q4_k},
                             {"q5_k", DType::q5_k},
                             {"q6_k", DType::q6_k}});
}

LinearShape make_shape(const std::string& dtype, int n, int k, bool gated, bool bias) {
  const LinearShape shape{dtype_named(dtype), n, k, gated, bias};
  if (const char* fault = shape_fault(shape)) throw std::invalid_argument(fault);
  return shape;
}

PackedLinear packed(const LinearShape& shape, const ConstBytes& data) {
  if (static_cast<int64_t>(data.size()) < packed_bytes(shape) || reinterpret_cast<uintptr_t>(data.data()) % 64 != 0)
    throw std::invalid_argument("packed weights of " + std::to_string(data.size()) + " bytes; needed are " +
                                std::to_string(packed_bytes(shape)) + ", aligned to 64");
  return PackedLinear{shape, data.data()};
}

void pack(ThreadPool& pool, const LinearShape& shape, const std::vector<nb::tuple>& tuples, nb::object bias,
          Bytes out) {
  std::vector<SourceRows> sources;
  int rows = 0;
  for (const nb::tuple& t : tuples) {
    sources.push_back(SourceRows{source_type(nb::cast<std::string>(t[3])),
                                 reinterpret_cast<const void*>(nb::cast<uint64_t>(t[0])), nb::cast<int64_t>(t[2]),
                                 nb::cast<int>(t[1])});
    rows += sources.back().num_rows;
    const SourceType type = sources.back().type;
    const bool makes = shape.dtype < DType::f8 || shape.dtype == DType::q4_1 || shape.dtype == DType::q8_0;
    if (shape.k % source_block_values(type) != 0 || !(makes || keeps(type, shape.dtype)))
      throw std::invalid_argument("rows of " + std::to_string(shape.k) + " values of " + nb::cast<std::string>(t[3]) +
                                  " cannot be packed so");
  }
  if (rows != shape.n)
    throw std::invalid_argument("sources have " + std::to_string(rows) + " rows, the shape " + std::to_string(shape.n));
  packed(shape, ConstBytes(out));
  const float* values = nullptr;
  ConstVector held;
  if (shape.bias) {
    held = nb::cast<ConstVector>(bias);
    if (static_cast<int>(held.size()) != shape.n) throw std::invalid_argument("bias and rows differ in number");
    values = held.data();
  }
  nb::gil_scoped_release release;
  WorkCounter counter;
  pool.run([&](const Worker& worker) {
    pack_linear(shape, sources.data(), static_cast<int>(sources.size()), values, out.data(), counter, worker);
  });
}

void unpack_rows(const LinearShape& shape, const ConstBytes& data, const Index& rows, const Matrix& out) {
  const PackedLinear weights = packed(shape, data);
  if (out.shape(0) != rows.size() || static_cast<int>(out.shape(1)) != shape.k ||
      (out.shape(1) > 1 && out.stride(1) != 1))
    throw std::invalid_argument("out must be [number of rows, k]");
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows.data()[i] < 0 || rows.data()[i] >= shape.n)
      throw std::invalid_argument("row " + std::to_string(rows.data()[i]) + " of " + std::to_string(shape.n));
    unpack_row(weights, rows.data()[i], out.data() + i * out.stride(0));
  }
}

void expand_rows(const std::string& dtype, const ConstBytes& rows, const Matrix& out) {
  const SourceType type = source_type(dtype);
  const int64_t k = static_cast<int64_t>(out.shape(1)), values = source_block_values(type);
  const int64_t stride = k / values * source_block_bytes(type);
  if (k % values != 0 || static_cast<int64_t>(rows.size()) != stride * static_cast<int64_t>(out.shape(0)) ||
      (k > 1 && out.stride(1) != 1))
    throw std::invalid_argument(std::to_string(rows.size()) + " bytes of " + dtype + " are not the rows of out");
  for (size_t i = 0; i < out.shape(0); ++i)
    to_float(type, rows.data() + static_cast<int64_t>(i) * stride, static_cast<int>(k), out.data() + i * out.stride(0));
}

nb::tuple source_block(const std::string& dtype) {
  const SourceType type = source_type(dtype);
  return nb::make_tuple(source_block_values(type), source_block_bytes(type));
}

// Memory for m prepared rows.
struct OwnOperand {
  std::unique_ptr<uint8_t, decltype(&std::free)> rows;
  std::vector<float> scales;
  std::vector<int32_t> sums;
  Operand operand;

  OwnOperand(const LinearShape& shape, int m)
      : rows(nullptr, &std::free), scales(m), sums(static_cast<size_t>(m) * sums_per_row(shape) + 1) {
    const DType dtype = operand_dtype(shape.dtype);
    const int64_t stride = operand_row_bytes(dtype, shape.k);
    rows.reset(static_cast<uint8_t*>(std::aligned_alloc(64, (m * stride + 63) / 64 * 64)));
    operand = Operand{dtype, rows.get(), stride, scales.data(), sums.data()};
  }
};

struct Call {
  LinearShape shape;
  PackedLinear weights;
  PrepareSource source;
  LinearOut out;
  int m;
};

Call make_call(const LinearShape& shape, const ConstBytes& data, const ConstMatrix& x, const nb::object& index,
               const nb::object& norm_weight, float eps, const Matrix& out, const std::string& ending,
               const std::string& act, float alpha, float softcap) {
  Call call{shape, packed(shape, data), {}, {}, static_cast<int>(out.shape(0))};
  call.source = PrepareSource{x.data(), x.stride(0), nullptr, nullptr, eps};
  if (!index.is_none()) call.source.index = nb::cast<Index>(index).data();
  if (!norm_weight.is_none()) call.source.norm_weight = nb::cast<ConstVector>(norm_weight).data();
  call.out.rows = out.data();
  call.out.row_stride = out.stride(0);
  call.out.ending = named<Ending>(ending, {{"store", Ending::store}, {"add", Ending::add}, {"gate", Ending::gate}});
  call.out.act =
      named<GateAct>(act, {{"silu", GateAct::silu}, {"gelu", GateAct::gelu}, {"gelu_tanh", GateAct::gelu_tanh}});
  call.out.alpha = alpha;
  call.out.softcap = softcap;
  if (static_cast<int>(x.shape(1)) != shape.k || static_cast<int>(out.shape(1)) != out_width(shape))
    throw std::invalid_argument("x or out does not fit the packed shape");
  if ((x.shape(1) > 1 && x.stride(1) != 1) || (out.shape(1) > 1 && out.stride(1) != 1))
    throw std::invalid_argument("values of a row must be contiguous");
  if (shape.gated != (call.out.ending == Ending::gate))
    throw std::invalid_argument("gated weights and gate endings go together");
  return call;
}

void run_linear(const std::string& isa, ThreadPool& pool, const LinearShape& shape, const ConstBytes& data,
                const ConstMatrix& x, const nb::object& index, const nb::object& norm_weight, float eps,
                const Matrix& out, const std::string& ending, const std::string& act, float alpha, float softcap) {
  const Call call = make_call(shape, data, x, index, norm_weight, eps, out, ending, act, alpha, softcap);
  const LinearKernels& kernels = linear_kernels(isa_named(isa));
  OwnOperand own(shape, call.m);
  nb::gil_scoped_release release;
  WorkCounter preparing, multiplying;
  pool.run([&](const Worker& worker) {
    prepare_rows(kernels, call.source, shape, call.m, own.operand, preparing, worker);
    worker.meet();
    kernels.linear(call.weights, own.operand, call.m, call.out, multiplying, worker);
  });
}

// Seconds that one product takes (preparing and barriers included): the best of `rounds` times all the copies of its
// weights. Enough copies, and they come from memory as in a step and not from a cache.
double time_linear(const std::string& isa, ThreadPool& pool, const LinearShape& shape, const ConstBytes& copies,
                   int num_copies, int m, int rounds) {
  const int64_t bytes = packed_bytes(shape), stride = (bytes + 4095) / 4096 * 4096;
  if (static_cast<int64_t>(copies.size()) < stride * num_copies) throw std::invalid_argument("too few bytes of copies");
  const LinearKernels& kernels = linear_kernels(isa_named(isa));
  std::vector<float> x(static_cast<size_t>(m) * shape.k), y(static_cast<size_t>(m) * out_width(shape));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 2654435761u >> 8) % 2001 - 1000);
  OwnOperand own(shape, m);
  const PrepareSource source{x.data(), shape.k, nullptr, nullptr, 0.0f};
  LinearOut out{y.data(), out_width(shape)};
  if (shape.gated) out.ending = Ending::gate;
  std::vector<WorkCounter> counters(2 * num_copies);
  nb::gil_scoped_release release;
  double best = 1e30;
  for (int round = 0; round < rounds; ++round) {
    for (WorkCounter& counter : counters) counter.next.store(0);
    pool.run([&](const Worker& worker) {
      for (int copy = 0; copy < num_copies; ++copy) {
        const auto start = std::chrono::steady_clock::now();
        prepare_rows(kernels, source, shape, m, own.operand, counters[2 * copy], worker);
        worker.meet();
        const PackedLinear weights{shape, copies.data() + copy * stride};
        kernels.linear(weights, own.operand, m, out, counters[2 * copy + 1], worker);
        worker.meet();
        if (worker.index != 0) continue;
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
      }
    });
  }
  return best;
}

double measure_stream(const std::string& isa, ThreadPool& pool, const ConstBytes& memory, int repeats) {
  nb::gil_scoped_release release;
  return stream_read(roofline_kernels(isa_named(isa)), pool, memory.data(), static_cast<int64_t>(memory.size()),
                     repeats);
}

double measure_peak(const std::string& isa, ThreadPool& pool, const std::string& dtype, int repeats) {
  const DType type = dtype_named(dtype);
  nb::gil_scoped_release release;
  return peak(roofline_kernels(isa_named(isa)), pool, type, repeats);
}

nb::tuple kernel_of(const std::string& isa, const LinearShape& shape, int m) {
  const LinearProduct product = linear_kernels(isa_named(isa)).product(shape, m);
  return nb::make_tuple(product.name, product.rows_at_once, kTile);
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.attr("PACK_VERSION") = kPackVersion;
  nb::class_<LinearShape>(m, "LinearShape", "What is packed, and how; raises ValueError for what cannot be.")
      .def(
          "__init__",
          [](LinearShape* self, const std::string& dtype, int n, int k, bool gated, bool bias) {
            new (self) LinearShape(make_shape(dtype, n, k, gated, bias));
          },
          nb::arg("dtype"), nb::arg("n"), nb::arg("k"), nb::arg("gated") = false, nb::arg("bias") = false)
      .def_ro("n", &LinearShape::n)
      .def_ro("k", &LinearShape::k)
      .def_ro("gated", &LinearShape::gated)
      .def_ro("bias", &LinearShape::bias)
      .def_prop_ro("packed_bytes", [](const LinearShape& s) { return packed_bytes(s); })
      .def_prop_ro("out_width", [](const LinearShape& s) { return out_width(s); });
  m.def("pack_linear", &pack, nb::arg("pool"), nb::arg("shape"), nb::arg("sources"), nb::arg("bias").none(),
        nb::arg("out"), "sources: (address, rows, bytes a row, dtype), stacked.");
  m.def("unpack_rows", &unpack_rows, nb::arg("shape"), nb::arg("packed"), nb::arg("rows"), nb::arg("out"));
  m.def("expand_rows", &expand_rows, nb::arg("dtype"), nb::arg("rows"), nb::arg("out"),
        "Rows of a file's tensor in float32, with GGML's arithmetic.");
  m.def("source_block", &source_block, nb::arg("dtype"), "(values, bytes) of a block of a file's type.");
  m.def("linear", &run_linear, nb::arg("isa"), nb::arg("pool"), nb::arg("shape"), nb::arg("packed"), nb::arg("x"),
        nb::arg("index").none(), nb::arg("norm_weight").none(), nb::arg("eps"), nb::arg("out"), nb::arg("ending"),
        nb::arg("act"), nb::arg("alpha"), nb::arg("softcap"));
  m.def("linear_kernel", &kernel_of, nb::arg("isa"), nb::arg("shape"), nb::arg("m"),
        "For m rows: the instruction that multiplies, and the rows and channels that it takes at once.");
  m.def("time_linear", &time_linear, nb::arg("isa"), nb::arg("pool"), nb::arg("shape"), nb::arg("copies"),
        nb::arg("num_copies"), nb::arg("m"), nb::arg("rounds"),
        "Seconds of a product of m rows; copies: packed weights, each at a multiple of 4096 bytes.");
  m.def("measure_stream", &measure_stream, nb::arg("isa"), nb::arg("pool"), nb::arg("memory"), nb::arg("repeats"),
        "Bytes a second of reading `memory` once, all threads together.");
  m.def("measure_peak", &measure_peak, nb::arg("isa"), nb::arg("pool"), nb::arg("dtype"), nb::arg("repeats"),
        "Operations a second on registers alone, all threads together.");
}

}  // namespace maitred