// What the replays of a training step do, as data; see fastmp/cuda_graphs/replay_program.py, which says what each field means.
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
        places(from.attr("places")),
        made(from.attr("made").cast<Tensors>()),
        outputs(from.attr("outputs").cast<std::vector<int64_t>>()),
        num_tensors(from.attr("num_tensors").cast<size_t>()),
        differentiable(from.attr("differentiable").cast<std::vector<bool>>()),
        copied(from.attr("copied").cast<std::vector<bool>>()),
        aliased(from.attr("aliased").cast<bool>()),
        kept(from.attr("kept").cast<bool>()),
        leaves(from.attr("leaves").cast<bool>()),
        trained(from.attr("trained").cast<bool>()),
        reached(from.attr("reached").cast<bool>()) {
    for (const py::handle& each : from.attr("expected")) {
      const py::tuple row = py::reinterpret_borrow<py::tuple>(each);
      expected.push_back({row[0].cast<std::vector<int64_t>>(), row[2].cast<std::vector<int64_t>>(),
                          row[1].cast<at::ScalarType>(), row[3].cast<bool>(), row[4].attr("strides").is_none()});
    }
  }

  py::object launch, places;
  std::vector<Expected> expected;
  Tensors made;
  std::vector<int64_t> outputs;
  size_t num_tensors;
  std::vector<bool> differentiable, copied;
  bool aliased, kept, leaves, trained, reached;
};

struct Backward {
  explicit Backward(const py::handle& from)
      : launch(from.attr("launch")), given(from.attr("given").cast<std::vector<bool>>()) {
    for (const py::handle& each : from.attr("gradients"))
      gradients.push_back(each.is_none() ? at::Tensor() : each.cast<at::Tensor>());
  }

  py::object launch;
  std::vector<bool> given;
  Tensors gradients;
};

struct Slot {
  explicit Slot(const py::handle& from)
      : kind(Kind(from.attr("kind").cast<int64_t>())),
        chunk(from.attr("chunk").cast<int64_t>()),
        run(from.attr("run").cast<int64_t>()),
        graph(from.attr("graph").cast<size_t>()),
        forward(from.attr("forward").cast<size_t>()),
        fixed(from.attr("static").cast<Tensors>()),
        in_place(from.attr("in_place").cast<std::vector<bool>>()),
        region(from.attr("region").cast<std::string>()) {}

  Kind kind;
  int64_t chunk, run;
  size_t graph, forward;
  Tensors fixed;
  std::vector<bool> in_place;
  std::string region;
};

struct Program {
  Program(const py::list& forwards, const py::list& backwards, const py::list& slots) {
    for (const py::handle& each : forwards) this->forwards.emplace_back(each);
    for (const py::handle& each : backwards) this->backwards.emplace_back(each);
    for (const py::handle& each : slots) this->slots.emplace_back(each);
  }

  std::vector<Forward> forwards;  // Slot::graph of a forward is an index here, that of a backward below
  std::vector<Backward> backwards;
  std::vector<Slot> slots;
};

}  // namespace fastmp
