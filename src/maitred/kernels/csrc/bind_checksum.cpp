#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "checksum.h"

namespace nb = nanobind;

namespace maitred {

void bind_checksum(nb::module_& m) {
  using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "checksum",
      [](ThreadPool& pool, const Bytes& data) {
        nb::gil_scoped_release released;
        return checksum(pool, data.data(), static_cast<int64_t>(data.shape(0)));
      },
      nb::arg("pool"), nb::arg("data"), "64 bits that change with any word of the bytes; the same for any pool.");
}

}  // namespace maitred
