// is_finite for checkpoints (fastmp/training/checkpoint/tensor_files.py): single-threaded, so that it leaves the cores
// to the training that runs at the same time, which torch's isfinite would not.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace {

// A number is finite unless its exponent has all bits set.
template <typename Bits>
bool all_finite(const char* bytes, size_t size, Bits exponent) {
  constexpr size_t kBlock = 4096;
  const size_t count = size / sizeof(Bits);
  Bits block[kBlock];
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t some = std::min(kBlock, count - first);
    std::memcpy(block, bytes + first * sizeof(Bits), some * sizeof(Bits));  // unaligned
    bool any = false;                                                       // no branch in the loop, so it vectorises
    for (size_t i = 0; i < some; ++i) any |= (block[i] & exponent) == exponent;
    if (any) return false;
  }
  return true;
}

bool is_finite(const py::buffer& numbers, const std::string& dtype) {
  const py::buffer_info info = numbers.request();
  const auto* bytes = static_cast<const char*>(info.ptr);
  const size_t size = static_cast<size_t>(info.size * info.itemsize);
  const py::gil_scoped_release release;
  if (dtype == "F64") return all_finite<uint64_t>(bytes, size, 0x7FF0000000000000u);
  if (dtype == "F32") return all_finite<uint32_t>(bytes, size, 0x7F800000u);
  if (dtype == "BF16") return all_finite<uint16_t>(bytes, size, 0x7F80u);
  if (dtype == "F16") return all_finite<uint16_t>(bytes, size, 0x7C00u);
  throw std::invalid_argument("is_finite: no floating-point dtype " + dtype);
}

}  // namespace

void add_finite(py::module_& m) {
  m.def("is_finite", &is_finite, py::arg("numbers"), py::arg("dtype"),
        "Return True if all numbers in a contiguous buffer are finite; dtype is F64, F32, BF16 or F16.");
}
