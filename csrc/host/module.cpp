// The module _host: functions on the host that are too slow in Python. It does not use torch.

#include <pybind11/pybind11.h>

namespace py = pybind11;

void add_finite(py::module_& m);
void add_launches(py::module_& m);
void add_samples(py::module_& m);
void add_targets(py::module_& m);

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host-side C++ of fastmp: sample order, checks of targets and numbers, launches of Triton kernels.";
  add_finite(m);
  add_launches(m);
  add_samples(m);
  add_targets(m);
}
