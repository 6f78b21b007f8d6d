// The steps of an exchange over peers' memory on the CPU: rows that are copied, weighted and summed where they lie, in
// this process' memory or in maps that other processes share, and a barrier of epochs.
//
// Tokens are spread over the threads; a row belongs to one assignment, so it has one writer. A rank's signal pad is
// atomics that peers store to (release) and it waits for (acquire): writes before a signal are visible after it. Rows
// are made by the same code as those of permute.cpp, so sums have the same bits. The semantics are those of the
// references in fastmp/ops/exchange_reference.py.
#include "op.h"
#include "assignments.h"
#include "rows.h"
#include "simd.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <thread>
#include <tuple>
#include <vector>

namespace fastmp {

// Tokens [begin, end) with `num_slots` assignments each, whose rows of `num_cols` elements are in the half `rows`
// (capacity, row_pitch) of this rank's buffer, and at the same place of the peers', `peer_offsets[d * num_peers + p]`
// bytes further. y (token, slot, num_cols) has no gaps; it, `probs` and `dprobs` may be null. `tokens` are read by a
// push, written by a pull.
struct PeerRun {
  const int64_t* peer_offsets;
  const int32_t* where;
  const void* probs;
  void* rows;
  void* tokens;
  void* y;
  void* dprobs;
  int64_t begin, end, num_slots, num_copies, num_peers, capacity, num_cols, row_pitch, token_pitch;
  ScalarType dtype;
  bool streamed;

  // The rows of an assignment at the ranks that have it; null where it goes nowhere.
  template <typename T>
  T* row(int64_t assignment, int64_t copy) const {
    const int64_t number = where[assignment];
    if (number < 0 || number >= num_peers * capacity) return nullptr;
    const int64_t peer = number / capacity;
    char* half = static_cast<char*>(rows) + peer_offsets[copy * num_peers + peer];
    return reinterpret_cast<T*>(half) + number % capacity * row_pitch;
  }
};

FASTMP_DECLARE(void exchange_push_run(const PeerRun&); void exchange_pull_run(const PeerRun&);
               void exchange_copy_run(void*, const void*, int64_t, int64_t, int64_t, ScalarType, bool);)

namespace FASTMP_ISA {

// Writes an assignment's row of x times its weight to all copies, tile by tile; with kDot returns its dot product
// with y.
template <bool kDot, typename T>
FASTMP_INLINE scalar_of<T> push_weighted(const PeerRun& run, int64_t assignment, const T* x, const T* y) {
  alignas(kVectorBytes) T tile[kTile];
  const auto weight = static_cast<const scalar_of<T>*>(run.probs)[assignment];
  auto dots = broadcast<lanes_of<T>>(0);
  for (int64_t first = 0; first < run.num_cols; first += kTile) {
    const int64_t count = std::min(kTile, run.num_cols - first);
    weigh<kDot>(x + first, y + first, weight, tile, count, dots);
    for (int64_t copy = 0; copy < run.num_copies; ++copy) {
      copy_row(run.row<T>(assignment, copy) + first, tile, count, run.streamed);
    }
  }
  return sum(dots);
}

void exchange_push_run(const PeerRun& run) {
  dispatch_float(run.dtype, "exchange_push", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t token = run.begin; token < run.end; ++token) {
      const T* x = static_cast<const T*>(run.tokens) + token * run.token_pitch;
      for (int64_t assignment = token * run.num_slots; assignment < (token + 1) * run.num_slots; ++assignment) {
        scalar_of<T> dprob = 0;
        const bool there = run.row<T>(assignment, 0) != nullptr;
        if (there && run.y) {
          dprob = push_weighted<true>(run, assignment, x, static_cast<const T*>(run.y) + assignment * run.num_cols);
        } else if (there && run.probs) {
          push_weighted<false>(run, assignment, x, x);
        } else if (there) {
          for (int64_t copy = 0; copy < run.num_copies; ++copy) {
            copy_row(run.row<T>(assignment, copy), x, run.num_cols, run.streamed);
          }
        }
        if (run.dprobs) static_cast<scalar_of<T>*>(run.dprobs)[assignment] = dprob;
      }
    }
    fence();
  });
}

