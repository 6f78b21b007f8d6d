// Memory as kernels get it, for Python: huge pages, and the switch of `outputs_by_dispatcher`.
#include "stable.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void make_outputs_by_dispatcher(bool on) { outputs_by_dispatcher = on; }

}  // namespace

STABLE_TORCH_LIBRARY(fastmp_memory, m) {
  m.def("outputs_by_dispatcher(bool on) -> ()");
  m.def("advise_huge_pages(Tensor memory) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastmp_memory, CompositeExplicitAutograd, m) {
  m.impl("outputs_by_dispatcher", TORCH_BOX(&make_outputs_by_dispatcher));
  m.impl("advise_huge_pages", TORCH_BOX(&advise_huge_pages));
}

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
