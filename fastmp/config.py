"""Configuration: one small frozen dataclass per component, and the process environment.

A recipe (a TOML file in `configs/`) has one table per dataclass. Every field carries the text that `--help`
shows for it and, where there are only a few, the values it may have. Each class checks its own fields: wrong
values are a ValueError that names all of them, one a line, wherever the object was made. `fastmp.layout`
checks tables against each other and against the number of ranks. Standard library only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from fastmp.durations import duration_seconds
from fastmp.parallel.launchers import Place, integer, read_place
from fastmp.parallel.schedule import SCHEDULES
from fastmp.parallel.shards import BUCKET_SIZE, UNIT


def _option(default: Any, text: str, choices: Collection[str] = ()) -> Any:
    """A field with this default, the `text` that `--help` shows for it, and the only values it may have."""
    return field(default=default, metadata={"help": text, "choices": choices})


def unknown_choice(name: str, value: Any, choices: Collection[Any]) -> str:
    """The message where the option `name` has a value that is none of its choices."""
    return f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}"


class _Checked:
    """A configuration that refuses wrong values when it is made."""

    def __post_init__(self) -> None:
        found = [f"{type(self).__name__}: {message}" for message in (*self._unknown(), *self._problems())]
        if found:
            raise ValueError("\n".join(found))

    def _unknown(self) -> Iterator[str]:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            choices, value = each.metadata.get("choices"), getattr(self, each.name)
            if choices and value not in choices:
                yield unknown_choice(each.name, value, choices)

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


_FIELDS = {"kv_heads": "num_kv_heads", "ffn_size": "ffn_hidden_size"}  # property: the field behind it


@dataclass(frozen=True)
class Environment(Place):
    """What fastmp reads from environment variables, and the only place that reads them.

    A `Place` is what launchers say. `agent_store` says that torchrun's agent already serves a store at
    `master_addr:master_port` (else rank 0 does). `ops` is FASTMP_OPS (which implementation serves an op),
    `debug` is FASTMP_DEBUG (full tracebacks), `profiled` FASTMP_PROFILED (this process runs under Nsight).
    `registers_segments`: NCCL registers the memory of graphs, and torch's allocator moves borders in it.
    `connections` is CUDA_DEVICE_MAX_CONNECTIONS (hardware queues of a GPU) as it stands, or "";
    `ranks_per_machine` likewise PET_NPROC_PER_NODE, which torchrun takes for its option.
    """

    restart_count: int = 0
    agent_store: bool = False
    ops: str = ""
    debug: bool = False
    profiled: bool = False
    registers_segments: bool = False
    connections: str = ""
    ranks_per_machine: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read `environ` (the process's own by default); ValueError names a variable that is no number."""
        variables = os.environ if environ is None else environ
        allocator = variables.get("PYTORCH_CUDA_ALLOC_CONF", "") + variables.get("PYTORCH_ALLOC_CONF", "")
        return cls(
            **vars(read_place(variables)),
            restart_count=integer(variables, "TORCHELASTIC_RESTART_COUNT", 0),
            agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            ops=variables.get("FASTMP_OPS", ""),
            debug=variables.get("FASTMP_DEBUG", "0") not in ("", "0"),
            profiled=variables.get("FASTMP_PROFILED", "0") not in ("", "0"),
            registers_segments="expandable_segments:True" in allocator
            and variables.get("NCCL_GRAPH_REGISTER") != "0",
            connections=variables.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
            ranks_per_machine=variables.get("PET_NPROC_PER_NODE", ""),
        )