void exchange_pull_run(const PeerRun& run) {
  dispatch_float(run.dtype, "exchange_pull", [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = scalar_of<T>;
    RowSum<T> copies(run.num_copies, run.num_cols), total(run.num_slots, run.num_cols);
    const bool summed = run.num_copies > 1;
    std::vector<T> own(summed && !run.y ? run.num_slots * run.num_cols : 0);
    for (int64_t token = run.begin; token < run.end; ++token) {
      for (int64_t slot = 0; slot < run.num_slots; ++slot) {
        const int64_t assignment = token * run.num_slots + slot;
        const T* row = run.row<T>(assignment, 0);
        T* const slot_row = summed ? own.data() + slot * run.num_cols : nullptr;
        T* kept = run.y ? static_cast<T*>(run.y) + assignment * run.num_cols : slot_row;
        if (!row) {
          if (run.y) std::memset(kept, 0, run.num_cols * sizeof(T));
          continue;
        }
        if (summed) {
          for (int64_t copy = 0; copy < run.num_copies; ++copy) copies.add(run.row<T>(assignment, copy), S{1});
          copies.finish(kept);
        } else if (run.y) {
          copy_row(kept, row, run.num_cols, run.streamed);
        }
        total.add(summed ? kept : row, run.probs ? static_cast<const S*>(run.probs)[assignment] : S{1});
      }
      total.finish(static_cast<T*>(run.tokens) + token * run.num_cols);
    }
    fence();
  });
}

// Copies `count` rows that lie `pitch` elements apart to rows without gaps.
void exchange_copy_run(void* to, const void* from, int64_t count, int64_t num_cols, int64_t pitch, ScalarType dtype,
                       bool streamed) {
  dispatch_float(dtype, "exchange_copy", [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t row = 0; row < count; ++row) {
      copy_row(static_cast<T*>(to) + row * num_cols, static_cast<const T*>(from) + row * pitch, num_cols, streamed);
    }
    fence();
  });
}

}  // namespace FASTMP_ISA
}  // namespace fastmp

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

constexpr int kPauses = 256, kYields = 256;  // looks at a flag before others may run, and before this thread sleeps
constexpr auto kNap = std::chrono::microseconds(50);

void check_whole(const char* op, const char* name, const Tensor& view) {
  FASTMP_CHECK(view.is_contiguous(), op, ": ", name, " must be contiguous, got ", described(view), " with gaps");
}

void check_epochs(const char* op, const Tensor& epochs) {
  FASTMP_CHECK(epochs.scalar_type() == ScalarType::Int && epochs.dim() == 1 && epochs.size(0) > 1, op,
               ": epochs must be int32 (R + 1,), got ", described(epochs));
  check_whole(op, "epochs", epochs);
}

const int64_t* checked_peer_offsets(const char* op, const Tensor& epochs, const Tensor& peer_offsets) {
  check_epochs(op, epochs);
  FASTMP_CHECK(peer_offsets.scalar_type() == ScalarType::Long && peer_offsets.dim() == 2 &&
                   peer_offsets.numel() == epochs.size(0) - 1,
               op, ": peer_offsets must be int64 (D, P) of the ", epochs.size(0) - 1, " ranks of epochs, got ",
               described(peer_offsets));
  check_whole(op, "peer_offsets", peer_offsets);
  const auto* bytes = static_cast<const int64_t*>(peer_offsets.const_data_ptr());
  for (int64_t rank = 0; rank < peer_offsets.numel(); ++rank) {
    FASTMP_CHECK(bytes[rank] % 16 == 0, op, ": peer_offsets must be multiples of 16 bytes, got ", bytes[rank]);
  }
  return bytes;
}

void check_rows(const char* op, const Tensor& rows, const Tensor& epochs) {
  dispatch_float(rows.scalar_type(), op, [](auto) {});
  FASTMP_CHECK(rows.dim() == 3 && rows.size(0) == 2, op, ": rows must be (2, C, H), got ", described(rows));
  check_whole(op, "rows", rows);
  check_epochs(op, epochs);
}

