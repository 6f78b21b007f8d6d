// The replay program of a training step as data; fastmp/cuda_graphs/replay_program.py defines each field.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "replay/copies.h"

namespace fastmp {

namespace py = pybind11;

enum class Kind : int64_t { FORWARD = 0, BACKWARD = 1, WEIGHT = 2 };

struct Expected {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool needs, plain;
};

struct Forward {
  explicit Forward(const py::handle& from)
      : launch(from.attr("launch")),
        storages(from.attr("storages")),
        made(from.attr("made").cast<Tensors>()),
        output_sources(from.attr("output_sources").cast<std::vector<int64_t>>()),
        num_tensors(from.attr("num_tensors").cast<size_t>()),
        differentiable(from.attr("differentiable").cast<std::vector<bool>>()),
        copied_out(from.attr("copied_out").cast<std::vector<bool>>()),
        aliased(from.attr("aliased").cast<bool>()),
        may_alias_grads(from.attr("may_alias_grads").cast<bool>()),
        is_last(from.attr("is_last").cast<bool>()),
        trained(from.attr("trained").cast<bool>()),
        has_backward(from.attr("has_backward").cast<bool>()) {
    for (const py::handle& each : from.attr("expected")) {
      const py::tuple row = py::reinterpret_borrow<py::tuple>(each);
      expected.push_back({row[0].cast<std::vector<int64_t>>(), row[2].cast<std::vector<int64_t>>(),
                          row[1].cast<at::ScalarType>(), row[3].cast<bool>(), row[4].attr("strides").is_none()});
    }
  }

  py::object launch, storages;
  std::vector<Expected> expected;
  Tensors made;
  std::vector<int64_t> output_sources;
  size_t num_tensors;
  std::vector<bool> differentiable, copied_out;
  bool aliased, may_alias_grads, is_last, trained, has_backward;
};

struct Backward {
  explicit Backward(const py::handle& from)
      : launch(from.attr("launch")), grad_mask(from.attr("grad_mask").cast<std::vector<bool>>()) {
    for (const py::handle& each : from.attr("input_grads"))
      input_grads.push_back(each.is_none() ? at::Tensor() : each.cast<at::Tensor>());
  }

  py::object launch;
  std::vector<bool> grad_mask;
  Tensors input_grads;
};

struct ReplaySlot {
  explicit ReplaySlot(const py::handle& from)
      : kind(Kind(from.attr("kind").cast<int64_t>())),
        chunk(from.attr("chunk").cast<int64_t>()),
        span(from.attr("span").cast<int64_t>()),
        graph(from.attr("graph").cast<size_t>()),
        forward(from.attr("forward").cast<size_t>()),
        fixed(from.attr("static").cast<Tensors>()),
        in_place(from.attr("in_place").cast<std::vector<bool>>()),
        region(from.attr("region").cast<std::string>()) {}

  Kind kind;
  int64_t chunk, span;
  size_t graph, forward;
  Tensors fixed;
  std::vector<bool> in_place;
  std::string region;
};

struct ReplayProgram {
  ReplayProgram(const py::list& forwards, const py::list& backwards, const py::list& slots) {
    for (const py::handle& each : forwards) this->forwards.emplace_back(each);
    for (const py::handle& each : backwards) this->backwards.emplace_back(each);
    for (const py::handle& each : slots) this->slots.emplace_back(each);
  }

  std::vector<Forward> forwards;  // ReplaySlot::graph of a forward is an index here, that of a backward below
  std::vector<Backward> backwards;
  std::vector<ReplaySlot> slots;
};

}  // namespace fastmp
