"""Configuration of a model: its layers, experts and positions; `fastmp.config` has the same names.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from fastmp.config.attention import AttentionSpec, LatentConfig, latent_attention, multi_head_attention
from fastmp.config.dispatchers import DISPATCHERS
from fastmp.config.options import Checked, Problem, option
from fastmp.config.rope_scaling import RopeScaling
from fastmp.config.specs import ACTIVATIONS, NORMS

__all__ = [
    "EXCHANGE_OPTIONS",
    "MAX_LAYERS",
    "BertConfig",
    "GPTConfig",
    "MoEConfig",
    "canonical_config",
]


@dataclass(frozen=True)
class MoEConfig(Checked):
    """A mixture of experts in place of the MLP of every layer except `GPTConfig.dense_layers`.

    A router scores every expert for each token; the token goes to its `top_k` experts, whose outputs are
    added up, weighted by the scores. Losses are coefficients; 0 disables one. `fastmp.nn.moe.router` has
    their formulas, and how coefficients of other libraries convert.
    """

    num_experts: int = option(8, "routed experts of a layer")
    top_k: int = option(2, "experts a token is routed to [router top-k]")
    expert_ffn_hidden_size: int = option(512, "FFN hidden size of an expert")
    linear_bias: bool = option(False, "add biases to both linear layers of every routed expert (GPT-OSS)")
    router_bias: bool = option(False, "add a learnt bias to the router logits (GPT-OSS)")
    score: str = option(
        "softmax",
        "function from router logits to scores [router score function]; sqrtsoftplus = the square root of "
        "softplus (DeepSeek-V4)",
        ("softmax", "sigmoid", "sqrtsoftplus"),
    )
    pre_softmax: bool = option(
        True, "softmax over all experts, before top-k; disabled: over the chosen experts, after top-k"
    )
    normalize_topk: bool = option(False, "divide the scores of the chosen experts by their sum")
    routed_scale: float = option(
        1.0, "factor on the scores of the chosen experts [router top-k scaling factor]"
    )
    num_groups: int = option(1, "expert groups of equal size [group-limited routing]; 1: no groups")
    group_topk: int = option(1, "groups a token may choose experts from")
    group_score: str = option(
        "deepseek",
        "score of a group: deepseek = its best expert under softmax, the sum of its two best "
        "under other scores; megatron = the sum of its top_k / group_topk best",
        ("deepseek", "megatron"),
    )
    expert_bias: bool = option(
        False,
        "add a bias to the scores for the choice of experts only, updated towards equal loads "
        "[aux-loss-free load balancing]",
    )
    bias_update_rate: float = option(1e-3, "change of that bias in a step")
    aux_loss: float = option(0.0, "coefficient of the load-balancing loss of Switch Transformer; 0: none")
    aux_loss_group: str = option(
        "tp_cp_dp",
        "ranks over which aux_loss counts the tokens of a microbatch: tp_cp_dp = all ranks of a "
        "pipeline stage; tp_cp = one data-parallel replica (Megatron's aux_loss), without waiting"
        " for other replicas",
        ("tp_cp_dp", "tp_cp"),
    )
    sequence_aux_loss: float = option(0.0, "coefficient of the load-balancing loss of each sequence; 0: none")
    z_loss: float = option(
        0.0, "coefficient of the mean squared log-sum-exp of the router logits [router z-loss]; 0: none"
    )
    jitter: float = option(
        0.0, "in training, multiply the router input by random numbers in 1 +- jitter [input jitter]; 0: none"
    )
    capacity_factor: float | None = option(
        None, "in training, limit the tokens of an expert to this multiple of the mean; unset: dropless"
    )
    drop_policy: str = option(
        "probs",
        "tokens to drop over capacity: probs = the least probable; position = the last",
        ("probs", "position"),
    )
    dispatcher: str = option(
        "alltoall",
        "token dispatcher of expert parallelism",
        DISPATCHERS,
    )
    symmetric_capacity: float | None = option(
        None,
        "dispatcher symmetric, training: receive capacity of a rank as a multiple of the balanced"
        " load; unset: the worst case, dropless",
    )
    symmetric_overflow: str = option(
        "drop",
        "over that capacity: drop tokens and count them, or rerun the step with dispatcher "
        "alltoall, which costs a host-device synchronisation a step",
        ("drop", "rerun"),
    )
    activation_stash: float = option(
        1.2,
        "dispatcher symmetric, training: load of the busiest rank over the mean for which the ring buffer of"
        " expert activations is sized; a step that overflows it is rerun with dispatcher alltoall; 0: no "
        "stash, keep all rows of the receive capacity [paged stash]",
    )
    stash_overflow: float = option(
        1e-4, "probability that a step overflows that ring buffer, for which it is sized"
    )
    shared_expert_ffn_hidden_size: int = option(
        0, "FFN hidden size of the shared expert, which every token passes through; 0: no shared expert"
    )
    shared_expert_gate: bool = option(
        False, "multiply the output of the shared expert by a sigmoid gate (Qwen2-MoE)"
    )

    def _problems(self) -> Iterator[Problem]:
        yield from self._negative(
            *("aux_loss", "sequence_aux_loss", "z_loss", "bias_update_rate", "shared_expert_ffn_hidden_size")
        )
        if not 0.0 <= self.jitter < 1.0:
            yield self._wrong("jitter", "in [0, 1)")
        if self.capacity_factor is not None and not self.capacity_factor > 0.0:
            yield self._wrong("capacity_factor", "positive or absent")
        if self.symmetric_capacity is not None:
            if not self.symmetric_capacity > 0.0:
                yield self._wrong("symmetric_capacity", "positive or absent")
            takes = [name for name, spec in DISPATCHERS.items() if spec.symmetric_memory]
            if self.dispatcher not in takes:
                names = " or ".join(f'"{name}"' for name in takes)
                yield (
                    "symmetric_capacity dispatcher",
                    f"symmetric_capacity is for dispatcher {names}, got {self.symmetric_capacity} beside "
                    f"{self.dispatcher!r}",
                )
        if self.linear_bias and self.activation_stash and DISPATCHERS[self.dispatcher].symmetric_memory:
            yield (
                "activation_stash linear_bias",
                "the activation stash has no biases of experts: set activation_stash 0 beside linear_bias",
            )
        if self.symmetric_overflow == "rerun" and self.symmetric_capacity is None:
            yield (
                "symmetric_overflow symmetric_capacity",
                'symmetric_overflow "rerun" needs a symmetric_capacity; without one all tokens fit',
            )
        if self.activation_stash and self.activation_stash < 1.0:
            yield self._wrong("activation_stash", "0, or max/mean of a load, 1 or more")
        if not 0.0 < self.stash_overflow < 1.0:
            yield self._wrong("stash_overflow", "a probability between 0 and 1")
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size == 0:
            yield (
                "shared_expert_gate shared_expert_ffn_hidden_size",
                "shared_expert_gate needs a shared expert, got shared_expert_ffn_hidden_size 0",
            )
        sizes = ("num_experts", "top_k", "expert_ffn_hidden_size", "num_groups", "group_topk")
        wrong = list(self._not_positive(*sizes))
        yield from wrong or self._choices()

    @property
    def sum_is_one(self) -> bool:
        """True if the weights of a token's experts add up to one: normalised, or softmax over the chosen."""
        return self.normalize_topk or (self.score == "softmax" and not self.pre_softmax)

    @property
    def training_problem(self) -> str:
        """Why training would leave the router as it is, and what to do; "" if its losses train it."""
        # The z-loss only shrinks logits, and the expert bias is no weight of the router.
        if not self.top_k == 1 < self.num_experts or not self.sum_is_one:
            return ""
        if self.aux_loss or self.sequence_aux_loss:
            return ""
        cause = "normalize_topk" if self.normalize_topk else "softmax over the chosen experts"
        return (
            f"top_k 1 with {cause} gives every expert the weight 1, and the router no gradient: set "
            "top_k 2 or more, normalize_topk off (with pre_softmax on), or an aux_loss"
        )

    def _choices(self) -> Iterator[Problem]:
        """Check the experts that a token can reach."""
        if self.num_experts % self.num_groups:
            yield (
                "num_experts num_groups",
                f"num_experts {self.num_experts} is not divisible by num_groups {self.num_groups}",
            )
        if self.group_topk > self.num_groups:
            yield (
                "group_topk num_groups",
                f"group_topk {self.group_topk} is more than num_groups {self.num_groups}",
            )
        if self.group_score == "megatron" and self.top_k < self.group_topk:
            needed = f"top_k >= group_topk {self.group_topk}"
            yield "group_score top_k", f"group_score 'megatron' needs {needed}, got top_k {self.top_k}"
        reachable = self.group_topk * (self.num_experts // self.num_groups)
        if self.top_k > self.num_experts:
            yield "top_k num_experts", f"top_k {self.top_k} is more than num_experts {self.num_experts}"
        elif self.top_k > reachable:
            yield (
                "top_k group_topk num_groups",
                f"top_k {self.top_k} is more than the {reachable} experts of group_topk {self.group_topk} of "
                f"{self.num_groups} groups",
            )


MAX_LAYERS = 1 << 16  # plans list them


@dataclass(frozen=True)
class BertConfig(Checked):
    """An encoder trained on masked tokens (BERT): attention is bidirectional, except for padding.

    Without `post_norm` layers are pre-LN: norms at the inputs of attention and MLP, and a norm after the last
    layer (Shoeybi et al. 2019, figure 7b). With it they are post-LN: a norm follows every residual addition
    and the sum of the embeddings (Devlin et al. 2018; figure 7a).
    """

    num_token_types: int = option(2, "token types (segments), which have embeddings of their own; 0: none")
    post_norm: bool = option(
        False, "post-LN: norms after the residual additions, as in the original BERT; disabled: pre-LN"
    )
    sentence_order: bool = option(
        True, "add a head that predicts whether the two segments of a sample were swapped"
    )

    def _problems(self) -> Iterator[Problem]:
        return self._negative("num_token_types")


@dataclass(frozen=True)
class GPTConfig(Checked):
    """A model: by default GPT-2; other values give Llama, Mixtral or Qwen3, and `bert` an encoder.

    Example:
        >>> config = GPTConfig(hidden_size=64, num_heads=4, norm="rmsnorm", activation="swiglu")
        >>> config.head_dim, config.ffn_size
        (16, 256)
    """

    num_layers: int = option(4, "transformer layers")
    hidden_size: int = option(192, "hidden size: width of the residual stream")
    num_heads: int = option(6, "attention heads")
    vocab_size: int = option(0, "tokens of the vocabulary; 0: that of the data")
    max_seq_len: int = option(256, "longest sequence, in tokens [max position embeddings]")
    num_kv_heads: int | None = option(None, "heads of keys and values [GQA, query groups]; unset: num_heads")
    ffn_hidden_size: int | None = option(None, "FFN hidden size of the MLP; unset: 4 x hidden_size")
    dropout: float = option(0.0, "dropout of embeddings and of the outputs of attention and MLP; 0: none")
    attention_dropout: float = option(0.0, "dropout of attention probabilities; 0: none")
    layernorm_epsilon: float = option(1e-5, "epsilon of the norms")
    init_std: float = option(0.02, "standard deviation of the initial weights")
    head_size: int | None = option(
        None, "width of an attention head [KV channels]; unset: hidden_size / num_heads"
    )
    norm: str = option("layernorm", "norm of every layer", NORMS)
    position: str = option("learned", "position embeddings: learned, or rotary (rope)", ("learned", "rope"))
    rope_base: float = option(10000.0, "base of the rotary frequencies [rope theta]")
    rope_interleaved: bool = option(
        False, "rotary pairs are neighbours (GPT-J, DeepSeek); disabled: half a head apart (Llama)"
    )
    rotary_fraction: float = option(
        1.0, "share of each head that rotary positions turn, from its start [partial rotary factor]"
    )
    activation: str = option(
        "gelu_tanh",
        "activation of the MLP and of experts",
        ACTIVATIONS,
    )
    linear_bias: bool = option(True, "add biases to all linear layers but those of routed experts")
    qkv_bias: bool | None = option(
        None, "add a bias to the projection of queries, keys and values (Qwen2); unset: as linear_bias"
    )
    tie_embeddings: bool = option(True, "share the weight of the word embedding with the output layer")
    qk_norm: bool = option(False, "normalise queries and keys over each head (Qwen3)")
    attention_sinks: bool = option(
        False, "a learnt logit of each head in the denominator of attention's softmax (GPT-OSS)"
    )
    sliding_window: int | None = option(
        None, "tokens of the attention window, the token itself included (Mistral); unset: full attention"
    )
    full_attention_layers: tuple[int, ...] = option(
        (),
        "layers, from 0, with full attention where the others have sliding_window; unset: none",
    )
    dense_layers: tuple[int, ...] = option(
        (),
        "layers, from 0, with a dense MLP where the others have experts [MoE layer frequency]; unset: none",
    )
    mtp_depth: int = option(
        0,
        "modules of multi-token prediction, each of which predicts one token further ahead [MTP layers]; "
        "0: none",
    )
    mtp_weight: float = option(
        0.1, "factor on the loss of multi-token prediction, a mean over depths [MTP loss scaling factor]"
    )
    moe: MoEConfig | None = None
    bert: BertConfig | None = None
    rope_scaling: RopeScaling | None = None
    latent: LatentConfig | None = None

    def _problems(self) -> Iterator[Problem]:
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield self._wrong(name, "in [0, 1)")
        positive = ("init_std", "layernorm_epsilon", "rope_base", "ffn_hidden_size", "sliding_window")
        yield from self._not_positive(*positive)
        yield from self._negative("vocab_size", "mtp_depth", "mtp_weight")
        if self.mtp_depth and self.position != "rope":
            yield "mtp_depth position", f'mtp_depth needs position "rope", got {self.position!r}'
        if self.num_layers > MAX_LAYERS:
            yield self._wrong("num_layers", f"at most {MAX_LAYERS}")
        if self.rope_scaling is not None and self.position != "rope":
            yield "rope_scaling position", f'rope_scaling needs position "rope", got {self.position!r}'
        if not 0.0 < self.rotary_fraction <= 1.0:
            yield self._wrong("rotary_fraction", "above 0 and at most 1")
        elif self.rotary_fraction != 1.0 and self.position != "rope":
            yield "rotary_fraction position", f'rotary_fraction needs position "rope", got {self.position!r}'
        if self.latent is not None:
            yield from self._latent_problems()
        elif self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
            yield (
                "rope_scaling latent",
                "rope_scaling.mscale_all_dim scales the scores of latent attention, but latent is absent",
            )
        if self.bert is not None:
            yield from self._bert_problems()
        sizes = ("num_layers", "hidden_size", "num_heads", "max_seq_len", "num_kv_heads")
        wrong = list(self._not_positive(*sizes, "head_size"))
        yield from wrong or (
            *self._head_problems(),
            *self._scaling_problems(),
            *self._some_problems("dense_layers", "moe", "with experts"),
            *self._some_problems("full_attention_layers", "sliding_window", "with a window"),
        )

    def _bert_problems(self) -> Iterator[Problem]:
        for name in ("moe", "sliding_window", "attention_sinks", "mtp_depth"):
            if getattr(self, name):
                yield f"{name} bert", f"{name} is for GPT: leave it out beside bert"
        if not self.tie_embeddings:
            yield (
                "tie_embeddings bert",
                "tie_embeddings must be on beside bert, whose output weight is the table of words",
            )

    def _latent_problems(self) -> Iterator[Problem]:
        if self.position != "rope":
            yield "latent position", f'latent needs position "rope", got {self.position!r}'
        if self.bert is not None:
            yield "latent bert", "latent is for GPT: leave it out beside bert"
        for name in ("linear_bias", "qkv_bias", "qk_norm", "attention_sinks"):
            if getattr(self, name):
                yield f"{name} latent", f"latent attention has no {name}: set it to false"
        for name, absent in (("head_size", None), ("num_kv_heads", None), ("rotary_fraction", 1.0)):
            if getattr(self, name) != absent:
                yield f"{name} latent", f"latent attention has sizes of its own: leave {name} out"

    def _some_problems(self, name: str, of_others: str, with_what: str) -> Iterator[Problem]:
        """Check `name`, the layers without the option `of_others` of all other layers."""
        chosen, layers = getattr(self, name), self.num_layers
        if not chosen:
            return
        if getattr(self, of_others) is None:
            yield (
                f"{name} {of_others}",
                f"{name} are those not {with_what} where others are, but {of_others} is absent",
            )
        if list(chosen) != sorted({layer for layer in chosen if 0 <= layer < layers}):
            yield (
                f"{name} num_layers",
                f"{name} must be numbers from 0 to {layers - 1} in ascending order, got {list(chosen)}",
            )
        elif len(chosen) == layers:
            yield f"{name} num_layers", f"{name} must leave a layer {with_what}, got all {layers}"

    def _head_problems(self) -> Iterator[Problem]:
        if self.latent is not None:
            return
        if self.head_size is None and self.hidden_size % self.num_heads:
            yield (
                "hidden_size num_heads",
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}",
            )
        elif self.position == "rope" and self.head_dim % 2:
            yield (
                "position hidden_size num_heads head_size",
                f'position "rope" needs heads of even size, got {self.head_dim}',
            )
        elif self.position == "rope" and (self.rope_size % 2 or not self.rope_size):
            turned = f"turns {self.rope_size} of {self.head_dim} elements of a head"
            yield (
                "rotary_fraction",
                f"rotary_fraction {self.rotary_fraction} {turned}: expected an even number above 0",
            )
        if self.num_heads % self.kv_heads:
            yield (
                "num_heads num_kv_heads",
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}",
            )

    def _scaling_problems(self) -> Iterator[Problem]:
        """Check that longrope has a factor for each frequency."""
        scaling, size = self.rope_scaling, self.rope_size if self.latent is None else self.latent.rope_size
        if scaling is not None and scaling.kind == "longrope" and len(scaling.long_factor) != size // 2:
            yield (
                "rope_scaling",
                f"rope_scaling has {len(scaling.long_factor)} factors for {size // 2} frequencies of a head",
            )

    @cached_property
    def attention(self) -> AttentionSpec:
        """The facts of the attention of every layer."""
        if self.latent is not None:
            return latent_attention(self.hidden_size, self.num_heads, self.latent)
        return multi_head_attention(
            self.hidden_size,
            self.num_heads,
            self.kv_heads,
            self.head_dim,
            rope_size=self.rope_size,
            qk_norm=self.qk_norm,
            qkv_bias=self.has_qkv_bias,
            bias=self.linear_bias,
            sinks=self.attention_sinks,
        )

    @property
    def shares_embedding(self) -> bool:
        """True if the last pipeline stage uses the word embedding: for its output layer or MTP modules."""
        return self.tie_embeddings or self.mtp_depth > 0

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def has_qkv_bias(self) -> bool:
        return self.linear_bias if self.qkv_bias is None else self.qkv_bias

    @cached_property
    def layers(self) -> tuple[GPTConfig, ...]:
        """The configuration of each layer: dense layers have no experts, full-attention layers no window."""
        kinds: dict[tuple[bool, bool], GPTConfig] = {(False, False): self}
        found, dense, full = [], frozenset(self.dense_layers), frozenset(self.full_attention_layers)
        for layer in range(self.num_layers):
            kind = layer in dense, layer in full
            if kind not in kinds:
                without: dict[str, Any] = {"moe": None, "dense_layers": ()} if kind[0] else {}
                if kind[1]:
                    without |= {"sliding_window": None, "full_attention_layers": ()}
                kinds[kind] = replace(self, **without)
            found.append(kinds[kind])
        return tuple(found)

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def rope_size(self) -> int:
        """Elements of a head that rotary positions turn; latent attention has its own."""
        return int(self.head_dim * self.rotary_fraction)