// Whether this process has memory at all of these bytes.
bool is_mapped(uintptr_t address, size_t bytes) {
  const uintptr_t first = address & ~static_cast<uintptr_t>(getpagesize() - 1);
  return msync(reinterpret_cast<void*>(first), address + bytes - first, MS_ASYNC) == 0;
}

// Raises for offsets from a view to the ranks' at which this process has no memory.
void check_peers(const char* op, const Tensor& view, const int64_t* peer_offsets, int64_t num_ranks) {
  const auto own = reinterpret_cast<uintptr_t>(view.const_data_ptr());
  const size_t bytes = view.numel() * view.element_size();
  for (int64_t other = 0; other < num_ranks; ++other) {
    FASTMP_CHECK(bytes == 0 || is_mapped(own + static_cast<uintptr_t>(peer_offsets[other]), bytes), op,
                 ": there is no memory of rank ", other, " at its offset of ", peer_offsets[other],
                 " bytes; expected the peer_offsets that belong to this symmetric buffer");
  }
}

// Raises for a rank, a timeout or offsets with which a barrier would hang, or write to unmapped memory.
void check_barrier(const char* op, const Tensor& view, const int64_t* peer_offsets, int64_t num_ranks, int64_t rank,
                   double timeout) {
  FASTMP_CHECK(rank >= 0 && rank < num_ranks, op, ": rank must be one of the ", num_ranks, " ranks, got ", rank);
  FASTMP_CHECK(std::isfinite(timeout) && timeout > 0, op, ": timeout must be a positive number of seconds, got ",
               timeout);
  FASTMP_CHECK(peer_offsets[rank] == 0, op, ": expected offset 0 for this rank, rank ", rank, ", got ",
               peer_offsets[rank]);
  check_peers(op, view, peer_offsets, num_ranks);
}

// The epoch of the next exchange, an int32 that wraps.
int32_t next_epoch(const Tensor& epochs) {
  const auto latest = static_cast<const int32_t*>(epochs.const_data_ptr())[epochs.size(0) - 1];
  return static_cast<int32_t>(static_cast<uint32_t>(latest) + 1);
}

char* half_of(const Tensor& view, int64_t epoch) {
  const int64_t bytes = view.numel() / 2 * static_cast<int64_t>(view.element_size());
  return static_cast<char*>(view.mutable_data_ptr()) + (epoch & 1) * bytes;
}

char* next_half(const Tensor& view, const Tensor& epochs) { return half_of(view, next_epoch(epochs)); }
char* latest_half(const Tensor& view, const Tensor& epochs) { return half_of(view, next_epoch(epochs) - int64_t{1}); }

template <class T>
T* further(T* pointer, int64_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(pointer) + bytes);
}

// Waits until `signal` has reached `epoch`; returns its last value, which is behind after a timeout.
int32_t wait_for(int32_t& signal, int32_t epoch, std::chrono::steady_clock::time_point deadline) {
  for (int64_t looks = 0;; ++looks) {
    const int32_t reached = std::atomic_ref<int32_t>(signal).load(std::memory_order_acquire);
    const auto ahead = static_cast<int32_t>(static_cast<uint32_t>(reached) - static_cast<uint32_t>(epoch));
    if (ahead >= 0) return reached;
    if (looks < kPauses) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      continue;
    }
    if (looks < kPauses + kYields) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
    if (std::chrono::steady_clock::now() > deadline) return reached;
  }
}

