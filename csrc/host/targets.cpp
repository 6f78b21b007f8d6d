// Checks and counts of a loss's targets on the host, for fastmp/ops/cross_entropy.py.

#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;

namespace {

int64_t first_outside(uintptr_t address, int64_t count, int64_t size, int64_t ignored) {
  const auto* ids = reinterpret_cast<const int64_t*>(address);
  const auto is_outside = [&](int64_t id) {
    return static_cast<uint64_t>(id) >= static_cast<uint64_t>(size) && id != ignored;
  };
  bool any = false;  // no branch in the loop, so it vectorises
  for (int64_t i = 0; i < count; ++i) any |= is_outside(ids[i]);
  if (!any) return -1;
  for (int64_t i = 0;; ++i)
    if (is_outside(ids[i])) return i;
}

int64_t count_of(uintptr_t address, int64_t count, int64_t value) {
  const auto* ids = reinterpret_cast<const int64_t*>(address);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) found += ids[i] == value;
  return found;
}

}  // namespace

void add_targets(py::module_& m) {
  m.def("first_outside", &first_outside, py::arg("address"), py::arg("count"), py::arg("size"), py::arg("ignored"),
        "Return the index of the first of `count` int64 at `address` that is not in [0, size) nor `ignored`, or -1.");
  m.def("count_of", &count_of, py::arg("address"), py::arg("count"), py::arg("value"),
        "Return how many of `count` int64 at `address` equal `value`.");
}
