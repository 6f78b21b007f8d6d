// Sample order of a training run, bit-identical to its definition in fastmp/training/data/sampling.py.
//
// Each epoch permutes its positions by a Feistel network over splitmix64, with cycle walking to the number of samples.
// There is no table: a microbatch costs about a microsecond for any data set, and resuming at any sample is free.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

namespace py = pybind11;

namespace {

constexpr int kRounds = 8;

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// A pseudorandom permutation of [0, size).
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key) : size_(size) {
    int bits = 0;
    while (bits < 63 && ((size - 1) >> bits) != 0) ++bits;
    half_ = bits < 2 ? 1 : (bits + 1) / 2;
    for (int r = 0; r < kRounds; ++r) round_keys_[r] = mix(key + 1 + r);
  }

  uint64_t operator()(uint64_t x) const {
    do x = network(x);
    while (x >= size_);
    return x;
  }

 private:
  uint64_t network(uint64_t x) const {
    uint64_t left = x >> half_, right = x & ((1ull << half_) - 1);
    for (uint64_t round_key : round_keys_) {
      const uint64_t next = left ^ (mix(right ^ round_key) >> (64 - half_));
      left = right;
      right = next;
    }
    return (left << half_) | right;
  }

  uint64_t size_;
  int half_;
  std::array<uint64_t, kRounds> round_keys_;
};

py::array_t<int64_t> sample_starts(uint64_t seed, int64_t first, int64_t count, int64_t num_tokens, int64_t seq_len) {
  if (first < 0 || count < 0 || seq_len < 1 || num_tokens <= seq_len)
    throw std::invalid_argument("sample_starts: first or count is negative, or the tokens do not hold one sample");
  py::array_t<int64_t> result(count);
  int64_t* out = result.mutable_data();
  py::gil_scoped_release unlocked;
  const int64_t size = num_tokens / seq_len;
  for (int64_t done = 0; done < count;) {
    const int64_t epoch = (first + done) / size, begin = (first + done) % size;
    const int64_t here = std::min(count - done, size - begin);
    const uint64_t key = mix(mix(seed) + static_cast<uint64_t>(epoch));
    const uint64_t phase = mix(key) % static_cast<uint64_t>(num_tokens);
    const Permutation permutation(size, key);
    for (int64_t i = 0; i < here; ++i)
      out[done + i] = static_cast<int64_t>((phase + permutation(begin + i) * seq_len) % num_tokens);
    done += here;
  }
  return result;
}

}  // namespace

void add_samples(py::module_& m) {
  m.def("sample_starts", &sample_starts, py::arg("seed"), py::arg("first"), py::arg("count"), py::arg("num_tokens"),
        py::arg("seq_len"), "First tokens of samples first .. first + count - 1, int64.");
}
