// Switch of `outputs_by_dispatcher`: allocation of kernel outputs through torch's dispatcher.
#include "stable.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void make_outputs_by_dispatcher(bool on) { outputs_by_dispatcher = on; }

}  // namespace

STABLE_TORCH_LIBRARY(fastmp_memory, m) { m.def("outputs_by_dispatcher(bool on) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fastmp_memory, CompositeExplicitAutograd, m) {
  m.impl("outputs_by_dispatcher", TORCH_BOX(&make_outputs_by_dispatcher));
}

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
