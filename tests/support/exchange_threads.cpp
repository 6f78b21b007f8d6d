// Ranks on threads that exchange rows through csrc/cpu/exchange.cpp, which is compiled into this program with the
// thread sanitizer: it reports an access that nothing orders behind another rank's, also where the processor at hand
// keeps them in order. See tests/test_sanitize.py.
//
// Exits with status 1 where a rank has got other numbers than were sent to it.
#include "cpu/exchange.cpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

namespace {

using namespace fastmp;

// The peer_offsets between two ranks' epochs, counts and rows are the same where each rank has so many bytes of each.
constexpr int64_t kRanks = 4, kExperts = 64, kCapacity = 4, kCols = 64;
constexpr int64_t kInts = 2 * kRanks * kExperts;
static_assert(kInts == 2 * kCapacity * kCols && kRanks <= kCapacity);
constexpr double kTimeout = 60.0;

Tensor zeros(IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
  Tensor out = torch::stable::empty(sizes, dtype);
  std::memset(out.mutable_data_ptr(), 0, out.numel() * out.element_size());
  return out;
}

template <class T>
T* values(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

struct Memory {
  Tensor epochs = zeros({kRanks * kInts}, ScalarType::Int);
  Tensor counts = zeros({kRanks * 2, kRanks, kExperts}, ScalarType::Int);
  Tensor rows = zeros({kRanks * 2, kCapacity, kCols}, ScalarType::Float);
};

// A rank's views of the memory, and what it sends.
struct Rank {
  int64_t rank;
  Tensor epochs, counts, rows;
  const Tensor peer_offsets = zeros({1, kRanks}, ScalarType::Long);
  const Tensor where = zeros({1, kRanks}, ScalarType::Int), filled = zeros({1}, ScalarType::Int);
  const Tensor own = zeros({kExperts}, ScalarType::Int), x = zeros({1, kCols}, ScalarType::Float);
  const Tensor given = zeros({kCapacity, kCols}, ScalarType::Float);

  Rank(Memory& memory, int64_t rank)
      : rank(rank),
        epochs(torch::stable::narrow(memory.epochs, 0, rank * kInts, kRanks + 1)),
        counts(torch::stable::narrow(memory.counts, 0, rank * 2, 2)),
        rows(torch::stable::narrow(memory.rows, 0, rank * 2, 2)) {
    for (int64_t other = 0; other < kRanks; ++other) {
      values<int64_t>(peer_offsets)[other] = (other - rank) * kInts * int64_t{sizeof(int32_t)};
      values<int32_t>(where)[other] = static_cast<int32_t>(other * kCapacity + rank);
    }
    *values<int32_t>(filled) = kRanks;
  }

  // Each of these hands `number` plus this rank's to all others, and returns a row from each.
  Tensor by_counts(int32_t number) {
    std::fill_n(values<int32_t>(own), own.numel(), number + static_cast<int32_t>(rank));
    return exchange_counts(own, epochs, counts, peer_offsets, rank, kTimeout);
  }

  Tensor by_push(int32_t number) {
    std::fill_n(values<float>(x), x.numel(), static_cast<float>(number + rank));
    exchange_push(x, where, std::nullopt, std::nullopt, epochs, rows, peer_offsets);
    barrier(epochs, peer_offsets, rank, kTimeout);
    return exchange_take(rows, epochs, filled, rows.size(2));
  }

  Tensor by_pull(int32_t number) {
    std::fill_n(values<float>(given), given.numel(), static_cast<float>(number + rank));
    exchange_give(given, filled, epochs, rows);
    barrier(epochs, peer_offsets, rank, kTimeout);
    return std::get<1>(exchange_pull(rows, epochs, peer_offsets, where, std::nullopt, true));
  }
};

template <class T>
void check(const Tensor& received, int32_t number, int64_t count) {
  for (int64_t other = 0; other < kRanks; ++other) {
    const T* from = values<T>(received) + other * count;
    if (std::count(from, from + count, static_cast<T>(number + other)) == count) continue;
    std::fprintf(stderr, "exchange %d: wrong numbers of rank %d\n", number / int(kRanks), int(other));
    std::exit(1);
  }
}

void run(Memory& memory, int64_t number, int32_t exchanges) {
  Rank rank(memory, number);
  std::minstd_rand kinds;  // the same on all ranks, in any order: each kind comes behind each
  for (int32_t exchange = 0; exchange < exchanges; ++exchange) {
    const int32_t first = exchange * static_cast<int32_t>(kRanks);
    switch (kinds() % 3) {
      case 0: check<int32_t>(rank.by_counts(first), first, kExperts); break;
      case 1: check<float>(rank.by_push(first), first, kCols); break;
      default: check<float>(rank.by_pull(first), first, kCols);
    }
  }
}

}  // namespace

int main() {
  Memory memory;
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < kRanks; ++rank) ranks.emplace_back(run, std::ref(memory), rank, 500);
  for (std::thread& each : ranks) each.join();
}
