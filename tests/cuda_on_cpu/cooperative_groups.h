// Clusters of blocks: see cuda_on_cpu.h.
#pragma once

namespace cooperative_groups {

struct cluster_group {
  unsigned block_rank() const { return cuda_on_cpu::machine.fiber->block->rank; }
  unsigned num_blocks() const { return static_cast<unsigned>(cuda_on_cpu::machine.cluster.size()); }
  void sync(std::source_location where = std::source_location::current()) const {
    cuda_on_cpu::wait(cuda_on_cpu::machine.cluster_barrier, where);
  }
  template <class T>
  T* map_shared_rank(T* mine, unsigned rank) const {
    return reinterpret_cast<T*>(cuda_on_cpu::map_shared(reinterpret_cast<char*>(mine), rank));
  }
};
inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