_OF_TRAINING = {"dropout", "attention_dropout", "init_std", "mtp_weight"}
# of MoEConfig
EXCHANGE_OPTIONS = (
    *("dispatcher", "symmetric_capacity", "symmetric_overflow"),
    *("activation_stash", "stash_overflow"),
)
_OF_TRAINING_EXPERTS = {
    *("bias_update_rate", "aux_loss", "aux_loss_group", "sequence_aux_loss", "z_loss", "jitter"),
    *("capacity_factor", "drop_policy", *EXCHANGE_OPTIONS),
}


def canonical_config(config: GPTConfig) -> dict[str, Any]:
    """Normalise `config` so that configurations of equivalent trained models compare equal."""
    facts = {key: value for key, value in asdict(config).items() if key not in _OF_TRAINING}
    facts |= {"num_kv_heads": config.kv_heads, "head_size": config.head_dim, "qkv_bias": config.has_qkv_bias}
    facts["ffn_hidden_size"] = config.ffn_size
    if config.position != "rope":
        facts.pop("rope_base")
        facts.pop("rope_interleaved")
        facts.pop("rotary_fraction")
    if config.rope_scaling is not None:
        facts["rope_scaling"] = config.rope_scaling.used
        if config.rope_scaling.kind == "dynamic":  # which has angles for sequences of any length
            facts["max_seq_len"] = None
    if config.moe is not None:
        moe = {key: value for key, value in facts["moe"].items() if key not in _OF_TRAINING_EXPERTS}
        if config.moe.num_groups == config.moe.group_topk:
            moe.pop("group_score")
        if config.moe.score == "softmax":
            moe |= {"pre_softmax": True, "normalize_topk": config.moe.sum_is_one}
        facts["moe"] = moe
        if not config.dense_layers:
            facts.pop("ffn_hidden_size")
    return facts
