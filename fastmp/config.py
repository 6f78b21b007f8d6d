"""Configuration: one small frozen dataclass per component, and the process environment.

A recipe (a TOML file in `configs/`) has one table per dataclass. Each class checks its own fields: wrong
values are a ValueError that names all of them, one a line, wherever the object was made. What tables and
ranks ask of each other is the business of `fastmp.layout`. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class _Checked:
    """A configuration that refuses wrong values when it is made."""

    def __post_init__(self) -> None:
        found = [f"{type(self).__name__}: {message}" for message in self._problems()]
        if found:
            raise ValueError("\n".join(found))

    def _problems(self) -> Iterator[str]:
        """What is wrong, each with its field and value; relations only between values that make sense."""
        raise NotImplementedError

    def _not_positive(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"{_FIELDS.get(name, name)} must be positive, got {value}"

    def _negative(self, *names: str) -> Iterator[str]:
        for name in names:
            value = getattr(self, name)
            if value < 0:
                yield f"{name} must not be negative, got {value}"

    def _unknown(self, choices: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                yield f"{name} must be one of {', '.join(known)}, got {value!r}"


_FIELDS = {"kv_heads": "num_kv_heads", "ffn_size": "ffn_hidden_size"}  # property: the field behind it


@dataclass(frozen=True)
class Environment:
    """What fastmp reads from environment variables, and the only place that reads them.

    `rank` is None outside torchrun. `agent_store` says that torchrun's agent already serves a store at
    `master_addr:master_port` (else rank 0 does). `ops` is FASTMP_OPS (which implementation serves an op),
    `debug` is FASTMP_DEBUG (full tracebacks), `profiled` FASTMP_PROFILED (this process runs under Nsight).
    `registers_segments`: NCCL registers the memory of graphs, and torch's allocator moves borders in it.
    """

    rank: int | None = None
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "localhost"
    master_port: int = 6000
    restart_count: int = 0
    agent_store: bool = False
    ops: str = ""
    debug: bool = False
    profiled: bool = False
    registers_segments: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read `environ` (the process's own by default); ValueError names a variable that is no number."""
        variables = os.environ if environ is None else environ

        def integer(name: str, default: int) -> int:
            text = variables.get(name, str(default))
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"environment: {name} must be an integer, got {text!r}") from None

        allocator = variables.get("PYTORCH_CUDA_ALLOC_CONF", "") + variables.get("PYTORCH_ALLOC_CONF", "")
        return cls(
            rank=integer("RANK", 0) if "RANK" in variables else None,
            world_size=integer("WORLD_SIZE", 1),
            local_rank=integer("LOCAL_RANK", 0),
            local_world_size=integer("LOCAL_WORLD_SIZE", 1),
            master_addr=variables.get("MASTER_ADDR", "localhost"),
            master_port=integer("MASTER_PORT", 6000),
            restart_count=integer("TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            ops=variables.get("FASTMP_OPS", ""),
            debug=variables.get("FASTMP_DEBUG", "0") not in ("", "0"),
            profiled=variables.get("FASTMP_PROFILED", "0") not in ("", "0"),
            registers_segments="expandable_segments:True" in allocator
            and variables.get("NCCL_GRAPH_REGISTER") != "0",
        )


@dataclass(frozen=True)
class MoEConfig(_Checked):
    """A mixture of experts in place of an MLP.

    Routing: a token goes to `top_k` of `num_experts` experts. `score` makes scores of the logits ("softmax"
    over all experts, with `pre_softmax` False over the chosen ones only; or "sigmoid"); `normalize_topk`
    divides the chosen scores by their sum, `routed_scale` multiplies them. With `group_topk` the choice is
    among the experts of that many of `num_groups` equal groups. `expert_bias` moves the choice (not the
    scores) towards idle experts by `bias_update_rate` a step, without an auxiliary loss. `jitter` multiplies
    the router's input by uniform numbers in [1 - jitter, 1 + jitter] while training.

    Losses: coefficients of the Switch load-balancing loss (`aux_loss`), the same per sequence
    (`sequence_aux_loss`), and the mean squared log-sum-exp of the logits (`z_loss`).

    Capacity: while training, an expert takes capacity_factor * top_k / num_experts of a rank's tokens at
    most (None: all that come) and drops those of least probability (`drop_policy` "probs") or the last ones
    ("position").

    Experts have `expert_ffn_hidden_size` hidden units; one shared expert that every token goes through has
    `shared_expert_ffn_hidden_size` (0: none), and its output is multiplied by a sigmoid gate of the token
    with `shared_expert_gate`. `dispatcher`: tokens travel by "alltoall", or "allgather" brings all tokens of
    the expert group to every rank of it, which suits few experts a rank and many per token.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_ffn_hidden_size: int = 512
    score: str = "softmax"
    pre_softmax: bool = True
    normalize_topk: bool = False
    routed_scale: float = 1.0
    num_groups: int = 1
    group_topk: int = 1
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    capacity_factor: float | None = None
    drop_policy: str = "probs"
    dispatcher: str = "alltoall"
    shared_expert_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False

    def _problems(self) -> Iterator[str]:
        yield from self._negative(
            *("aux_loss", "sequence_aux_loss", "z_loss", "bias_update_rate", "shared_expert_ffn_hidden_size")
        )
        yield from self._unknown(
            {
                "score": ("softmax", "sigmoid"),
                "drop_policy": ("probs", "position"),
                "dispatcher": ("alltoall", "allgather"),
            }
        )
        if not 0.0 <= self.jitter < 1.0:
            yield f"jitter must be in [0, 1), got {self.jitter}"
        if self.capacity_factor is not None and not self.capacity_factor > 0.0:
            yield f"capacity_factor must be positive or absent, got {self.capacity_factor}"
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size == 0:
            yield "shared_expert_gate needs a shared expert, got shared_expert_ffn_hidden_size 0"
        sizes = ("num_experts", "top_k", "expert_ffn_hidden_size", "num_groups", "group_topk")
        wrong = list(self._not_positive(*sizes))
        yield from wrong or self._choices()

    def _choices(self) -> Iterator[str]:
        """Which experts a token can reach."""
        if self.num_experts % self.num_groups:
            yield f"num_experts {self.num_experts} is not divisible by num_groups {self.num_groups}"
        if self.group_topk > self.num_groups:
            yield f"group_topk {self.group_topk} is more than num_groups {self.num_groups}"
        reachable = self.group_topk * (self.num_experts // self.num_groups)
        if self.top_k > self.num_experts:
            yield f"top_k {self.top_k} is more than num_experts {self.num_experts}"
        elif self.top_k > reachable:
            yield (
                f"top_k {self.top_k} is more than the {reachable} experts of group_topk {self.group_topk} of "
                f"{self.num_groups} groups"
            )


@dataclass(frozen=True)
class Activation:
    """The activation of an MLP and of experts.

    `form` is the function as ops name it: "gelu" (exact, with erf), "gelu_tanh" or "silu". `blocks` 2 means a
    gated linear unit: the first product makes [gate | up], each as wide as the ffn, and the activation gives
    form(gate) * up. With `blocks` 1 it gives form(up).
    """

    form: str
    blocks: int = 1


ACTIVATIONS = {
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swiglu": Activation("silu", blocks=2),
    "geglu": Activation("gelu_tanh", blocks=2),
}

_FORMS = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rope"),
}


@dataclass(frozen=True)
class GPTConfig(_Checked):
    """A pre-LN GPT: with these defaults GPT-2, with the options below Llama, Mixtral and Qwen3.

    `ffn_hidden_size` None means 4 x hidden_size; `num_kv_heads` None means num_heads (no GQA); `head_size`
    None means hidden_size / num_heads. `norm` is "layernorm" or "rmsnorm", both with `layernorm_epsilon`.
    `position` is "learned" (a table) or "rope" (queries and keys turn by angles of base `rope_base`).
    `activation` of the MLP and of experts is a name of `ACTIVATIONS`: "gelu" (exact, with erf), "gelu_tanh"
    (its tanh form, as in GPT-2), or with a gate "swiglu" or "geglu" (tanh form, as in Gemma).
    `linear_bias` False leaves the biases of all projections out, `tie_embeddings` False gives the output
    layer a weight of its own, `qk_norm` normalises every query and key over its head (Qwen3). `moe`: the
    layers have a mixture of experts in place of the MLP.
    """

    num_layers: int = 4
    hidden_size: int = 192
    num_heads: int = 6
    vocab_size: int = 257
    max_seq_len: int = 256
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    init_std: float = 0.02
    head_size: int | None = None
    norm: str = "layernorm"
    position: str = "learned"
    rope_base: float = 10000.0
    activation: str = "gelu_tanh"
    linear_bias: bool = True
    tie_embeddings: bool = True
    qk_norm: bool = False
    moe: MoEConfig | None = None

    def _problems(self) -> Iterator[str]:
        yield from self._unknown({**_FORMS, "activation": tuple(ACTIVATIONS)})
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name} must be in [0, 1), got {getattr(self, name)}"
        yield from self._not_positive("init_std", "layernorm_epsilon", "rope_base", "ffn_size")
        sizes = ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_seq_len", "num_kv_heads")
        wrong = list(self._not_positive(*sizes, "head_size"))
        yield from wrong or self._head_problems()

    def _head_problems(self) -> Iterator[str]:
        if self.head_size is None and self.hidden_size % self.num_heads:
            yield f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}"
        elif self.position == "rope" and self.head_dim % 2:
            yield f'position "rope" needs heads of even size, got {self.head_dim}'
        if self.num_heads % self.kv_heads:
            yield f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}"

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size


@dataclass(frozen=True)
class ParallelConfig(_Checked):
    """Sizes of the parallel axes; the data-parallel sizes are what the world leaves over.

    `tp` divides attention and dense layers, `cp` the sequence, `pp` the layers; `ep` the experts, `etp` each
    expert (None: as `tp`). Experts use the ranks that are there: world_size = tp x cp x dp x pp =
    etp x ep x edp x pp.

    A pipeline rank has `vpp` chunks of layers and runs them in the order of `schedule` ("1f1b",
    "zero_bubble"), `microbatch_group_size` microbatches through a chunk before the next one (None: pp).
    `stage_layers` says how many layers each of the pp x vpp stages has (None: equally many).
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    schedule: str = "1f1b"
    microbatch_group_size: int | None = None
    stage_layers: tuple[int, ...] | None = None
    sequence_parallel: bool = False
    recompute: bool = False
    shard_recompute_input: bool = False

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("tp", "cp", "pp", "ep", "etp", "vpp", "microbatch_group_size")
        yield from self._unknown({"schedule": ("1f1b", "zero_bubble")})
        stages, layers = self.pp * self.vpp, self.stage_layers
        if layers is not None and stages > 0 and (len(layers) != stages or min(layers) < 0):
            yield (
                f"stage_layers must be {stages} numbers (pp {self.pp} x vpp {self.vpp}), not negative, "
                f"got {layers}"
            )


@dataclass(frozen=True)
class DataConfig(_Checked):
    """Where the text comes from: a built-in `text` ("pydoc", "stdlib") or a built directory `path`."""

    text: str = "pydoc"
    path: str | None = None
    tokenizer: str = "byte"
    seq_len: int = 256
    micro_batch_size: int = 8
    validation_fraction: float = 0.05
    seed: int = 1234

    def _problems(self) -> Iterator[str]:
        return self._not_positive("seq_len", "micro_batch_size")


@dataclass(frozen=True)
class OptimizerConfig(_Checked):
    """AdamW with decoupled weight decay and global gradient-norm clipping (0 turns clipping off).

    The rate grows for `warmup_steps` (a shorter run only warms up), then follows a cosine down to `min_lr`.
    """

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0

    def _problems(self) -> Iterator[str]:
        if not (0.0 <= self.min_lr <= self.lr and self.lr > 0.0):
            yield f"need 0 <= min_lr <= lr and lr > 0, got min_lr {self.min_lr} and lr {self.lr}"
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"betas must be in [0, 1), got {self.betas}"
        yield from self._not_positive("eps")
        yield from self._negative("warmup_steps", "weight_decay", "clip_grad_norm")


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """The training loop. `global_batch_size` counts samples of one optimizer step over all ranks.

    `dtype` of the parameters: "auto" (bfloat16 on a GPU, float32 without), "float32" or "bfloat16".
    Intervals are in steps, 0 means never: `eval_interval` looks at `eval_batches` held-out batches,
    `save_interval` also saves at the end. The run writes to `run_dir`/`name`; `resume` continues from its
    latest checkpoint. `join_seconds` is how long ranks wait for each other at first (0: as `fastmp.init`).
    `profile`: "none", "torch", "nsys" or "ncu", over the steps `profile_steps` (first, last) as in a slice.
    """

    steps: int = 400
    global_batch_size: int = 8
    dtype: str = "auto"
    seed: int = 1234
    log_interval: int = 10
    eval_interval: int = 100
    eval_batches: int = 16
    save_interval: int = 0
    name: str = "gpt"
    run_dir: str = "runs"
    resume: bool = False
    join_seconds: float = 0.0
    profile: str = "none"
    profile_steps: tuple[int, int] = (10, 13)

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("steps", "global_batch_size", "log_interval", "eval_batches")
        yield from self._negative("eval_interval", "save_interval", "join_seconds")
        yield from self._unknown(
            {
                "dtype": ("auto", "float32", "bfloat16"),
                "profile": ("none", "torch", "nsys", "ncu"),
            }
        )
        if self.name in ("", ".", "..") or "/" in self.name:
            yield f"name must be the name of a directory, got {self.name!r}"
        first, last = self.profile_steps
        if not (0 <= first < last and (self.profile == "none" or first < self.steps)):
            yield f"profile_steps {first}:{last} must be a range within the {self.steps} steps of the run"


@dataclass(frozen=True)
class GraphConfig(_Checked):
    """Whether the static parts of layers are captured as graphs and replayed, see `fastmp.graphs`.

    `scope` names what to capture: attn, mlp, moe_router, moe_preprocess, moe, or segments of layers by name.
    None: all that can be captured of the layers; "full": forward and backward of a microbatch as a whole,
    from its tokens to its loss. The first `warmup` steps run eagerly. Every `verify_every` steps all graphs
    are held against their segments, bit for bit (0: never). `impl` is who captures and replays: "fastmp", or
    "transformer_engine" where that is installed, which takes nothing that is recomputed.
    """

    enabled: bool = False
    impl: str = "fastmp"
    scope: tuple[str, ...] | None = None
    warmup: int = 2
    verify_every: int = 0

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("warmup")
        yield from self._negative("verify_every")
        yield from self._unknown({"impl": ("fastmp", "transformer_engine")})
        if self.impl != "fastmp" and self.verify_every:
            yield f"verify_every {self.verify_every} is of impl 'fastmp' only, got impl {self.impl!r}"
        if self.impl != "fastmp" and "full" in (self.scope or ()):
            yield f"scope 'full' is of impl 'fastmp' only, got impl {self.impl!r}"
        if self.scope == ():
            yield "scope must name a segment or be absent, got ()"


@dataclass(frozen=True)
class Recipe:
    """A whole training job: what a file in `configs/` describes. `fastmp.layout` says if it fits together."""

    model: GPTConfig = field(default_factory=GPTConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
