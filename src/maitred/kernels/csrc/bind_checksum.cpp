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
  using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  using Sums = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  m.def(
      "checksum_rows",
      [](ThreadPool& pool, const Rows& rows, const Sums& sums) {
        if (sums.shape(0) != rows.shape(0)) throw nb::value_error("a checksum for each row");
        nb::gil_scoped_release released;  // once: taking it back for each row would wait for a busy thread each time
        const auto size = static_cast<int64_t>(rows.shape(1));
        for (size_t row = 0; row < rows.shape(0); ++row)
          sums.data()[row] = checksum(pool, rows.data() + static_cast<int64_t>(row) * size, size);
      },
      nb::arg("pool"), nb::arg("rows"), nb::arg("sums"), "The checksum of each row of `rows` into `sums`.");
}

}  // namespace maitred
