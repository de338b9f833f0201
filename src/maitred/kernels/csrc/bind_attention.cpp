// The KV pool for Python, and attention of one layer by itself: for tests, benchmarks and tools. The program of a model
// calls the same functions without Python between them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <stdexcept>

#include "attention.h"
#include "kv_pool.h"
#include "qkv.h"

namespace nb = nanobind;

namespace maitred {
namespace {

using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

DType kv_dtype_named(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::int8;
  throw std::invalid_argument("a KV cache of dtype '" + name + "'; choose one of float32, bfloat16, int8");
}

std::vector<float> copy_of(const Floats1& array) { return {array.data(), array.data() + array.shape(0)}; }

// One kind of attention layer over a pool, with its buffers.
class AttentionLayer {
 public:
  AttentionLayer(KVPool& pool, ThreadPool& threads, const std::string& isa, int num_heads, float scale, int window,
                 float softcap, const Floats1& sinks, int norm, const Floats1& q_norm, const Floats1& k_norm, float eps,
                 const Floats1& inverse_frequencies, float attention_factor)
      : pool_(pool),
        threads_(threads),
        isa_(isa == "auto" ? default_isa() : isa_named(isa)),
        plan_(pool.layout(), num_heads, window, threads.num_threads()),
        scratch_(pool.layout(), threads.num_threads()),
        sinks_(copy_of(sinks)),
        q_norm_(copy_of(q_norm)),
        k_norm_(copy_of(k_norm)),
        frequencies_(copy_of(inverse_frequencies)),
        rope_{frequencies_.data(), static_cast<int>(frequencies_.size()), attention_factor},
        qkv_{0, num_heads, static_cast<QKNorm>(norm), q_norm_.data(), k_norm_.data(), eps, rope_.num_pairs},
        attention_{0, num_heads, scale, softcap, sinks_.empty() ? nullptr : sinks_.data()} {
    if (!(scale > 0.0f)) throw std::invalid_argument("a scale of " + std::to_string(scale) + "; it must be positive");
  }

  // The step that the next calls are about.
  void begin(const Ints& positions, const Ints& first_tokens, const Ints& block_tables, const Ints& first_blocks) {
    positions_.assign(positions.data(), positions.data() + positions.shape(0));
    first_tokens_.assign(first_tokens.data(), first_tokens.data() + first_tokens.shape(0));
    block_tables_.assign(block_tables.data(), block_tables.data() + block_tables.shape(0));
    first_blocks_.assign(first_blocks.data(), first_blocks.data() + first_blocks.shape(0));
    step_ = {static_cast<int>(positions_.size()),
             static_cast<int>(first_tokens_.size()) - 1,
             0,
             nullptr,
             positions_.data(),
             first_tokens_.data(),
             block_tables_.data(),
             first_blocks_.data(),
             nullptr};
    plan_.build(step_);
    table_.resize(positions_.size() * 2 * frequencies_.size());
    const std::size_t bytes = positions_.size() * qkv_.num_heads * query_head_bytes(pool_.layout());
    if (!queries_ || static_cast<std::size_t>(queries_->num_bytes()) < bytes) queries_.reset(new Pages(bytes));
    WorkCounter counter;
    threads_.run([&](const Worker& worker) { rope_table(rope_, step_, table_.data(), counter, worker); });
  }

  void qkv(int layer, const Floats2& rows) {
    check_layer(layer);
    const KVLayout& layout = pool_.layout();
    const std::size_t width = static_cast<std::size_t>(qkv_.num_heads + 2 * layout.num_kv_heads) * layout.head_dim;
    check_shape("q, k, v rows", rows.shape(0), rows.shape(1), width);
    QKVOp op = qkv_;
    op.layer = layer;
    WorkCounter counter;
    nb::gil_scoped_release release;
    threads_.run([&](const Worker& worker) {
      maitred::qkv(op, pool_, step_, rows.data(), static_cast<int64_t>(width), table_.empty() ? nullptr : table_.data(),
                   queries_->begin(), counter, worker, isa_);
    });
  }