// Signals all ranks, waits for all of them, and advances the epoch.
void signal_and_wait(const char* op, Tensor& epochs, const int64_t* peer_offsets, int64_t rank, double timeout) {
  const int64_t num_ranks = epochs.size(0) - 1;
  check_barrier(op, epochs, peer_offsets, num_ranks, rank, timeout);
  auto* own = static_cast<int32_t*>(epochs.mutable_data_ptr());
  // 1. The epoch of this exchange; a second attempt at it would find stale signals.
  const int32_t epoch = next_epoch(epochs);
  FASTMP_CHECK(own[rank] != epoch, op, ": exchange ", epoch,
               " has failed on this rank before, and its state on other ranks is unknown; make new process groups");
  // 2. Signal: store the epoch into this rank's slot at every rank.
  for (int64_t other = 0; other < num_ranks; ++other) {
    std::atomic_ref<int32_t>(*further(own + rank, peer_offsets[other])).store(epoch, std::memory_order_release);
  }
  // 3. Wait until every rank has stored it here.
  const auto patience = std::chrono::duration<double>(std::min(timeout, 1e9));
  const auto deadline =
      std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(patience);
  for (int64_t other = 0; other < num_ranks; ++other) {
    const int32_t reached = wait_for(own[other], epoch, deadline);
    FASTMP_CHECK(static_cast<int32_t>(static_cast<uint32_t>(reached) - static_cast<uint32_t>(epoch)) >= 0, op,
                 ": rank ", other, " has not come to exchange ", epoch, " within ", timeout,
                 " s: the last one it came to is ", reached, "; find out why rank ", other,
                 " is late (fastmp hang RUN_DIR), or raise the timeout");
  }
  own[num_ranks] = epoch;  // the exchange is now the latest one
}

void barrier(Tensor& epochs, const Tensor& peer_offsets, int64_t rank, double timeout) {
  constexpr const char* kOp = "exchange_barrier";
  signal_and_wait(kOp, epochs, checked_peer_offsets(kOp, epochs, peer_offsets), rank, timeout);
}

Tensor exchange_counts(const Tensor& own, Tensor& epochs, Tensor& counts, const Tensor& peer_offsets, int64_t rank,
                       double timeout) {
  constexpr const char* kOp = "exchange_counts";
  const int64_t* bytes = checked_peer_offsets(kOp, epochs, peer_offsets);
  const int64_t num_ranks = peer_offsets.numel(), width = own.numel();
  FASTMP_CHECK(own.scalar_type() == ScalarType::Int && counts.scalar_type() == ScalarType::Int && counts.dim() == 3 &&
                   counts.size(0) == 2 && counts.size(1) == num_ranks && counts.size(2) == width,
               kOp, ": counts must be int32 (2, R, E), got ", described(counts), " for own ", described(own), " and ",
               num_ranks, " ranks");
  check_whole(kOp, "counts", counts);
  check_barrier(kOp, counts, bytes, num_ranks, rank, timeout);
  check_barrier(kOp, epochs, bytes, num_ranks, rank, timeout);
  const Tensor row = torch::stable::contiguous(own);
  auto* half = reinterpret_cast<int32_t*>(next_half(counts, epochs));
  for (int64_t other = 0; other < num_ranks; ++other) {
    std::memcpy(further(half + rank * width, bytes[other]), row.const_data_ptr(), width * sizeof(int32_t));
  }
  signal_and_wait(kOp, epochs, bytes, rank, timeout);
  const Tensor matrix = fastmp::empty({num_ranks, width}, ScalarType::Int, own);
  std::memcpy(matrix.mutable_data_ptr(), half, num_ranks * width * sizeof(int32_t));
  return matrix;
}

