// The CUDA language and runtime, as far as csrc/cuda uses them, on one thread of a CPU.
//
// g++ compiles a .cu file with this header before it (-include). A thread of a block is a fiber that runs until it
// waits: at __syncthreads or at a shuffle. Who goes on is drawn from a seed, and so is the order of the blocks, which
// run one after another. What a barrier should have kept apart thus happens in all orders of whole stretches between
// barriers, which is coarser than what a GPU does.
//
// Errors, thrown by the launch: a barrier that some thread never reaches, or reaches elsewhere in the code; a write
// just beyond the dynamic shared memory; more shared memory than was asked for. Shared memory is NaN when a block
// starts. For static shared memory, alignment and all other accesses compile with -fsanitize=address,undefined.
#pragma once

#include <link.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
// One block runs at a time, and its variables are those of the module's thread-local storage, which can be found as
// one piece of memory.
#define __shared__ static thread_local

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace cuda_on_cpu {

constexpr size_t kStack = 256 << 10;
constexpr size_t kZone = 256;  // bytes around dynamic shared memory that nobody may write
constexpr int kPoison = 0xff;  // NaN in every floating-point type
constexpr unsigned kWarp = 32;

struct Fiber;
struct Barrier {
  size_t expected = 0;
  std::vector<Fiber*> waiting;
  std::source_location where;
};

struct Block {
  dim3 index;
  std::vector<char> dynamic_memory;
  Barrier all;
  std::vector<Barrier> warps;

  char* dynamic() { return dynamic_memory.data() + kZone; }
};

// Its context starts it; then jumps, which need no system call, lead in and out.
struct Fiber {
  ucontext_t context;
  jmp_buf inside;
  bool started = false;
  dim3 thread;
  unsigned number = 0;
  uint64_t exchanged[2];  // what it gives to a shuffle; those of two in a row
  unsigned num_exchanges = 0;
  const Barrier* at = nullptr;
  bool done = false;
};

struct Machine {
  std::mutex mutex;
  std::mt19937_64 random{0};
  int shared_bytes = 233472;              // of a multiprocessor
  std::map<const void*, size_t> allowed;  // dynamic shared memory of a kernel

  std::vector<char*> stacks;
  Block block;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  std::function<void()> body;
  jmp_buf outside;
  Fiber* fiber = nullptr;
  std::string error;
};
inline Machine machine;

// The module's thread-local storage: static shared memory, and `anchor`.
inline thread_local char anchor = 0;
inline std::pair<char*, size_t> static_shared() {
  static size_t size = 0;
  static ptrdiff_t before = 0;
  anchor = 1;  // now it exists in this thread
  if (size == 0) {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
          const auto begin = static_cast<char*>(info->dlpi_tls_data);
          for (int i = 0; begin && i < info->dlpi_phnum; ++i) {
            const auto& header = info->dlpi_phdr[i];
            if (header.p_type != PT_TLS || &anchor < begin || &anchor >= begin + header.p_memsz) continue;
            size = header.p_memsz;
            before = &anchor - begin;
          }
          return 0;
        },
        nullptr);
  }
  return {&anchor - before, size};
}

