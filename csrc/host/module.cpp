// The module _host: work on the host that Python is too slow for. There is no torch in it.

#include <pybind11/pybind11.h>

namespace py = pybind11;

void add_finite(py::module_& m);
void add_launches(py::module_& m);
void add_samples(py::module_& m);
void add_targets(py::module_& m);

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side C++ of fastmp: samples in their order, looks at targets and numbers, launches of Triton's kernels.";
  add_finite(m);
  add_launches(m);
  add_samples(m);
  add_targets(m);
}