std::tuple<Tensor, Tensor, Tensor> exchange_places(const Tensor& given_rows, const Tensor& given_indices,
                                                   const Tensor& given_matrix, int64_t rank, int64_t num_peers,
                                                   int64_t capacity) {
  constexpr const char* kOp = "exchange_places";
  FASTMP_CHECK(given_rows.dim() == 2 && given_rows.scalar_type() == ScalarType::Int, kOp,
               ": row_of must be int32 (T, k), got ", described(given_rows));
  check_same(kOp, "indices", given_indices, "row_of", given_rows);
  FASTMP_CHECK(given_matrix.dim() == 2 && given_matrix.scalar_type() == ScalarType::Int && given_matrix.size(1) > 0,
               kOp, ": matrix must be int32 (R, E), got ", described(given_matrix));
  const int64_t num_ranks = given_matrix.size(0), num_experts = given_matrix.size(1);
  FASTMP_CHECK(rank >= 0 && rank < num_ranks, kOp, ": rank must be one of the ", num_ranks, " ranks, got ", rank);
  FASTMP_CHECK(num_peers > 0 && num_experts % num_peers == 0 && num_ranks % num_peers == 0, kOp, ": ", num_peers,
               " peers do not divide ", num_experts, " experts and ", num_ranks, " ranks");
  FASTMP_CHECK(capacity > 0 && capacity <= std::numeric_limits<int32_t>::max() / num_peers, kOp,
               ": int32 cannot number ", capacity, " rows of each of ", num_peers, " peers");
  const int64_t num_local = num_experts / num_peers;
  const Tensor row_of = torch::stable::contiguous(given_rows), indices = torch::stable::contiguous(given_indices);
  const Tensor matrix = torch::stable::contiguous(given_matrix);
  const Tensor where = fastmp::empty(row_of.sizes(), ScalarType::Int, row_of);
  const Tensor offsets = fastmp::empty({num_local}, ScalarType::Int, row_of);
  const Tensor dropped = fastmp::empty({}, ScalarType::Int, row_of);
  const auto* row_ends = static_cast<const int32_t*>(matrix.const_data_ptr());
  const auto begin_at = [&](int64_t source, int64_t expert) -> int64_t {
    return expert ? row_ends[source * num_experts + expert - 1] : 0;
  };
  const auto count = [&](int64_t source, int64_t expert) {
    return row_ends[source * num_experts + expert] - begin_at(source, expert);
  };
  auto* ends = static_cast<int32_t*>(offsets.mutable_data_ptr());

  std::vector<int64_t> moved(num_experts);  // from a row on this rank to the row at the receiver, per expert
  // 1. Where each expert's rows begin at its rank, and this rank's among them; what the capacity drops.
  int64_t beyond = 0, end = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    if (expert % num_local == 0) end = 0;
    int64_t before = 0, total = 0;
    for (int64_t source = 0; source < num_ranks; ++source) {
      if (source == rank) before = total;
      total += count(source, expert);
    }
    const int64_t own = count(rank, expert), begin = end + before;
    moved[expert] = begin - begin_at(rank, expert);
    beyond += std::min(std::max<int64_t>(begin + own - capacity, 0), own);
    end += total;
    if (expert / num_local == rank % num_peers) {
      ends[expert % num_local] = static_cast<int32_t>(std::clamp<int64_t>(end, 0, capacity));
    }
  }
  *static_cast<int32_t*>(dropped.mutable_data_ptr()) = static_cast<int32_t>(beyond);

  // 2. Shift each assignment's row by its expert's; beyond the capacity it is dropped (-1).
  const auto* rows = static_cast<const int32_t*>(row_of.const_data_ptr());
  const auto* experts = static_cast<const int32_t*>(indices.const_data_ptr());
  auto* out = static_cast<int32_t*>(where.mutable_data_ptr());
  parallel_for(0, row_of.numel(), kGrainBytes / 4, [&](int64_t first, int64_t last) {
    for (int64_t assignment = first; assignment < last; ++assignment) {
      const int64_t expert = experts[assignment];
      out[assignment] = -1;
      if (rows[assignment] < 0 || expert < 0 || expert >= num_experts) continue;
      const int64_t row = rows[assignment] + moved[expert];
      if (row >= 0 && row < capacity) out[assignment] = static_cast<int32_t>(expert / num_local * capacity + row);
    }
  });
  return {where, offsets, dropped};
}

// The run of all assignments, after checks. `where` and `probs` are without gaps.
PeerRun run_of(const char* op, const Tensor& where, const std::optional<Tensor>& probs, const Tensor& epochs,
               const Tensor& rows, const Tensor& peer_offsets, int64_t num_cols) {
  check_rows(op, rows, epochs);
  PeerRun run{};
  run.peer_offsets = checked_peer_offsets(op, epochs, peer_offsets);
  check_peers(op, rows, run.peer_offsets, peer_offsets.numel());
  FASTMP_CHECK(where.dim() == 2 && where.scalar_type() == ScalarType::Int, op, ": where must be int32 (T, k), got ",
               described(where));
  const ScalarType wide = compute_dtype(rows.scalar_type());
  FASTMP_CHECK(!probs || (probs->scalar_type() == wide && same_sizes(*probs, where)), op, ": probs must be ",
               dtype_name(wide), " of the shape of where ", described(where), ", got ", probs ? described(*probs) : "");
  run.where = static_cast<const int32_t*>(where.const_data_ptr());
  if (probs) run.probs = probs->const_data_ptr();
  run.num_slots = where.size(1);
  run.num_copies = peer_offsets.size(0);
  run.num_peers = peer_offsets.size(1);
  run.capacity = rows.size(1);
  run.num_cols = num_cols;
  run.row_pitch = rows.size(2);
  run.dtype = rows.scalar_type();
  run.streamed = where.numel() * run.num_cols * static_cast<int64_t>(rows.element_size()) >= kStreamedBytes;
  return run;
}