  // Attention of `num_layers` layers, one after the other as a model runs them, all with the last queries.
  void attend(int first_layer, int num_layers, FloatsOut out) {
    if (num_layers < 1) throw std::invalid_argument("attention over no layer");
    check_layer(first_layer);
    check_layer(first_layer + num_layers - 1);
    check_shape("output rows", out.shape(0), out.shape(1),
                static_cast<std::size_t>(attention_.num_heads) * pool_.layout().head_dim);
    std::vector<WorkCounter> counters(static_cast<std::size_t>(num_layers));
    float* rows = out.data();
    const int64_t stride = static_cast<int64_t>(out.shape(1));
    nb::gil_scoped_release release;
    threads_.run([&](const Worker& worker) {
      AttentionOp op = attention_;
      for (int i = 0; i < num_layers; ++i) {
        op.layer = first_layer + i;
        attention(op, plan_, scratch_, pool_, step_, queries_->begin(), rows, stride, counters[i], worker, isa_);
        worker.meet();
      }
    });
  }

  int num_units() const { return static_cast<int>(plan_.units().size()); }

 private:
  void check_layer(int layer) const {
    if (layer < 0 || layer >= pool_.num_layers())
      throw std::out_of_range("layer " + std::to_string(layer) + " of a KV pool of " +
                              std::to_string(pool_.num_layers()));
  }
  void check_shape(const char* what, std::size_t rows, std::size_t width, std::size_t wanted_width) const {
    if (rows != positions_.size() || width != wanted_width)
      throw std::invalid_argument(std::string(what) + " of shape [" + std::to_string(rows) + ", " +
                                  std::to_string(width) + "]; the step has [" + std::to_string(positions_.size()) +
                                  ", " + std::to_string(wanted_width) + "]");
  }

