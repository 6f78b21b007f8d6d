"""Output heads with a fused cross-entropy loss, which never materialises all logits.

In a training step with labels, the model calls its decoder as transformers does, and its head with hidden
states and labels: `linear_cross_entropy` holds the logits of one chunk of tokens at a time, and the output
has `LazyLogits`. The loss is computed inside the head's own call, so hooks on the head (FSDP gathers its
weight in one) run as usual. transformers' `forward` runs and returns logits in evaluation, without labels,
with `logits_to_keep`, with a custom loss function, if another module (LoRA's) has replaced the head, and
if there are user hooks on the head or the decoder.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from functools import wraps
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fastmp.hf.hooks import has_user_hooks
from fastmp.hf.logits import lazy_logits
from fastmp.hf.patches import ModulePatch, patched_class, why_not_weight
from fastmp.ops import linear_cross_entropy
from fastmp.ops.core.registry import compute_dtype


class LossHead(ModulePatch):
    """Output layer that returns logits, or their loss if it gets labels."""

    by = "fastmp.ops.linear_cross_entropy"
    needs = ("weight", "bias")

    def forward(
        self: Any, input: Tensor, labels: Tensor | None = None, num_items: Any = None, **options: Any
    ) -> Any:
        """Return logits, or with labels their loss.

        Args:
            input: hidden states (..., H).
            labels: (...); None: return logits (..., V).
            num_items: divisor of the summed losses; None: the number of labels that are not ignored.
            options: of `linear_cross_entropy`, such as `ignore_index`.

        Returns:
            The loss is a scalar of float32, or float64 for float64 hidden states.
        """
        if labels is None:
            return super().forward(input)  # type: ignore[misc]
        hidden, weight = input.reshape(-1, input.shape[-1]), self.weight
        options["bias"] = self.bias
        labels = labels.reshape(-1).to(hidden.device)
        if num_items is None:
            return self.cross_entropy(hidden, weight, labels, reduction="mean", **options)
        # weights of tokens instead of a factor of the sum: gradients are rounded once
        if isinstance(num_items, Tensor):
            num_items = num_items.to(hidden.device)
        weights = hidden.new_ones(labels.shape, dtype=compute_dtype(hidden.dtype)) / num_items
        return self.cross_entropy(hidden, weight, labels, token_weight=weights, reduction="sum", **options)

    def cross_entropy(self: Any, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, **options)


class CausalLM(ModulePatch):
    """Causal language model."""

    by = "fastmp.ops.linear_cross_entropy"
    needs: tuple[str, ...] = ("loss_function", "lm_head")
    output = "CausalLMOutputWithPast"

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        head = cls.head(module)
        if "forward" in vars(head):
            return "its head has a forward of its own, set on the module"
        if not isinstance(head, nn.Linear) or type(head).__name__ != "Linear":
            return f"its head is {type(head).__name__}, not nn.Linear"
        if why := why_not_weight(head):
            return f"of its head, {why}"
        return cls.why_not_loss(module)

    @classmethod
    def why_not_loss(cls, module: Any) -> str | None:
        name = getattr(module.loss_function, "__name__", type(module.loss_function).__name__)
        return None if name == "ForCausalLMLoss" else f"its loss function is {name}, not ForCausalLMLoss"

    @classmethod
    def members(cls, original: Any) -> dict[str, Any]:
        from transformers import modeling_outputs
        from transformers.utils.generic import can_return_tuple

        transformers_forward = original.forward
        names = tuple(inspect.signature(transformers_forward).parameters)[1:]
        if "labels" not in names:
            raise AttributeError("forward with labels")
        output = getattr(modeling_outputs, cls.output, None)
        if output is None:
            raise AttributeError(f"output {cls.output}")
        output_fields = tuple(field.name for field in fields(output))

        @can_return_tuple
        def loss_alone(self: Any, given: dict[str, Any]) -> Any:
            loss, outputs, others = self.loss_of(given)
            found = {name: outputs.get(name) for name in output_fields if name in outputs}
            return output(**{**found, **others, "loss": loss})

        @wraps(transformers_forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args)), **kwargs}
            if not self.wants_loss_alone(given):
                return transformers_forward(self, *args, **kwargs)
            return_dict = given.pop("return_dict", None)
            return loss_alone(self, given, return_dict=return_dict)

        return {"forward": forward}

    @staticmethod
    def head(module: Any) -> Any:
        return module.lm_head

    def set_output_embeddings(self: Any, new_embeddings: Any) -> None:
        """Replace the head, as `resize_token_embeddings` does; the new head also computes the loss."""
        super().set_output_embeddings(new_embeddings)  # type: ignore[misc]
        if type(new_embeddings) is nn.Linear:
            new_embeddings.__class__ = patched_class(nn.Linear, LossHead)

    @staticmethod
    def called_otherwise(module: Any) -> tuple[nn.Module, ...]:
        """Return the submodules that `loss_of` skips, or calls with other arguments than transformers."""
        return module.base_model, module.lm_head

    def wants_loss_alone(self: Any, given: dict[str, Any]) -> bool:
        keep = given.get("logits_to_keep")
        if not (
            self.training
            and given.get("labels") is not None
            and (keep is None or (type(keep) is int and keep == 0))
            and isinstance(self.head(self), LossHead)
            and "_loss_function" not in self.__dict__
        ):
            return False
        for module in self.called_otherwise(self):
            if has_user_hooks(module):
                return False
        return True

    def loss_of(self: Any, given: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
        """Run the decoder and the head.

        Args:
            given: arguments of `forward`; all but the labels are passed to the decoder, as in transformers.

        Returns:
            The loss, the decoder's output and further fields of the model's output.
        """
        labels, ignored = given.pop("labels"), given.get("ignore_index", -100)
        given.pop("logits_to_keep", None)
        shifted = given.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        outputs = self.base_model(**given)
        hidden = outputs.last_hidden_state
        num_items = given.get("num_items_in_batch")
        loss = self.lm_head(hidden, shifted, num_items, ignore_index=ignored)
        return loss, outputs, {"logits": lazy_logits(self.lm_head, hidden)}


class CausalLMWithCrossAttention(CausalLM):
    """Causal language model whose output has a field for cross-attention: GPT-2."""

    output = "CausalLMOutputWithCrossAttentions"


class CausalLMWithRouters(CausalLM):
    """Causal language model that returns router logits on request: DeepSeek-V3."""

    output = "MoeCausalLMOutputWithPast"


class MoeCausalLM(CausalLMWithRouters):
    """Causal language model with a load-balancing loss, computed by transformers' function."""

    needs = (
        *(*CausalLM.needs, "config.output_router_logits"),
        *("router_aux_loss_coef", "num_experts", "num_experts_per_tok"),
    )
    balancing_loss: Any  # `load_balancing_loss_func` of transformers

    @classmethod
    def members(cls, original: Any) -> dict[str, Any]:
        function = vars(sys.modules[original.__module__]).get("load_balancing_loss_func")
        if function is None:
            raise AttributeError("load_balancing_loss_func beside it")
        return {**super().members(original), "balancing_loss": staticmethod(function)}

    def loss_of(self: Any, given: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
        if given.get("output_router_logits") is None:
            given["output_router_logits"] = self.config.output_router_logits
        loss, outputs, others = super().loss_of(given)
        if given["output_router_logits"]:
            aux = self.balancing_loss(
                outputs.router_logits, self.num_experts, self.num_experts_per_tok, given.get("attention_mask")
            )
            loss = loss + self.router_aux_loss_coef * aux.to(loss.device)
            others = {**others, "aux_loss": aux}
        return loss, outputs, others


class MaskedLM(CausalLM):
    """Masked language model: BERT."""

    needs = ("cls.predictions.transform", "cls.predictions.decoder")
    output = "MaskedLMOutput"

    @classmethod
    def why_not_loss(cls, module: Any) -> str | None:
        return None  # its forward calls no loss_function

    @staticmethod
    def head(module: Any) -> Any:
        return module.cls.predictions.decoder

    @staticmethod
    def called_otherwise(module: Any) -> tuple[nn.Module, ...]:
        return module.base_model, module.cls, module.cls.predictions, module.cls.predictions.decoder

    def loss_of(self: Any, given: dict[str, Any]) -> tuple[Tensor, Any, dict[str, Any]]:
        labels = given.pop("labels")
        outputs = self.base_model(**given)
        hidden = self.cls.predictions.transform(outputs.last_hidden_state)
        head = self.head(self)
        return head(hidden, labels), outputs, {"logits": lazy_logits(head, hidden)}