template <class Kernel>
void over_tokens(const Kernel& kernel, const PeerRun& whole, int64_t num_tokens, int64_t itemsize) {
  const int64_t grain = token_grain(whole.num_slots * whole.num_copies, whole.num_cols * itemsize);
  parallel_for(0, num_tokens, grain, [&](int64_t begin, int64_t end) {
    PeerRun run = whole;
    run.begin = begin;
    run.end = end;
    kernel(run);
  });
}

Tensor exchange_push(const Tensor& x, const Tensor& given_where, std::optional<Tensor> probs, std::optional<Tensor> y,
                     const Tensor& epochs, Tensor& rows, const Tensor& peer_offsets) {
  constexpr const char* kOp = "exchange_push";
  const Tensor where = torch::stable::contiguous(given_where);
  if (probs) probs = torch::stable::contiguous(*probs);
  PeerRun run = run_of(kOp, where, probs, epochs, rows, peer_offsets, x.size(x.dim() - 1));
  const auto fits = [&](const Tensor& tensor) {
    return tensor.scalar_type() == run.dtype && tensor.size(0) == where.size(0) &&
           tensor.size(tensor.dim() - 1) == run.num_cols;
  };
  FASTMP_CHECK(x.dim() == 2 && fits(x) && run.num_cols <= run.row_pitch, kOp, ": expected x of ", dtype_name(run.dtype),
               " (", where.size(0), ", at most ", run.row_pitch, ") for rows ", described(rows), " and where ",
               described(where), ", got ", described(x));
  FASTMP_CHECK(!y || (probs && y->dim() == 3 && y->size(1) == run.num_slots && fits(*y)), kOp, ": y ",
               y ? described(*y) : "", " does not fit rows ", described(rows), " and where ", described(where),
               ", or there are no probs");
  const ScalarType wide = compute_dtype(run.dtype);
  const Tensor dprobs =
      y ? fastmp::empty(where.sizes(), wide, x) : fastmp::empty({0}, probs ? wide : ScalarType::Float, x);
  if (where.numel() == 0) return dprobs;
  if (run.num_cols == 0) {
    if (dprobs.numel()) std::memset(dprobs.mutable_data_ptr(), 0, dprobs.numel() * dprobs.element_size());
    return dprobs;
  }
  const Rows tokens(x);
  if (y) y = torch::stable::contiguous(*y);
  run.tokens = const_cast<void*>(tokens.tensor.const_data_ptr());
  run.token_pitch = tokens.pitch;
  run.rows = next_half(rows, epochs);
  if (y) {
    run.y = const_cast<void*>(y->const_data_ptr());
    run.dprobs = dprobs.mutable_data_ptr();
  }
  over_tokens([](const PeerRun& part) { FASTMP_BEST(exchange_push_run)(part); }, run, x.size(0), x.element_size());
  return dprobs;
}

std::tuple<Tensor, Tensor> exchange_pull(const Tensor& rows, const Tensor& epochs, const Tensor& peer_offsets,
                                         const Tensor& given_where, std::optional<Tensor> probs, bool keep) {
  const Tensor where = torch::stable::contiguous(given_where);
  if (probs) probs = torch::stable::contiguous(*probs);
  PeerRun run = run_of("exchange_pull", where, probs, epochs, rows, peer_offsets, rows.size(2));
  Tensor out = fastmp::empty({where.size(0), run.num_cols}, run.dtype, rows);
  const Tensor y = keep ? fastmp::empty({where.size(0), run.num_slots, run.num_cols}, run.dtype, rows)
                        : fastmp::empty({0}, run.dtype, rows);
  if (out.numel() == 0) return {out, y};
  run.rows = latest_half(rows, epochs);
  run.tokens = out.mutable_data_ptr();
  if (keep) run.y = y.mutable_data_ptr();
  over_tokens([](const PeerRun& part) { FASTMP_BEST(exchange_pull_run)(part); }, run, out.size(0), rows.element_size());
  return {out, y};
}

