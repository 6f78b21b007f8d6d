// Checks and counts of a loss's targets on the host, for fastmp/ops/cross_entropy.py.

#include <pybind11/pybind11.h>

#include <cstdint>

namespace py = pybind11;

namespace {

int64_t count_targets(uintptr_t address, int64_t count, int64_t size, int64_t ignored) {
  const auto* ids = reinterpret_cast<const int64_t*>(address);
  const auto is_outside = [&](int64_t id) {
    return static_cast<uint64_t>(id) >= static_cast<uint64_t>(size) && id != ignored;
  };
  bool any = false;  // no branch in the loop, so it vectorises
  int64_t counted = 0;
  for (int64_t i = 0; i < count; ++i) {
    any |= is_outside(ids[i]);
    counted += ids[i] != ignored;
  }
  if (!any) return counted;
  for (int64_t i = 0;; ++i)
    if (is_outside(ids[i])) return -1 - i;
}

}  // namespace

void add_targets(py::module_& m) {
  m.def("count_targets", &count_targets, py::arg("address"), py::arg("count"), py::arg("size"), py::arg("ignored"),
        "Return how many of `count` int64 at `address` are not `ignored`; -1 - i if the i-th, the first, is neither in "
        "[0, size) nor `ignored`.");
}
