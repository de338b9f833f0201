// maitred.kernels._native.KVPool: allocation, copies of blocks, and views of them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "kv_pool.h"
#include "qkv.h"

namespace nb = nanobind;

namespace maitred {
namespace {

using Bytes2 = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using BytesOut = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

DType kv_dtype_named(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "int8") return DType::int8;
  if (name == "int4") return DType::q4_1;
  throw std::invalid_argument("a KV cache of dtype '" + name + "'; choose one of float32, bfloat16, int8, int4");
}

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

using Bytes1 = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes1Out = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_part_bytes(const KVPool& pool, int num_layers, std::size_t num_blocks, std::size_t num_bytes) {
  const int64_t wanted = num_layers * static_cast<int64_t>(num_blocks) * pool.layout().block_bytes;
  if (static_cast<int64_t>(num_bytes) != wanted)
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes; these layers of these blocks have " +
                                std::to_string(wanted));
}

void read_part(const KVPool& pool, int first_layer, int num_layers, const std::vector<int>& blocks, Bytes1Out out) {
  check_part_bytes(pool, num_layers, blocks.size(), out.shape(0));
  uint8_t* bytes = out.data();
  nb::gil_scoped_release release;
  pool.read_part(first_layer, num_layers, blocks, bytes);
}

void write_part(KVPool& pool, int first_layer, int num_layers, const std::vector<int>& blocks, const Bytes1& in) {
  check_part_bytes(pool, num_layers, blocks.size(), in.shape(0));
  const uint8_t* bytes = in.data();
  nb::gil_scoped_release release;
  pool.write_part(first_layer, num_layers, blocks, bytes);
}

nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> block_view(nb::handle self, int layer, int block) {
  const KVPool& pool = nb::cast<const KVPool&>(self);
  pool.check_block(block);
  if (layer < 0 || layer >= pool.num_layers())
    throw std::out_of_range("layer " + std::to_string(layer) + " of a KV pool of " + std::to_string(pool.num_layers()));
  return {pool.block(layer, block), {static_cast<std::size_t>(pool.layout().block_bytes)}, self};
}

}  // namespace

void bind_kv_pool(nb::module_& m) {
  nb::class_<KVPool>(m, "KVPool")
      .def(
          "__init__",
          [](KVPool* self, const std::string& dtype, int num_layers, int num_blocks, int block_size, int num_kv_heads,
             int head_dim, int latent_dim, int64_t page_bytes, const std::vector<std::tuple<int, int, int64_t>>& places,
             Team* team) {
            SharedMemory* const shared = team == nullptr ? nullptr : &team->memory();
            const DType type = kv_dtype_named(dtype);
            std::vector<KVPlace> found;
            for (const auto& [heads, size, offset] : places) {
              found.push_back({kv_layout(type, heads, size, block_size), offset});
              head_dim = std::max(head_dim, size);
            }
            if (head_dim > kLargestHead)
              throw std::invalid_argument("a head size of " + std::to_string(head_dim) + "; the largest is " +
                                          std::to_string(kLargestHead));
            const KVLayout layout = kv_layout(type, num_kv_heads, head_dim, block_size, latent_dim);
            if (found.empty())
              new (self) KVPool(layout, num_layers, num_blocks, shared);
            else
              new (self) KVPool(layout, page_bytes, std::move(found), num_blocks, shared);
          },
          nb::kw_only(), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("num_blocks"), nb::arg("block_size"),
          nb::arg("num_kv_heads"), nb::arg("head_dim"), nb::arg("latent_dim") = 0, nb::arg("page_bytes") = 0,
          nb::arg("places") = std::vector<std::tuple<int, int, int64_t>>(), nb::arg("team") = nb::none(),
          nb::keep_alive<1, 11>(),
          "places: of layers of unlike sizes in a page of page_bytes, each its K/V heads, their size and first byte.")
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
      .def("read_part", &read_part, nb::arg("first_layer"), nb::arg("num_layers"), nb::arg("blocks"), nb::arg("out"))
      .def("write_part", &write_part, nb::arg("first_layer"), nb::arg("num_layers"), nb::arg("blocks"), nb::arg("rows"))
      .def_prop_ro("layer_bytes", [](const KVPool& self) { return self.layout().block_bytes; })
      .def_prop_ro("progress",
                   [](const KVPool& self) {
                     const KVProgress progress = self.progress();
                     return std::make_pair(progress.num_runs, progress.num_layers);
                   })
      .def("block_view", &block_view, nb::arg("layer"), nb::arg("block"));
  m.def(
      "kv_bytes_per_block",
      [](const std::string& dtype, int num_layers, int block_size, int num_kv_heads, int head_dim, int latent_dim) {
        return num_layers *
               kv_layout(kv_dtype_named(dtype), num_kv_heads, head_dim, block_size, latent_dim).block_bytes;
      },
      nb::kw_only(), nb::arg("dtype"), nb::arg("num_layers"), nb::arg("block_size"), nb::arg("num_kv_heads"),
      nb::arg("head_dim"), nb::arg("latent_dim") = 0);
}

}  // namespace maitred