// The rows that offsets say are there, at most all.
int64_t num_filled(const char* op, const Tensor& offsets, const Tensor& rows) {
  FASTMP_CHECK(offsets.scalar_type() == ScalarType::Int && offsets.dim() == 1 && offsets.size(0) > 0, op,
               ": offsets must be int32 (E/P,), got ", described(offsets));
  const auto* ends = static_cast<const int32_t*>(offsets.const_data_ptr());
  return std::clamp<int64_t>(ends[(offsets.size(0) - 1) * offsets.stride(0)], 0, rows.size(1));
}

void copy_rows(char* to, const void* from, int64_t count, int64_t num_cols, int64_t pitch, const Tensor& like) {
  const auto itemsize = static_cast<int64_t>(like.element_size());
  const bool streamed = count * num_cols * itemsize >= kStreamedBytes;
  parallel_for(0, count, token_grain(1, num_cols * itemsize), [&](int64_t begin, int64_t end) {
    FASTMP_BEST(exchange_copy_run)
    (to + begin * num_cols * itemsize, at(from, begin * pitch, itemsize), end - begin, num_cols, pitch,
     like.scalar_type(), streamed);
  });
}

Tensor exchange_take(const Tensor& rows, const Tensor& epochs, const Tensor& offsets, int64_t num_cols) {
  constexpr const char* kOp = "exchange_take";
  check_rows(kOp, rows, epochs);
  FASTMP_CHECK(num_cols >= 0 && num_cols <= rows.size(2), kOp, ": rows have ", rows.size(2), " columns, got width ",
               num_cols);
  const int64_t filled = num_filled(kOp, offsets, rows);
  const int64_t row_bytes = num_cols * static_cast<int64_t>(rows.element_size());
  const Tensor out = fastmp::empty({rows.size(1), num_cols}, rows.scalar_type(), rows);
  if (out.numel() == 0) return out;
  char* to = static_cast<char*>(out.mutable_data_ptr());
  copy_rows(to, latest_half(rows, epochs), filled, num_cols, rows.size(2), rows);
  parallel_for(filled, rows.size(1), token_grain(1, row_bytes),
               [&](int64_t begin, int64_t end) { std::memset(to + begin * row_bytes, 0, (end - begin) * row_bytes); });
  return out;
}

void exchange_give(const Tensor& given, const Tensor& offsets, const Tensor& epochs, Tensor& rows) {
  constexpr const char* kOp = "exchange_give";
  check_rows(kOp, rows, epochs);
  FASTMP_CHECK(given.scalar_type() == rows.scalar_type() && given.dim() == 2 && given.size(0) == rows.size(1) &&
                   given.size(1) == rows.size(2),
               kOp, ": given ", described(given), " does not fit rows ", described(rows));
  const int64_t filled = num_filled(kOp, offsets, rows);
  if (given.numel() == 0) return;
  const Rows from(given);
  copy_rows(next_half(rows, epochs), from.tensor.const_data_ptr(), filled, from.num_cols, from.pitch, rows);
}

}  // namespace
}  // namespace fastmp

STABLE_TORCH_LIBRARY_IMPL(fastmp, CPU, m) {
  FASTMP_IMPL(m, "exchange_barrier", fastmp::barrier);
  FASTMP_IMPL(m, "exchange_counts", fastmp::exchange_counts);
  FASTMP_IMPL(m, "exchange_give", fastmp::exchange_give);
  FASTMP_IMPL(m, "exchange_places", fastmp::exchange_places);
  FASTMP_IMPL(m, "exchange_pull", fastmp::exchange_pull);
  FASTMP_IMPL(m, "exchange_push", fastmp::exchange_push);
  FASTMP_IMPL(m, "exchange_take", fastmp::exchange_take);
}

#endif  // FASTMP_ISA_BASE
