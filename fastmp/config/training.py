"""Training configuration: one small frozen dataclass per component.

A recipe (a TOML file in `configs/`) has one table per dataclass. Every field carries the text that `--help`
shows for it and, where there are only a few, the values it may have. Each class checks its own fields: wrong
values are a ValueError that names all of them, one a line, wherever the object was made. `fastmp.plan.layout`
checks tables against each other and against the number of ranks. Standard library only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

from fastmp.config.model import GPTConfig
from fastmp.config.option_names import DTYPE_ALIASES
from fastmp.config.options import DTYPES, Checked, Problem, duration_seconds, option, unknown_choice
from fastmp.config.precision import FP8_BLOCKS, FP8_GRADS, PRECISIONS, Fp8Recipe
from fastmp.config.specs import OPTIMIZERS, SCHEDULES

_WEIGHT = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")
BUCKET_UNIT = 128  # elements of which a bucket is a multiple
BUCKET_SIZE = 40_000_000  # elements after which a bucket is full: a transfer of some milliseconds
SINKS = ("tensorboard", "wandb")  # each the name of its package, and of the extra that brings it


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """Sizes of the parallel axes, and the order of work on them.

    Data parallelism takes the ranks that are left: world_size = tp x cp x dp x pp = etp x ep x edp x pp.
    """

    tp: int = option(1, "tensor parallelism: ranks that shard attention and dense layers")
    cp: int = option(1, "context parallelism: ranks that shard the sequence")
    pp: int = option(1, "pipeline parallelism: ranks that each hold consecutive layers")
    ep: int = option(1, "expert parallelism: ranks that shard the experts of a layer")
    etp: int | None = option(None, "expert tensor parallelism: ranks that shard each expert; unset: tp")
    vpp: int = option(1, "model chunks of a pipeline rank [interleaved 1F1B, virtual pipeline stages]")
    schedule: str = option("1f1b", "pipeline schedule", SCHEDULES)
    microbatch_group_size: int | None = option(
        None,
        "microbatches that run through one chunk before the next chunk, with vpp; unset: pp "
        "[microbatch group size per VP stage]",
    )
    overlap_experts: bool = option(
        False,
        "overlap MoE dispatch and combine with the compute of another microbatch [EP communication overlap]",
    )
    stage_layers: tuple[int, ...] | None = option(
        None, "layers of each of the pp x vpp stages, in order; unset: equal shares"
    )
    sequence_parallel: bool = option(
        False, "shard the activations of norms, dropout and residuals over the tp ranks, along the sequence"
    )
    tp_overlap: bool = option(
        False,
        "overlap the collectives of tensor parallelism with large GEMMs [async TP]; needs GPUs "
        "with symmetric memory",
    )
    # In bfloat16 on H100s others have lost with 2048 rows (pytorch/pytorch#143160), and gained in training
    # Llama 3 70B (pytorch/pytorch#149990), with many more.
    tp_overlap_rows: int = option(8192, "least tokens of a microbatch for which tp_overlap applies")
    recompute: bool = option(
        False,
        "full activation recomputation: keep only the inputs of layers, and recompute the rest in backward",
    )
    shard_recompute_input: bool = option(
        False, "shard the inputs that recompute keeps over the tp ranks [distribute saved activations]"
    )
    recompute_kv: bool = option(
        False,
        "latent attention: keep latents only, and project keys and values of all heads up again in backward "
        "[recompute mla_up_proj]",
    )

    @property
    def placement(self) -> str:
        """Placement of the stages on the pipeline ranks, see `fastmp.schedule.stage_map`."""
        return SCHEDULES[self.schedule].placement

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("tp", "cp", "pp", "ep", "etp", "vpp", "microbatch_group_size")
        yield from self._not_positive("tp_overlap_rows")
        stages, layers = self.pp * self.vpp, self.stage_layers
        if layers is not None and stages > 0 and (len(layers) != stages or min(layers) < 0):
            yield (
                "stage_layers pp vpp",
                f"stage_layers must be {stages} numbers (pp {self.pp} x vpp {self.vpp}), not negative, "
                f"got {layers}",
            )


@dataclass(frozen=True)
class MaskedLMConfig(Checked):
    """Samples of masked language modelling with the order of two segments, see
    fastmp.training.data.masked.
    """

    mask_fraction: float = option(0.15, "share of a sample's tokens to predict")
    max_ngram: int = option(3, "longest n-gram of words to mask as a whole; length n has probability ~ 1/n")
    short_fraction: float = option(0.1, "share of samples that are cut to a random length below seq_len")

    def max_masked(self, seq_len: int) -> int:
        """The most tokens of a sample that are to be predicted; three others are special tokens."""
        return max(1, round(self.mask_fraction * (seq_len - 3)))

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("max_ngram")
        if not 0.0 < self.mask_fraction <= 0.5:
            yield self._wrong("mask_fraction", "above 0 and at most 0.5")
        if not 0.0 <= self.short_fraction <= 1.0:
            yield self._wrong("short_fraction", "from 0 to 1")


@dataclass(frozen=True)
class DataConfig(Checked):
    """The text, and how it becomes samples."""

    text: str = option(
        "pydoc",
        "built-in text, if no path is set: pydoc (Python's documentation) or stdlib (its source)",
        ("pydoc", "stdlib"),
    )
    path: str | None = option(
        None,
        "token files: a directory of `fastmp data build`, or the prefix of Megatron-LM's .bin and"
        " .idx; unset: text",
    )
    blend: tuple[str, ...] | None = option(
        None, "mix several paths, each after its weight: '0.7 data/web' '0.3 data/books'; unset: path"
    )
    validation_path: str | None = option(None, "token files to evaluate on; unset: the held-out part of path")
    tokenizer: str = option(
        "byte",
        "tokenizer of text, or of Megatron's files: byte, bpe (learned from the text, 4096 "
        "tokens), or a tokenizer.json",
    )
    seq_len: int = option(256, "sequence length: tokens of a sample")
    micro_batch_size: int = option(8, "samples of a microbatch on one rank")
    document_masking: bool = option(
        False,
        "restrict attention to the document of a token, and restart positions at each document "
        "[packed sequences]",
    )
    validation_fraction: float = option(
        0.05, "share of the text, or of Megatron's documents, held out for evaluation; 0: none"
    )
    seed: int = option(1234, "seed of the order of samples, and of masking")
    masked_lm: MaskedLMConfig | None = None

    @property
    def predicted(self) -> int:
        """Maximum tokens of a sample that need logits: all, or the masked ones."""
        return self.seq_len if self.masked_lm is None else self.masked_lm.max_masked(self.seq_len)

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("seq_len", "micro_batch_size")
        if not 0 <= self.validation_fraction <= 0.5:
            yield self._wrong("validation_fraction", "from 0 to 0.5")
        if self.masked_lm is not None:
            if self.document_masking:
                yield (
                    "document_masking masked_lm",
                    "document_masking and masked_lm exclude each other: a masked sample is of one document",
                )
            if self.blend is not None:
                yield (
                    "blend masked_lm",
                    "blend and masked_lm exclude each other: build one directory of all text",
                )
            if 0 < self.seq_len < 5:
                yield (
                    "seq_len masked_lm",
                    f"seq_len must be 5 or more with masked_lm (3 are special tokens), got {self.seq_len}",
                )
        if self.blend is not None:
            yield from self._blend_problems(self.blend)

    def _blend_problems(self, blend: tuple[str, ...]) -> Iterator[Problem]:
        for name in ("path", "validation_path"):
            if getattr(self, name) is not None:
                yield (
                    f"blend {name}",
                    f"blend and {name} exclude each other, got {name} {getattr(self, name)!r}",
                )
        paths = [entry.partition(" ")[2].strip() for entry in blend]
        for entry, path in zip(blend, paths):
            weight = entry.partition(" ")[0]
            if not (_WEIGHT.fullmatch(weight) and Fraction(weight) > 0 and path):
                yield (
                    "blend",
                    f"blend must have a weight before each path, as in '0.7 data/web', got {entry!r}",
                )
            elif paths.count(path) > 1:
                yield "blend", f"blend must name each path once, got {path!r} again: add its weights"
        if not blend:
            yield "blend", "blend must name a source, got none"

    @property
    def sources(self) -> tuple[tuple[Fraction, str], ...]:
        """Weights and paths of a blend; none where there is no blend."""
        parts = (entry.partition(" ") for entry in self.blend or ())
        return tuple((Fraction(weight), path.strip()) for weight, _, path in parts)

    @property
    def first_path(self) -> str | None:
        """The path, or the first path of a blend; all its sources share one tokenizer."""
        return self.sources[0][1] if self.blend else self.path


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """AdamW, or Muon with AdamW, with decoupled weight decay; the learning rate as a function of the step."""

    name: str = option("adamw", "optimizer", OPTIMIZERS)
    lr: float = option(1e-3, "peak learning rate")
    min_lr: float = option(1e-4, "final learning rate of a decaying schedule; constant ignores it")
    schedule: str = option(
        "cosine",
        "learning rate after warm-up: cosine or linear decay to min_lr, wsd (warm-up, stable, "
        "decay), or constant",
        ("cosine", "linear", "wsd", "constant"),
    )
    warmup_steps: int = option(20, "steps of linear warm-up from 0 to lr; 0: none")
    decay_steps: int | None = option(
        None, "last steps, in which schedule wsd decays; unset: a fifth of the run"
    )
    betas: tuple[float, float] = option(
        (0.9, 0.95), "decay rates of the first and the second moment [Adam betas]"
    )
    momentum: float = option(0.95, "decay rate of muon's momentum")
    eps: float = option(1e-8, "term added to the denominator for numerical stability [Adam epsilon]")
    weight_decay: float = option(0.01, "decoupled weight decay [AdamW]; 0: none")
    clip_grad_norm: float = option(1.0, "clip the global gradient norm to this value; 0: no clipping")
    shard: bool = option(
        True, "shard the optimizer state over the data-parallel ranks [ZeRO-1, distributed optimizer]"
    )
    states: str = option(
        "classic",
        "precision of the optimizer state: classic = float32 moments and master weights; small = "
        "bfloat16 moments and exact 16-bit master weights (6 bytes a parameter)",
        ("classic", "small"),
    )
    grad_dtype: str = option(
        "float32",
        "dtype in which gradients of 16-bit parameters are accumulated and reduced",
        ("float32", "bfloat16"),
        DTYPE_ALIASES,
    )
    overlap: bool = option(
        True,
        "overlap gradient reduction and parameter gathering with compute; disable it if the set "
        "of parameters with a gradient changes between steps",
    )
    bucket_size: int = option(BUCKET_SIZE, "elements of a gradient bucket, which is communicated at once")
    bucket_unit: int = option(
        BUCKET_UNIT,
        "round bucket sizes up to a multiple of this many elements; 65536 suits NCCL on many nodes",
    )
    loss_scale: float = option(2.0**12, "initial loss scale of float16 training, a power of two")
    loss_scale_interval: int = option(
        2000, "steps without overflow before the loss scale doubles [loss scale window]"
    )
    loss_scale_hysteresis: int = option(2, "steps with overflow before the loss scale halves [hysteresis]")

    def _problems(self) -> Iterator[Problem]:
        if self.schedule == "constant":  # which a lr below the default of min_lr suits as well
            yield from self._not_positive("lr")
        elif not (0.0 <= self.min_lr <= self.lr and self.lr > 0.0):
            yield (
                "min_lr lr",
                f"need 0 <= min_lr <= lr and lr > 0, got min_lr {self.min_lr} and lr {self.lr}; set both",
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            yield (
                "decay_steps schedule",
                f"decay_steps is of schedule 'wsd' only, got decay_steps {self.decay_steps} and schedule "
                f"{self.schedule!r}",
            )
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield self._wrong("betas", "in [0, 1)")
        if not 0.0 <= self.momentum < 1.0:
            yield self._wrong("momentum", "in [0, 1)")
        yield from self._not_positive("eps", "decay_steps", "bucket_size", "bucket_unit")
        yield from self._not_positive("loss_scale_interval", "loss_scale_hysteresis")
        if not (2.0**-126 <= self.loss_scale <= 2.0**127 and math.frexp(self.loss_scale)[0] == 0.5):
            yield self._wrong("loss_scale", "a power of two")
        yield from self._negative("warmup_steps", "weight_decay", "clip_grad_norm")


@dataclass(frozen=True)
class TrainConfig(Checked):
    """The training loop. Intervals are in steps, and 0 means never."""

    steps: int = option(400, "optimizer steps of the run")
    global_batch_size: int = option(
        8,
        "samples of an optimizer step, over all ranks and microbatches [gradient accumulation "
        "follows from it]",
    )
    dtype: str = option(
        "auto",
        "dtype of parameters and compute; auto: bfloat16 on a GPU, float32 on a CPU; float16 scales the loss",
        DTYPES,
        DTYPE_ALIASES,
    )
    precision: str = option(
        "dtype",
        "GEMMs of attention, MLPs and experts: dtype = in train.dtype; fp8 = forward and dgrad in FP8, "
        "wgrad in train.dtype",
        PRECISIONS,
    )
    fp8_block: int | None = option(
        None,
        "elements that share an FP8 scale: 128 [blockwise], or 32 [MXFP8]; unset: 32 on Blackwell GPUs, "
        "else 128",
    )
    fp8_grad: str = option("e4m3", "FP8 format of upstream gradients; the rest is e4m3", FP8_GRADS)
    seed: int = option(1234, "seed of weight initialisation, dropout and router jitter")
    log_interval: int = option(10, "steps between two lines of the log")
    eval_interval: int = option(100, "steps between two evaluations on held-out text; 0: never")
    eval_batches: int = option(16, "batches of an evaluation")
    max_skipped_steps: int = option(
        20, "end the run after this many consecutive steps skipped for a non-finite gradient; 0: never"
    )
    name: str = option("gpt", "name of the run, and of its directory below run_dir")
    run_dir: str = option("runs", "directory of all runs")
    check_replicas: int = option(
        0, "steps between bitwise comparisons of replicated tensors across ranks; 0: never"
    )
    stall_seconds: float = option(
        300.0,
        "end the job with a hang report after this many seconds without progress (4 times as many"
        " at start-up and while saving); 0: never [watchdog timeout]",
    )
    max_time: str = option(
        "",
        "save and stop at the first step after this time: minutes, or "
        "[days-]hours:minutes:seconds; unset: no limit",
    )
    join_seconds: float = option(
        0.0, "seconds that ranks wait for each other at start-up; 0: as fastmp.init [rendezvous timeout]"
    )
    sinks: tuple[str, ...] = option((), "also send metrics to: tensorboard, wandb; unset: metrics.jsonl only")
    profile: str = option(
        "none",
        "profile rank 0: torch (writes a trace), nsys or ncu (restart the command under Nsight)",
        ("none", "torch", "nsys", "ncu"),
    )
    profile_steps: tuple[int, int] = option(
        (10, 13), "steps to profile, from FIRST to before LAST; on the command line FIRST:LAST"
    )

    def fp8(self, default_block: int = 128) -> Fp8Recipe | None:
        """Return the recipe of FP8 GEMMs, None without them. default_block: the device's."""
        if self.precision != "fp8":
            return None
        return Fp8Recipe(self.fp8_block or default_block, self.fp8_grad)

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("steps", "global_batch_size", "log_interval", "eval_batches")
        yield from self._negative(
            "eval_interval", "max_skipped_steps", "check_replicas", "join_seconds", "stall_seconds"
        )
        if self.fp8_block not in (None, *FP8_BLOCKS):
            yield self._wrong("fp8_block", f"{' or '.join(map(str, FP8_BLOCKS))}")
        for sink in sorted(set(self.sinks) - set(SINKS)):
            yield "sinks", unknown_choice("sinks", sink, SINKS)
        if self.name in ("", ".", "..") or "/" in self.name:
            yield "name", f"name must be the name of a directory, got {self.name!r}; its parent is run_dir"
        try:
            if self.max_time and not duration_seconds(self.max_time):
                yield "max_time", f"max_time must not be zero, got {self.max_time!r}"
        except ValueError as error:
            yield "max_time", f"max_time: {error}"
        first, last = self.profile_steps
        if not 0 <= first < last:
            yield "profile_steps", f"profile_steps {first}:{last} must be a range within the run"
        elif self.profile != "none" and first >= self.steps:
            beyond = f"profile_steps {first}:{last} must be a range within the {self.steps} steps of the run"
            yield "profile_steps steps", beyond


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Checkpoints of a run: what to save, and where to resume from."""

    interval: int = option(0, "steps between two checkpoints; the last step is saved too; 0: no checkpoints")
    keep: int = option(2, "newest checkpoints to keep; 0: all")
    keep_every: int = option(0, "also keep checkpoints of steps divisible by this number; 0: none")
    keep_hours: float = option(0.0, "also keep one checkpoint for every so many hours; 0: none")
    asynchronous: bool = option(True, "write checkpoints in the background while training continues")
    attempts: int = option(3, "attempts to write a checkpoint, 2 s apart, before it is given up")
    weights_interval: int = option(
        0, "also export Hugging Face weights with checkpoints of steps divisible by this number; 0: never"
    )
    init_from: str = option(
        "",
        "initialise the weights only, from a checkpoint, a run or a Hugging Face model at this "
        "path; unset: random",
    )
    resume: str = option(
        "",
        "resume weights, optimizer, data and random state: auto (the latest checkpoint of this "
        "run, if any) or a path; unset: start at step 0",
    )

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("attempts")
        yield from self._negative("interval", "keep", "keep_every", "keep_hours", "weights_interval")


@dataclass(frozen=True)
class GraphConfig(Checked):
    """CUDA graphs of the static parts of layers, see `fastmp.cuda_graphs`."""

    enabled: bool = option(False, "capture CUDA graphs of layers and replay them")
    impl: str = option(
        "fastmp",
        "graph implementation: fastmp, or transformer_engine (without recomputation)",
        ("fastmp", "transformer_engine"),
    )
    scope: tuple[str, ...] | None = option(
        None,
        "parts to capture: attn, mlp, moe_router, moe_preprocess, moe, or segments of layers by "
        "name; full: each microbatch, from tokens to loss; full_step: whole steps, with the "
        "optimizer [full iteration]; unset: everything in the layers that can be captured",
    )
    warmup: int = option(2, "eager steps before capture")
    verify_every: int = option(
        0, "steps between bitwise comparisons of all graphs with eager execution; 0: never"
    )
    evaluation: bool = option(False, "capture evaluation as well: one graph for each shape of batch")

    def _problems(self) -> Iterator[Problem]:
        yield from self._not_positive("warmup")
        yield from self._negative("verify_every")
        if self.impl != "fastmp" and self.verify_every:
            yield (
                "verify_every impl",
                f"verify_every {self.verify_every} is of impl 'fastmp' only, got impl {self.impl!r}",
            )
        scope = self.scope or ()
        for name in ("full", "full_step"):
            if self.impl != "fastmp" and name in scope:
                yield "scope impl", f"scope {name!r} is of impl 'fastmp' only, got impl {self.impl!r}"
        if "full_step" in scope and len(scope) > 1:
            yield "scope", f"scope 'full_step' is everything and goes with no other, got {scope}"
        if "full_step" in scope and self.verify_every:
            yield (
                "verify_every scope",
                f"verify_every {self.verify_every} compares the parts of a step, of which scope 'full_step' "
                "has none; use scope 'full', or verify_every 0",
            )
        if self.scope == ():
            yield "scope", "scope must name a segment or be absent, got ()"


@dataclass(frozen=True)
class Recipe:
    """A training job, as a file in `configs/` describes it; `fastmp.plan.layout` checks that it fits
    together.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    graphs: GraphConfig = field(default_factory=GraphConfig)