def set_default_variables(**variables: str) -> None:
    """Set those `variables` of this process, and of all that it starts, that are not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class MoEConfig(_Checked):
    """A mixture of experts in place of the MLP of every layer.

    A router gives every token a score for each expert; the token goes to the `top_k` experts it chooses, and
    their outputs are added up, weighted by the scores. Losses are coefficients: 0 leaves one out.
    `fastmp.nn.moe.router` has their formulas, and how coefficients of other libraries convert.
    """

    num_experts: int = _option(8, "experts of a layer")
    top_k: int = _option(2, "experts that a token goes to")
    expert_ffn_hidden_size: int = _option(512, "hidden units of an expert")
    score: str = _option("softmax", "function that turns logits into scores", ("softmax", "sigmoid"))
    pre_softmax: bool = _option(True, "take the softmax over all experts; else over the chosen ones")
    normalize_topk: bool = _option(False, "divide the scores of the chosen experts by their sum")
    routed_scale: float = _option(1.0, "factor of the scores of the chosen experts")
    num_groups: int = _option(1, "equal groups of experts, of which a token may choose group_topk")
    group_topk: int = _option(1, "groups among whose experts a token chooses")
    expert_bias: bool = _option(False, "add a bias that moves the choice, not the scores, to idle experts")
    bias_update_rate: float = _option(1e-3, "change of that bias in a step")
    aux_loss: float = _option(0.0, "load-balancing loss of the Switch Transformer")
    sequence_aux_loss: float = _option(0.0, "load-balancing loss of each sequence")
    z_loss: float = _option(0.0, "mean squared log-sum-exp of the router's logits")
    jitter: float = _option(0.0, "in training, the router's input is multiplied by numbers in 1 +- jitter")
    capacity_factor: float | None = _option(
        None, "in training, most tokens of an expert over the mean of all experts; none: no limit"
    )
    drop_policy: str = _option(
        "probs", "tokens dropped beyond that: the least probable, or the last", ("probs", "position")
    )
    dispatcher: str = _option(
        "alltoall",
        "tokens travel to their experts, or all tokens of the expert group to every rank of it: better for "
        "few experts a rank and many a token",
        ("alltoall", "allgather"),
    )
    shared_expert_ffn_hidden_size: int = _option(
        0, "hidden units of an expert that every token goes to; 0: there is none"
    )
    shared_expert_gate: bool = _option(False, "multiply its output by a sigmoid gate of the token")

    def _problems(self) -> Iterator[str]:
        yield from self._negative(
            *("aux_loss", "sequence_aux_loss", "z_loss", "bias_update_rate", "shared_expert_ffn_hidden_size")
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


MOST_LAYERS = 1 << 16  # plans list them


@dataclass(frozen=True)
class GPTConfig(_Checked):
    """The model, a pre-LN GPT: with its defaults GPT-2, with other values Llama, Mixtral or Qwen3."""

    num_layers: int = _option(4, "transformer layers")
    hidden_size: int = _option(192, "width of the residual stream")
    num_heads: int = _option(6, "attention heads")
    vocab_size: int = _option(0, "tokens of the vocabulary; 0: as many as the data has")
    max_seq_len: int = _option(256, "longest sequence, in tokens")
    num_kv_heads: int | None = _option(None, "heads of keys and values (GQA); none: num_heads")
    ffn_hidden_size: int | None = _option(None, "hidden units of the MLP; none: 4 x hidden_size")
    dropout: float = _option(0.0, "dropout of embeddings and of what layers add")
    attention_dropout: float = _option(0.0, "dropout of attention's probabilities")
    layernorm_epsilon: float = _option(1e-5, "epsilon of either norm")
    init_std: float = _option(0.02, "standard deviation of the initial weights")
    head_size: int | None = _option(None, "width of a head; none: hidden_size / num_heads")
    norm: str = _option("layernorm", "norm of every layer", ("layernorm", "rmsnorm"))
    position: str = _option("learned", "positions: a learned table, or rotary", ("learned", "rope"))
    rope_base: float = _option(10000.0, "base of the angles of rotary positions")
    activation: str = _option(
        "gelu_tanh",
        "activation of the MLP and of experts: gelu (exact, with erf), its tanh form as in GPT-2, or with a "
        "gate swiglu or geglu (tanh form, as in Gemma)",
        ACTIVATIONS,
    )
    linear_bias: bool = _option(True, "give all projections a bias")
    tie_embeddings: bool = _option(True, "use the embedding table as the output layer's weight")
    qk_norm: bool = _option(False, "normalise every query and key over its head (Qwen3)")
    moe: MoEConfig | None = None

    def _problems(self) -> Iterator[str]:
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                yield f"{name} must be in [0, 1), got {getattr(self, name)}"
        yield from self._not_positive("init_std", "layernorm_epsilon", "rope_base", "ffn_size")
        yield from self._negative("vocab_size")
        if self.num_layers > MOST_LAYERS:
            yield f"num_layers must be at most {MOST_LAYERS}, got {self.num_layers}"
        sizes = ("num_layers", "hidden_size", "num_heads", "max_seq_len", "num_kv_heads")
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
    """Sizes of the parallel axes, and the order of work on them.

    Data parallelism takes the ranks that are left: world_size = tp x cp x dp x pp = etp x ep x edp x pp.
    """

    tp: int = _option(1, "tensor parallelism: ranks that divide attention and dense layers")
    cp: int = _option(1, "context parallelism: ranks that divide the sequence")
    pp: int = _option(1, "pipeline parallelism: ranks that divide the layers")
    ep: int = _option(1, "expert parallelism: ranks that divide the experts")
    etp: int | None = _option(None, "ranks that divide each expert; none: tp")
    vpp: int = _option(1, "chunks of layers of a pipeline rank")
    schedule: str = _option("1f1b", "order in which a pipeline rank works", SCHEDULES)
    microbatch_group_size: int | None = _option(
        None, "microbatches through a chunk before the next chunk; none: pp"
    )
    stage_layers: tuple[int, ...] | None = _option(
        None, "layers of each of the pp x vpp stages; none: equally many"
    )
    sequence_parallel: bool = _option(False, "divide norms and dropout over the tp ranks, by the sequence")
    recompute: bool = _option(False, "keep only the inputs of layers, and compute the rest again")
    shard_recompute_input: bool = _option(False, "divide those inputs over the tp ranks")

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("tp", "cp", "pp", "ep", "etp", "vpp", "microbatch_group_size")
        stages, layers = self.pp * self.vpp, self.stage_layers
        if layers is not None and stages > 0 and (len(layers) != stages or min(layers) < 0):
            yield (
                f"stage_layers must be {stages} numbers (pp {self.pp} x vpp {self.vpp}), not negative, "
                f"got {layers}"
            )


@dataclass(frozen=True)
class DataConfig(_Checked):
    """The text, and how it becomes samples."""

    text: str = _option("pydoc", "text that comes with Python, where no path is given", ("pydoc", "stdlib"))
    path: str | None = _option(None, "directory that `fastmp data build` made; none: text")
    tokenizer: str = _option(
        "byte", "tokenizer of text: byte, bpe (learns 4096 tokens), or the path of a tokenizer.json"
    )
    seq_len: int = _option(256, "tokens of a sample")
    micro_batch_size: int = _option(8, "samples of a microbatch on one rank")
    validation_fraction: float = _option(0.05, "share of text that is held out")
    seed: int = _option(1234, "seed of the order of samples")

    def _problems(self) -> Iterator[str]:
        return self._not_positive("seq_len", "micro_batch_size")


@dataclass(frozen=True)
class OptimizerConfig(_Checked):
    """AdamW, or Muon with AdamW, with decoupled weight decay; the learning rate as a function of the step."""

    name: str = _option(
        "adamw",
        "adamw, or muon: orthogonal updates of the matrices between hidden states, AdamW for all else",
        ("adamw", "muon"),
    )
    lr: float = _option(1e-3, "highest learning rate")
    min_lr: float = _option(1e-4, "learning rate that the run decays to; constant does not")
    schedule: str = _option(
        "cosine",
        "learning rate after warm-up: down by half a cosine, down by a line, held and down at the end (wsd: "
        "warm-up, stable, decay), or held for ever",
        ("cosine", "linear", "wsd", "constant"),
    )
    warmup_steps: int = _option(20, "steps in which the learning rate grows; a shorter run only warms up")
    decay_steps: int | None = _option(
        None, "last steps, in which the learning rate of wsd falls; none: a fifth of the run"
    )
    betas: tuple[float, float] = _option((0.9, 0.95), "decay of the two averages")
    momentum: float = _option(0.95, "decay of the average of muon")
    eps: float = _option(1e-8, "added to the root of the second average")
    weight_decay: float = _option(0.01, "decoupled weight decay")
    clip_grad_norm: float = _option(1.0, "largest norm of all gradients together; 0: no clipping")
    shard: bool = _option(True, "divide its state over data-parallel ranks (ZeRO-1)")
    states: str = _option(
        "classic",
        "masters and averages in float32, or in 16 bits with masters that are exact (6 bytes a parameter)",
        ("classic", "small"),
    )
    grad_dtype: str = _option(
        "float32", "dtype in which gradients of 16-bit parameters accumulate", ("float32", "bfloat16")
    )
    overlap: bool = _option(
        True, "sum gradients and gather parameters beside compute; off: for gradients whose number varies"
    )
    bucket_size: int = _option(BUCKET_SIZE, "gradients that are communicated at once")
    bucket_unit: int = _option(UNIT, "buckets are multiples of it; 65536 suits NCCL on many nodes")
    loss_scale: float = _option(
        2.0**12, "first scale of a float16 loss (the sum over a microbatch's tokens), a power of two"
    )
    loss_scale_interval: int = _option(2000, "steps without overflow after which the scale doubles")
    loss_scale_hysteresis: int = _option(2, "steps that may overflow before the scale halves")

    def _problems(self) -> Iterator[str]:
        if self.schedule == "constant":  # which a lr below the default of min_lr suits as well
            yield from self._not_positive("lr")
        elif not (0.0 <= self.min_lr <= self.lr and self.lr > 0.0):
            yield f"need 0 <= min_lr <= lr and lr > 0, got min_lr {self.min_lr} and lr {self.lr}"
        if self.decay_steps is not None and self.schedule != "wsd":
            yield (
                f"decay_steps is of schedule 'wsd' only, got decay_steps {self.decay_steps} and schedule "
                f"{self.schedule!r}"
            )
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"betas must be in [0, 1), got {self.betas}"
        if not 0.0 <= self.momentum < 1.0:
            yield f"momentum must be in [0, 1), got {self.momentum}"
        yield from self._not_positive("eps", "decay_steps", "bucket_size", "bucket_unit")
        yield from self._not_positive("loss_scale_interval", "loss_scale_hysteresis")
        if not (2.0**-126 <= self.loss_scale <= 2.0**127 and math.frexp(self.loss_scale)[0] == 0.5):
            yield f"loss_scale must be a power of two, got {self.loss_scale}"
        yield from self._negative("warmup_steps", "weight_decay", "clip_grad_norm")


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """The training loop. Intervals are in steps, and 0 means never."""

    steps: int = _option(400, "optimizer steps of the run")
    global_batch_size: int = _option(8, "samples of a step, over all ranks")
    dtype: str = _option(
        "auto",
        "dtype of the parameters; auto: bfloat16 on a GPU, else float32; float16 scales the loss",
        ("auto", "float32", "bfloat16", "float16"),
    )
    seed: int = _option(1234, "seed of weights, dropout and jitter")
    log_interval: int = _option(10, "steps between two lines of the log")
    eval_interval: int = _option(100, "steps between two evaluations on held-out text")
    eval_batches: int = _option(16, "batches of an evaluation")
    max_skipped_steps: int = _option(20, "skipped steps in a row that end the run; 0: none do")
    name: str = _option("gpt", "name of the run, and of its directory")
    run_dir: str = _option("runs", "directory of all runs")
    check_replicas: int = _option(0, "steps between comparisons, bit for bit, of what ranks hold alike")
    stall_seconds: float = _option(
        300.0,
        "no progress for so long ends the job with a verdict; in first steps and saves 4 times; 0: never",
    )
    max_time: str = _option(
        "", "save and end at the first step after this time: minutes, [days-]hours:minutes:seconds"
    )
    join_seconds: float = _option(0.0, "how long ranks wait for each other at first; 0: as fastmp.init")
    profile: str = _option("none", "profiler of the first rank", ("none", "torch", "nsys", "ncu"))
    profile_steps: tuple[int, int] = _option((10, 13), "steps it looks at: from FIRST to before LAST")

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("steps", "global_batch_size", "log_interval", "eval_batches")
        yield from self._negative(
            "eval_interval", "max_skipped_steps", "check_replicas", "join_seconds", "stall_seconds"
        )
        if self.name in ("", ".", "..") or "/" in self.name:
            yield f"name must be the name of a directory, got {self.name!r}"
        try:
            if self.max_time and not duration_seconds(self.max_time):
                yield f"max_time must not be zero, got {self.max_time!r}"
        except ValueError as error:
            yield f"max_time: {error}"
        first, last = self.profile_steps
        if not (0 <= first < last and (self.profile == "none" or first < self.steps)):
            yield f"profile_steps {first}:{last} must be a range within the {self.steps} steps of the run"


@dataclass(frozen=True)
class CheckpointConfig(_Checked):
    """What is saved of a run, and what it goes on from."""

    interval: int = _option(0, "steps between two checkpoints; one more at the end; 0: none")
    keep: int = _option(2, "newest checkpoints that stay; 0: all")
    keep_every: int = _option(0, "those of steps that it divides stay, too; 0: none")
    keep_hours: float = _option(0.0, "so does one of every so many hours; 0: none")
    asynchronous: bool = _option(True, "go on with training while a checkpoint is written")
    weights_interval: int = _option(
        0, "of checkpoints of steps that it divides, also write the weights for transformers; 0: none"
    )
    resume: str = _option(
        "", "go on from the latest checkpoint of this name, if there is one (auto), or from one at a path"
    )

    def _problems(self) -> Iterator[str]:
        yield from self._negative("interval", "keep", "keep_every", "keep_hours", "weights_interval")


@dataclass(frozen=True)
class GraphConfig(_Checked):
    """CUDA graphs of the static parts of layers, see `fastmp.graphs`."""

    enabled: bool = _option(False, "capture graphs and replay them")
    impl: str = _option(
        "fastmp",
        "who captures and replays; transformer_engine takes nothing that is recomputed",
        ("fastmp", "transformer_engine"),
    )
    scope: tuple[str, ...] | None = _option(
        None,
        "what to capture: attn, mlp, moe_router, moe_preprocess, moe, or segments of layers by name; full: a "
        "whole microbatch, from tokens to loss; none: all that can be captured of the layers",
    )
    warmup: int = _option(2, "first steps, which run eagerly")
    verify_every: int = _option(
        0, "steps between checks, bit for bit, of all graphs against eager runs; 0: never"
    )

    def _problems(self) -> Iterator[str]:
        yield from self._not_positive("warmup")
        yield from self._negative("verify_every")
        if self.impl != "fastmp" and self.verify_every:
            yield f"verify_every {self.verify_every} is of impl 'fastmp' only, got impl {self.impl!r}"
        if self.impl != "fastmp" and "full" in (self.scope or ()):
            yield f"scope 'full' is of impl 'fastmp' only, got impl {self.impl!r}"
        if self.scope == ():
            yield "scope must name a segment or be absent, got ()"


@dataclass(frozen=True)
class Recipe:
    """A training job, as a file in `configs/` describes it; `fastmp.layout` checks that it fits together."""

    model: GPTConfig = field(default_factory=GPTConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
