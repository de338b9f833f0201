// The sampler for Python: rows of logits and each row's settings as arrays, changes as tuples of arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sampler.h"

namespace nb = nanobind;

namespace maitred {
namespace {

using Logits = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Settings = nb::ndarray<const double, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logprobs = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

Floats floats_of(nb::handle value, size_t count) {
  Floats floats = nb::cast<Floats>(value);
  if (floats.shape(0) != count) throw std::invalid_argument("values and ids of unequal number");
  return floats;
}

// (mask or None, allowed or None, banned, bias ids, bias, repetition, known, frequency, presence, output, counts). The
// arrays belong to the tuple, which lives through the call.
LogitChanges changes_of(const nb::tuple& fields, int64_t vocab_size) {
  if (fields.size() != 11) throw std::invalid_argument("changes of a row are a tuple of 11");
  LogitChanges c;
  if (!fields[0].is_none()) {
    const Words mask = nb::cast<Words>(fields[0]);
    if (static_cast<int64_t>(mask.shape(0)) < (vocab_size + 31) / 32)
      throw std::invalid_argument("a mask has too few words");
    c.mask = mask.data();
  }
  if (!fields[1].is_none()) {
    const Ids allowed = nb::cast<Ids>(fields[1]);
    c.only_allowed = true;
    c.allowed_ids = allowed.data();
    c.num_allowed = static_cast<int64_t>(allowed.shape(0));
  }
  const Ids banned = nb::cast<Ids>(fields[2]), biased = nb::cast<Ids>(fields[3]);
  const Ids known = nb::cast<Ids>(fields[6]), output = nb::cast<Ids>(fields[9]);
  c.banned_ids = banned.data();
  c.num_banned = static_cast<int64_t>(banned.shape(0));
  c.bias_ids = biased.data();
  c.bias = floats_of(fields[4], biased.shape(0)).data();
  c.num_bias = static_cast<int64_t>(biased.shape(0));
  c.repetition = nb::cast<float>(fields[5]);
  c.known_ids = known.data();
  c.num_known = static_cast<int64_t>(known.shape(0));
  c.frequency = nb::cast<float>(fields[7]);
  c.presence = nb::cast<float>(fields[8]);
  c.output_ids = output.data();
  c.output_counts = floats_of(fields[10], output.shape(0)).data();
  c.num_output = static_cast<int64_t>(output.shape(0));
  return c;
}

// For changes of which an id is not in the vocabulary.
void throw_outside(const LogitChanges& c, int64_t vocab_size) {
  const std::pair<const int64_t*, int64_t> lists[] = {{c.allowed_ids, c.num_allowed},
                                                      {c.banned_ids, c.num_banned},
                                                      {c.bias_ids, c.num_bias},
                                                      {c.known_ids, c.num_known},
                                                      {c.output_ids, c.num_output}};
  for (const auto& [ids, count] : lists)
    for (int64_t i = 0; i < count; ++i)
      if (ids[i] < 0 || ids[i] >= vocab_size)
        throw std::invalid_argument("token " + std::to_string(ids[i]) + " of a vocabulary of " +
                                    std::to_string(vocab_size));
}

void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void sample(Sampler& sampler, const Logits& logits, const Settings& settings, const nb::list& changes,
            const Ints& num_top, const Ints& tokens, const Ints& faults, const Table& top_ids, const Logprobs& logprobs,
            const Longs& ranks) {
  const size_t num_rows = logits.shape(0);
  const int64_t vocab_size = static_cast<int64_t>(logits.shape(1));
  check(vocab_size > 0 && logits.stride(1) == 1, "rows of logits must be contiguous, and not empty");
  check(settings.shape(0) == num_rows && changes.size() == num_rows && num_top.shape(0) == num_rows &&
            tokens.shape(0) == num_rows && faults.shape(0) == num_rows && top_ids.shape(0) == num_rows &&
            logprobs.shape(0) == num_rows && ranks.shape(0) == num_rows,
        "settings, changes and outputs must have one row for each row of logits");
  check(logprobs.shape(1) == top_ids.shape(1) + 1, "logprobs must have one column more than top_ids");
  std::vector<LogitChanges> all_changes(num_rows);
  std::vector<SampleRow> rows(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    check(num_top(r) <= static_cast<int64_t>(top_ids.shape(1)), "num_top is above the columns of top_ids");
    const bool has_changes = !changes[r].is_none();
    if (has_changes) all_changes[r] = changes_of(nb::cast<nb::tuple>(changes[r]), vocab_size);
    rows[r] = SampleRow{logits.data() + static_cast<int64_t>(r) * logits.stride(0),
                        has_changes ? &all_changes[r] : nullptr,
                        settings(r, 0),
                        static_cast<int64_t>(settings(r, 1)),
                        settings(r, 2),
                        settings(r, 3),
                        settings(r, 4),
                        num_top(r),
                        top_ids.data() + r * top_ids.shape(1),
                        logprobs.data() + r * logprobs.shape(1),
                        ranks.data() + r,
                        0,
                        SampleFault::none};
  }
  {
    nb::gil_scoped_release released;
    sampler.sample(rows.data(), static_cast<int>(num_rows), vocab_size);
  }
  for (size_t r = 0; r < num_rows; ++r) {
    if (rows[r].fault == SampleFault::outside) throw_outside(all_changes[r], vocab_size);
    tokens(r) = rows[r].token;
    faults(r) = static_cast<int32_t>(rows[r].fault);
  }
}

}  // namespace

void bind_sampler(nb::module_& m) {
  nb::class_<Sampler>(m, "Sampler")
      .def(
          "__init__",
          [](Sampler* self, ThreadPool& pool, const std::string& isa) {
            new (self) Sampler(pool, isa == "auto" ? default_isa() : isa_named(isa));
          },
          nb::arg("pool"), nb::arg("isa") = "auto", nb::keep_alive<1, 2>())
      .def("sample", &sample, nb::arg("logits").noconvert(), nb::arg("settings"), nb::arg("changes"),
           nb::arg("num_top"), nb::arg("tokens").noconvert(), nb::arg("faults").noconvert(),
           nb::arg("top_ids").noconvert(), nb::arg("logprobs").noconvert(), nb::arg("ranks").noconvert(),
           "One token a row. settings: temperature, top_k, top_p, min_p, share of the draw.");
}

}  // namespace maitred
