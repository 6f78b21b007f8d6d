// The op through which fastmp/ops/core/registry.py hands over the names of an op's arguments.
#include "op.h"

#ifdef FASTMP_ISA_BASE

namespace fastmp {
namespace {

void declare(StringHandle op, StringHandle names) {
  std::istringstream words(unboxed(names));
  std::vector<std::string>& of_op = argument_names()[unboxed(op)];
  of_op.clear();
  for (std::string name; words >> name;) of_op.push_back(name);
}

}  // namespace

STABLE_TORCH_LIBRARY(fastmp_names, m) { m.def("declare(str op, str names) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(fastmp_names, CompositeExplicitAutograd, m) { m.impl("declare", TORCH_BOX(&declare)); }

}  // namespace fastmp

#endif  // FASTMP_ISA_BASE