inline std::string described(const Fiber& fiber) {
  const auto text = [](const dim3& d) {
    return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
  };
  return "thread " + text(fiber.thread) + " of block " + text(machine.block.index);
}
inline std::string described(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

inline void to_scheduler() {
  if (_setjmp(machine.fiber->inside) == 0) _longjmp(machine.outside, 1);
}
inline void to_fiber(Fiber& fiber) {
  if (_setjmp(machine.outside) != 0) return;
  if (fiber.started) _longjmp(fiber.inside, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Ends the launch with an error; does not return.
inline void fail(const std::string& what) {
  machine.error = what;
  for (;;) to_scheduler();
}

inline void wait(Barrier& barrier, const std::source_location& where) {
  Fiber& self = *machine.fiber;
  if (barrier.waiting.empty()) barrier.where = where;
  if (barrier.where.line() != where.line() || barrier.where.column() != where.column()) {
    fail(described(self) + " waits at " + described(where) + ", but " + described(*barrier.waiting[0]) + " at " +
         described(barrier.where));
  }
  barrier.waiting.push_back(&self);
  self.at = &barrier;
  if (barrier.waiting.size() == barrier.expected) {
    for (Fiber* each : barrier.waiting) {
      each->at = nullptr;
      machine.ready.push_back(each);
    }
    barrier.waiting.clear();
  }
  to_scheduler();
}

inline void run_fiber() {
  machine.body();
  machine.fiber->done = true;
  to_scheduler();
}

}  // namespace cuda_on_cpu

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads(std::source_location where = std::source_location::current()) {
  cuda_on_cpu::wait(cuda_on_cpu::machine.block.all, where);
}

namespace cuda_on_cpu {

// Gives `value` to the warp; returns take(of, lane), where of(other) is what that lane gives.
template <class T, class Take>
auto exchange(unsigned mask, T value, const std::source_location& where, const Take& take) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Fiber& self = *machine.fiber;
  if (mask != 0xffffffffu) fail(described(self) + " shuffles with a part of its warp, which is not known here");
  const unsigned turn = self.num_exchanges++ % 2, lane = self.number % kWarp;
  std::memcpy(&self.exchanged[turn], &value, sizeof(T));
  wait(machine.block.warps[self.number / kWarp], where);
  const auto of = [&](unsigned other) {
    T given;
    std::memcpy(&given, &machine.fibers[self.number - lane + other].exchanged[turn], sizeof(T));
    return given;
  };
  return take(of, lane);
}

}  // namespace cuda_on_cpu

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, std::source_location where = std::source_location::current()) {
  return cuda_on_cpu::exchange(mask, value, where, [&](auto of, unsigned lane) { return of(lane ^ distance); });
}
inline int __reduce_max_sync(unsigned mask, int value, std::source_location where = std::source_location::current()) {
  return cuda_on_cpu::exchange(mask, value, where, [&](auto of, unsigned) {
    int most = of(0);
    for (unsigned other = 1; other < cuda_on_cpu::kWarp; ++other) most = std::max(most, of(other));
    return most;
  });
}
inline unsigned __ballot_sync(unsigned mask, bool value, std::source_location where = std::source_location::current()) {
  return cuda_on_cpu::exchange(mask, value, where, [&](auto of, unsigned) {
    unsigned bits = 0;
    for (unsigned other = 0; other < cuda_on_cpu::kWarp; ++other) bits |= unsigned{of(other)} << other;
    return bits;
  });
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline void __syncwarp(std::source_location where = std::source_location::current()) {
  cuda_on_cpu::wait(cuda_on_cpu::machine.block.warps[cuda_on_cpu::machine.fiber->number / cuda_on_cpu::kWarp], where);
}

namespace cuda_on_cpu {

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(machine.block.dynamic());
}

// One block, from start to end.
inline void run_block(dim3 index, size_t dynamic_bytes) {
  const auto [begin, static_bytes] = static_shared();
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  Block& block = machine.block;
  block.index = blockIdx = index;
  block.dynamic_memory.assign(dynamic_bytes + 2 * kZone, static_cast<char>(kPoison));
  std::memset(begin, kPoison, static_bytes);
  block.all = {threads, {}, {}};
  block.warps.assign((threads + kWarp - 1) / kWarp, {kWarp, {}, {}});
  machine.ready.clear();
  machine.fibers.assign(threads, {});
  machine.error.clear();
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = machine.fibers[t];
    fiber.number = t;
    fiber.thread = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
    machine.ready.push_back(&fiber);
  }
  while (machine.stacks.size() < machine.fibers.size()) {
    machine.stacks.push_back(static_cast<char*>(
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)));
  }
  for (size_t i = 0; i < machine.fibers.size(); ++i) {
    ucontext_t& context = machine.fibers[i].context;
    getcontext(&context);
    context.uc_stack.ss_sp = machine.stacks[i];
    context.uc_stack.ss_size = kStack;
    makecontext(&context, run_fiber, 0);
  }
  while (!machine.ready.empty() && machine.error.empty()) {
    const size_t drawn = machine.random() % machine.ready.size();
    std::swap(machine.ready[drawn], machine.ready.back());
    Fiber& fiber = *machine.ready.back();
    machine.ready.pop_back();
    machine.fiber = &fiber;
    threadIdx = fiber.thread;
    to_fiber(fiber);
  }
  for (const Fiber& fiber : machine.fibers) {
    if (!machine.error.empty() || fiber.done) continue;
    const auto missing = std::find_if(machine.fibers.begin(), machine.fibers.end(),
                                      [&](const Fiber& other) { return other.at != fiber.at; });
    machine.error = described(fiber) + " waits for ever at " + described(fiber.at->where) +
                    (missing == machine.fibers.end() ? "" : ", where " + described(*missing) + " does not come");
  }
  const auto& memory = block.dynamic_memory;
  const auto untouched = [&](size_t from) {
    return std::all_of(memory.begin() + from, memory.begin() + from + kZone,
                       [](char byte) { return byte == static_cast<char>(kPoison); });
  };
  if (machine.error.empty() && !(untouched(0) && untouched(memory.size() - kZone))) {
    machine.error = "a block wrote beyond its " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory";
  }
  if (!machine.error.empty()) throw std::logic_error(machine.error);
}

}  // namespace cuda_on_cpu

// The runtime.

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid value"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const int bytes = cuda_on_cpu::machine.shared_bytes;
  *value = attribute == cudaDevAttrComputeCapabilityMajor         ? 9
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? bytes - 1024
                                                                  : bytes;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || bytes > cuda_on_cpu::machine.shared_bytes - 1024) return cudaErrorInvalidValue;
  cuda_on_cpu::machine.allowed[reinterpret_cast<const void*>(kernel)] = static_cast<size_t>(bytes);
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Parameters... arguments) {
  using namespace cuda_on_cpu;
  const std::lock_guard lock(machine.mutex);
  const dim3 grid = config->gridDim, block = config->blockDim;
  const size_t allowed = std::max<size_t>(48 << 10, machine.allowed[reinterpret_cast<const void*>(kernel)]);
  const unsigned threads = block.x * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 || threads == 0 || threads > 1024 ||
      config->dynamicSmemBytes > allowed) {
    return cudaErrorInvalidValue;
  }
  blockDim = block;
  gridDim = grid;
  machine.body = [&] { kernel(arguments...); };
  std::vector<size_t> order(size_t{grid.x} * grid.y * grid.z);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), machine.random);
  for (const size_t i : order) {
    const dim3 index{static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                     static_cast<unsigned>(i / grid.x / grid.y)};
    run_block(index, config->dynamicSmemBytes);
  }
  return cudaSuccess;
}

using std::max;
using std::min;

// The order of threads and blocks from now on, and the bytes of shared memory of a multiprocessor.
extern "C" __attribute__((used, visibility("default"))) inline void cuda_on_cpu_set(uint64_t seed, int shared_bytes) {
  cuda_on_cpu::machine.random.seed(seed);
  cuda_on_cpu::machine.shared_bytes = shared_bytes;
}