  KVPool& pool_;
  ThreadPool& threads_;
  Isa isa_;
  AttentionPlan plan_;
  AttentionScratch scratch_;
  std::vector<float> sinks_, q_norm_, k_norm_, frequencies_, table_;
  RopeOp rope_;
  QKVOp qkv_;
  AttentionOp attention_;
  std::vector<int32_t> positions_, first_tokens_, block_tables_, first_blocks_;
  StepRows step_{};
  std::unique_ptr<Pages> queries_;
};

// The i-th of `blocks` to or from row i of an array of whole blocks; each thread takes blocks in turn.
template <typename Copy>
void copy_each(ThreadPool& threads, int num_blocks, const Copy& copy) {
  WorkCounter counter;
  threads.run([&](const Worker&) {
    for (int i; (i = counter.take()) < num_blocks;) copy(i);
  });
}

void check_rows(const KVPool& pool, const std::vector<int>& blocks, const std::vector<int>& rows, std::size_t num_rows,
                std::size_t row_bytes) {
  if (static_cast<int64_t>(row_bytes) != pool.bytes_per_block())
    throw std::invalid_argument("rows of " + std::to_string(row_bytes) + " bytes; a block has " +
                                std::to_string(pool.bytes_per_block()));
  if (blocks.size() != rows.size())
    throw std::invalid_argument(std::to_string(blocks.size()) + " blocks and " + std::to_string(rows.size()) + " rows");
  for (int block : blocks) pool.check_block(block);
  for (int row : rows)
    if (row < 0 || static_cast<std::size_t>(row) >= num_rows)
      throw std::out_of_range("row " + std::to_string(row) + " of " + std::to_string(num_rows));
}

void read_blocks(const KVPool& pool, const std::vector<int>& blocks, BytesOut out, const std::vector<int>& rows,
                 ThreadPool& threads) {
  check_rows(pool, blocks, rows, out.shape(0), out.shape(1));
  uint8_t* bytes = out.data();
  nb::gil_scoped_release release;
  copy_each(threads, static_cast<int>(blocks.size()),
            [&](int i) { pool.read_block(blocks[i], bytes + rows[i] * pool.bytes_per_block()); });
}

void write_blocks(KVPool& pool, const std::vector<int>& blocks, const Bytes2& in, const std::vector<int>& rows,
                  ThreadPool& threads) {
  check_rows(pool, blocks, rows, in.shape(0), in.shape(1));
  const uint8_t* bytes = in.data();
  nb::gil_scoped_release release;
  copy_each(threads, static_cast<int>(blocks.size()),
            [&](int i) { pool.write_block(blocks[i], bytes + rows[i] * pool.bytes_per_block()); });
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> block_view(nb::handle self, int layer, int block) {
  const KVPool& pool = nb::cast<const KVPool&>(self);
  pool.check_block(block);
  if (layer < 0 || layer >= pool.num_layers())
    throw std::out_of_range("layer " + std::to_string(layer) + " of a KV pool of " + std::to_string(pool.num_layers()));
  return {pool.block(layer, block), {static_cast<std::size_t>(pool.layout().block_bytes)}, self};
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<KVPool>(m, "KVPool")
      .def(
          "__init__",
          [](KVPool* self, const std::string& dtype, int num_layers, int num_blocks, int block_size, int num_kv_heads,
             int head_dim) {
            if (head_dim > kLargestHead)
              throw std::invalid_argument("a head size of " + std::to_string(head_dim) + "; the largest is " +
                                          std::to_string(kLargestHead));
            new (self)
                KVPool(kv_layout(kv_dtype_named(dtype), num_kv_heads, head_dim, block_size), num_layers, num_blocks);
          },
          nb::kw_only(), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("num_blocks"), nb::arg("block_size"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"))
      .def_prop_ro("num_layers", &KVPool::num_layers)
      .def_prop_ro("num_blocks", &KVPool::num_blocks)
      .def_prop_ro("num_bytes", &KVPool::num_bytes)
      .def_prop_ro("bytes_per_block", &KVPool::bytes_per_block)
      .def("touch", &KVPool::touch, nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "copy_blocks",
          [](KVPool& self, const std::vector<std::pair<int, int>>& copies) {
            for (const auto& [source, target] : copies) self.copy_block(source, target);
          },
          nb::arg("copies"))
      .def("read_blocks", &read_blocks, nb::arg("blocks"), nb::arg("out"), nb::arg("rows"), nb::arg("threads"))
      .def("write_blocks", &write_blocks, nb::arg("blocks"), nb::arg("rows_of_blocks"), nb::arg("rows"),
           nb::arg("threads"))
      .def("block_view", &block_view, nb::arg("layer"), nb::arg("block"));
  m.def(
      "kv_bytes_per_block",
      [](const std::string& dtype, int num_layers, int block_size, int num_kv_heads, int head_dim) {
        return num_layers * kv_layout(kv_dtype_named(dtype), num_kv_heads, head_dim, block_size).block_bytes;
      },
      nb::kw_only(), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("block_size"), nb::arg("num_kv_heads"),
      nb::arg("head_dim"));
  nb::class_<AttentionLayer>(m, "AttentionLayer")
      .def(nb::init<KVPool&, ThreadPool&, const std::string&, int, float, int, float, const Floats1&, int,
                    const Floats1&, const Floats1&, float, const Floats1&, float>(),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::arg("pool"), nb::arg("threads"), nb::kw_only(),
           nb::arg("isa"), nb::arg("num_heads"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
           nb::arg("sinks"), nb::arg("norm"), nb::arg("q_norm"), nb::arg("k_norm"), nb::arg("eps"),
           nb::arg("inverse_frequencies"), nb::arg("attention_factor"))
      .def("begin", &AttentionLayer::begin, nb::arg("positions"), nb::arg("first_tokens"), nb::arg("block_tables"),
           nb::arg("first_blocks"))
      .def("qkv", &AttentionLayer::qkv, nb::arg("layer"), nb::arg("rows"))
      .def("attend", &AttentionLayer::attend, nb::arg("first_layer"), nb::arg("num_layers"), nb::arg("out"))
      .def_prop_ro("num_units", &AttentionLayer::num_units);
}

}  // namespace maitred
