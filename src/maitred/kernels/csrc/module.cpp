// The Python module maitred.kernels._native: one bind function an area, each in its own file.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.h"
#include "team.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace maitred {
void bind_linear(nb::module_&);
void bind_program(nb::module_& m);
void bind_checksum(nb::module_&);
void bind_kv_pool(nb::module_&);
void bind_sampler(nb::module_&);
}  // namespace maitred

namespace {

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (maitred::Isa isa : maitred::available_isas()) names.emplace_back(maitred::isa_name(isa));
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // interpreter exit drops modules in any order
  m.def("available_isas", &isa_names, "Instruction sets of this processor and build, worst first.");
  m.def(
      "default_isa", [] { return std::string(maitred::isa_name(maitred::default_isa())); },
      "MAITRED_ISA, else the best available.");
  nb::class_<maitred::ThreadPool>(m, "ThreadPool")
      .def(nb::init<int>(), nb::arg("num_threads"))
      .def_prop_ro("num_threads", &maitred::ThreadPool::num_threads)
      .def_prop_ro("num_used", &maitred::ThreadPool::num_used)
      .def("use", &maitred::ThreadPool::use, nb::arg("num_threads"), nb::call_guard<nb::gil_scoped_release>(),
           "Only so many of them take part from now on; the others sleep.")
      .def("bind", &maitred::ThreadPool::bind, nb::arg("cpus"),
           "Binds thread i (0 is the caller) to processor cpus[i]; false where that cannot be.");
  nb::class_<maitred::Team>(m, "Team", "A rank's place among processes that run a program together; see csrc/team.h.")
      .def(nb::init<int, int64_t, int, int, int>(), nb::arg("fd"), nb::arg("num_bytes"), nb::arg("rank"),
           nb::arg("num_ranks"), nb::arg("threads_of_each"))
      .def("stop", &maitred::Team::stop, "Of rank 0: the others end.")
      .def("lose", &maitred::Team::lose, nb::arg("why"), "Nobody waits for a rank that ended: what runs raises.")
      .def_prop_ro(
          "num_taken", [](maitred::Team& self) { return self.memory().num_taken(); },
          "Bytes of the shared memory that are in use.");
  maitred::bind_linear(m);
  maitred::bind_program(m);
  maitred::bind_checksum(m);
  maitred::bind_kv_pool(m);
  maitred::bind_sampler(m);
}
