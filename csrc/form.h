// Activations of a plain or gated MLP.
#pragma once

#include "stable.h"

#include <string>

namespace fastmp {

enum class Form { kSilu, kGeluTanh, kGelu };

// Returns the activation with this name in Python.
inline Form form_of(const char* op, const std::string& name) {
  if (name == "silu") return Form::kSilu;
  if (name == "gelu_tanh") return Form::kGeluTanh;
  FASTMP_CHECK(name == "gelu", op, ": activation must be silu, gelu_tanh or gelu, got ", name);
  return Form::kGelu;
}

}  // namespace fastmp
