"""Names of command-line options: short names, names in other programs, and the ones that --help shows first.

Standard library only.
"""

from __future__ import annotations

__all__ = ["DTYPE_ALIASES", "FIRST", "METAVARS", "ORDER", "SHORT", "SWITCHED", "SYNONYMS"]

SHORT = {
    "parallel.tp": "--tp",
    "parallel.cp": "--cp",
    "parallel.pp": "--pp",
    "parallel.vpp": "--vpp",
    "parallel.ep": "--ep",
    "parallel.etp": "--etp",
    "model.moe.dispatcher": "--dispatcher",
    "train.steps": "--steps",
    "train.max_time": "--max-time",
    "train.name": "--name",
    "checkpoint.resume": "--resume",
    "checkpoint.init_from": "--init-from",
    "train.profile": "--profile",
    "train.profile_steps": "--profile-steps",
    "graphs.enabled": "--graphs",
    "graphs.scope": "--scope",
}
# Options, by the switch without which a run does not look at them; in a file they may wait for it.
SWITCHED = {
    "graphs.enabled": ("impl", "scope", "warmup", "verify_every", "evaluation"),
    "parallel.tp_overlap": ("tp_overlap_rows",),
}
# Options that --help shows, by title; --help-all shows every one.
FIRST = {
    "run": (
        *("train.name", "train.run_dir", "train.steps", "train.max_time", "train.seed"),
        *("train.log_interval", "train.eval_interval"),
    ),
    "data": (
        *("data.path", "data.tokenizer", "data.seq_len"),
        *("data.micro_batch_size", "train.global_batch_size"),
    ),
    "parallelism": (
        *("parallel.tp", "parallel.sequence_parallel", "parallel.cp", "parallel.pp", "parallel.vpp"),
        *("parallel.ep", "parallel.etp", "model.moe.dispatcher", "parallel.recompute"),
    ),
    "optimizer and precision": (
        *("train.dtype", "train.precision", "optimizer.name", "optimizer.lr", "optimizer.warmup_steps"),
        *("optimizer.schedule", "optimizer.clip_grad_norm"),
    ),
    "checkpoints": ("checkpoint.interval", "checkpoint.keep", "checkpoint.resume", "checkpoint.init_from"),
    "speed": ("graphs.enabled", "graphs.scope", "train.profile", "train.profile_steps"),
}
# Tables; others come before these.
ORDER = ("train", "data", "parallel", "optimizer", "checkpoint", "graphs", "model")
METAVARS = {
    **dict.fromkeys(("path", "validation_path", "init_from", "tokenizer"), "PATH"),
    **{"run_dir": "DIR", "max_time": "TIME", "resume": "auto|PATH", "blend": "'WEIGHT PATH'"},
}  # of options that hold a text, by the name of the field
DTYPE_ALIASES = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16"},
    **{"fp32": "float32", "float": "float32"},
}
_FUSED = "leave it out, fused kernels are always used"
_ALWAYS = "leave it out, this is always so"
_CHOSEN = "leave it out, fastmp chooses"
_NO = "not supported"
# Options of Megatron-LM, torchtitan and transformers: what to type here, or why there is nothing to type.
SYNONYMS = {
    "--config": "--recipe",
    "--config-file": "--recipe",
    "--job.config-file": "--recipe",
    # Parallelism
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--tensor-parallel": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--pipeline-parallel": "--pp",
    "--num-virtual-stages-per-pipeline-rank": "--vpp",
    "--num-layers-per-virtual-pipeline-stage": "--vpp (num_layers / pp / this number)",
    "--microbatch-group-size-per-virtual-pipeline-stage": "--parallel.microbatch-group-size",
    "--pipeline-model-parallel-layout": "--parallel.stage-layers",
    "--decoder-first-pipeline-num-layers": "--parallel.stage-layers",
    "--decoder-last-pipeline-num-layers": "--parallel.stage-layers",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--expert-parallel": "--ep",
    "--expert-tensor-parallel-size": "--etp",
    "--tp-comm-overlap": "--parallel.tp-overlap",
    "--overlap-moe-expert-parallel-comm": "--parallel.overlap-experts",
    "--delay-wgrad-compute": "--parallel.overlap-experts or --parallel.schedule zero_bubble",
    "--recompute-activations": "--parallel.recompute",
    "--recompute-granularity": "--parallel.recompute",
    "--recompute-modules": "--parallel.recompute (whole layers), or --parallel.recompute-kv (mla_up_proj)",
    **dict.fromkeys(
        ("--recompute-method", "--recompute-num-layers"),
        "leave it out, --parallel.recompute applies to every layer",
    ),
    "--distribute-saved-activations": "--parallel.shard-recompute-input",
    "--activation-checkpointing": "--parallel.recompute",
    "--gradient-checkpointing": "--parallel.recompute",
    # Batches, steps and the optimizer
    "--gradient-accumulation-steps": "--train.global-batch-size",
    "--batch-size": "--data.micro-batch-size or --train.global-batch-size",
    "--train-iters": "--steps",
    "--train-samples": "--steps (samples / --train.global-batch-size)",
    "--max-steps": "--steps",
    "--iterations": "--steps",
    "--seq-length": "--data.seq-len",
    "--sequence-length": "--data.seq-len",
    "--optimizer": "--optimizer.name",
    "--use-distributed-optimizer": "--optimizer.shard (enabled by default)",
    "--learning-rate": "--optimizer.lr",
    "--lr-decay-style": "--optimizer.schedule",
    **dict.fromkeys(
        ("--lr-decay-iters", "--lr-decay-samples"), "leave it out, the learning rate decays until --steps"
    ),
    "--lr-wsd-decay-iters": "--optimizer.decay-steps",
    **dict.fromkeys(("--lr-warmup-iters", "--lr-warmup-fraction", "--warmup"), "--optimizer.warmup-steps"),
    "--clip-grad": "--optimizer.clip-grad-norm",
    "--adam-beta1": "--optimizer.betas BETA1 BETA2",
    "--adam-beta2": "--optimizer.betas BETA1 BETA2",
    "--adam-eps": "--optimizer.eps",
    "--hysteresis": "--optimizer.loss-scale-hysteresis",
    "--overlap-grad-reduce": "--optimizer.overlap (enabled by default)",
    "--overlap-param-gather": "--optimizer.overlap (enabled by default)",
    "--accumulate-allreduce-grads-in-fp32": "--optimizer.grad-dtype float32 (the default)",
    "--grad-reduce-in-bf16": "--optimizer.grad-dtype bfloat16",
    "--main-grads-dtype": "--optimizer.grad-dtype",
    **dict.fromkeys(
        ("--use-precision-aware-optimizer", "--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-params-dtype"),
        "--optimizer.states small",
    ),
    "--bf16": "--train.dtype bfloat16",
    "--fp8-format": "--train.precision fp8 (hybrid: also --train.fp8-grad e5m2)",
    "--fp8-recipe": "--train.precision fp8 (blockwise: --train.fp8-block 128, mxfp8: 32)",
    "--fp16": "--train.dtype float16",
    "--dtype": "--train.dtype",
    # Data
    "--data-path": "--data.path",
    "--data": "--data.path",
    "--split": "--data.validation-fraction",
    "--tokenizer-type": "--data.tokenizer PATH",
    "--reset-position-ids": "--data.document-masking",
    "--reset-attention-mask": "--data.document-masking",
    "--mask-prob": "--data.masked-lm.mask-fraction",
    "--short-seq-prob": "--data.masked-lm.short-fraction",
    # The run
    "--load": "--resume",
    "--finetune": "--init-from (weights alone)",
    "--no-load-optim": "--init-from (weights alone)",
    "--save": "--train.run-dir and --name",
    "--output-dir": "--train.run-dir",
    "--save-interval": "--checkpoint.interval",
    "--async-save": "--checkpoint.asynchronous (enabled by default)",
    "--eval-iters": "--train.eval-batches",
    "--exit-duration-in-mins": "--max-time",
    "--distributed-timeout-minutes": "--train.stall-seconds",
    "--wandb-project": "--train.sinks wandb",
    "--tensorboard-dir": "--train.sinks tensorboard",
    "--use-pytorch-profiler": "--profile torch",
    "--profile-step-start": "--profile-steps FIRST:LAST",
    "--profile-step-end": "--profile-steps FIRST:LAST",
    "--cuda-graph-scope": "--graphs.scope",
    "--cuda-graph-impl": "--graphs",
    "--cuda-graph-warmup-steps": "--graphs.warmup",
    "--enable-cuda-graph": "--graphs",
    # The model
    "--num-attention-heads": "--model.num-heads",
    "--group-query-attention": "--model.num-kv-heads",
    "--num-query-groups": "--model.num-kv-heads",
    "--kv-channels": "--model.head-size",
    "--max-position-embeddings": "--model.max-seq-len",
    "--position-embedding-type": "--model.position",
    "--normalization": "--model.norm",
    "--swiglu": "--model.activation swiglu",
    "--disable-bias-linear": "--model.no-linear-bias",
    "--untie-embeddings-and-output-weights": "--model.no-tie-embeddings",
    "--window-size": "--model.sliding-window (one more: the token itself counts)",
    "--window-attn-skip-freq": "--model.full-attention-layers",
    "--softmax-type": "--model.attention-sinks (for learnable)",
    "--bert-no-binary-head": "--model.bert.no-sentence-order",
    "--mtp-num-layers": "--model.mtp-depth",
    "--mtp-loss-scaling-factor": "--model.mtp-weight",
    # Mixture of experts
    "--num-experts": "--model.moe.num-experts",
    "--moe-ffn-hidden-size": "--model.moe.expert-ffn-hidden-size",
    "--moe-layer-freq": "--model.dense-layers (the layers without experts)",
    "--moe-router-topk": "--model.moe.top-k",
    "--moe-router-topk-scaling-factor": "--model.moe.routed-scale",
    "--multi-latent-attention": "--model.latent.kv-rank and the other sizes of [model.latent]",
    "--kv-lora-rank": "--model.latent.kv-rank",
    "--q-lora-rank": "--model.latent.q-rank",
    "--qk-head-dim": "--model.latent.nope-size",
    "--qk-pos-emb-head-dim": "--model.latent.rope-size",
    "--v-head-dim": "--model.latent.value-size",
    "--rotary-interleaved": "--model.rope-interleaved",
    "--rotary-percent": "--model.rotary-fraction",
    "--mscale-all-dim": "--model.rope-scaling.mscale-all-dim",
    "--moe-router-score-function": "--model.moe.score",
    "--moe-router-enable-expert-bias": "--model.moe.expert-bias",
    "--moe-router-load-balancing-type": "--model.moe.aux-loss-group tp_cp or --model.moe.sequence-aux-loss",
    "--moe-aux-loss-coeff": "--model.moe.aux-loss",
    "--moe-z-loss-coeff": "--model.moe.z-loss",
    "--moe-input-jitter-eps": "--model.moe.jitter",
    "--moe-token-dispatcher-type": "--dispatcher",
    "--moe-enable-deepep": "--dispatcher deepep",
    # Nothing to type
    **dict.fromkeys(
        (
            *("--attention-softmax-in-fp32", "--bias-swiglu-fusion", "--no-gradient-accumulation-fusion"),
            *("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "--no-masked-softmax-fusion"),
            *("--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion", "--no-rope-fusion"),
            *("--transformer-impl", "--use-mcore-models"),
        ),
        _FUSED,
    ),
    **dict.fromkeys(
        (
            *("--calculate-per-token-loss", "--check-for-nan-in-loss-and-grad", "--log-throughput"),
            *("--moe-per-layer-logging", "--moe-shared-expert-overlap", "--no-position-embedding"),
        ),
        _ALWAYS,
    ),
    **dict.fromkeys(
        (
            *("--attention-backend", "--auto-detect-ckpt-format", "--ckpt-format", "--cp-comm-type"),
            *("--data-cache-path", "--distributed-backend", "--manual-gc", "--manual-gc-interval"),
            *("--no-create-attention-mask-in-dataloader", "--no-load-rng", "--num-workers"),
            *("--use-flash-attn",),
        ),
        _CHOSEN,
    ),
    **dict.fromkeys(
        (
            *("--data-parallel-sharding-strategy", "--fp4-format"),
            *("--moe-router-force-load-balancing",),
            *("--optimizer-cpu-offload", "--rampup-batch-size", "--squared-relu"),
            *("--use-megatron-fsdp", "--use-torch-fsdp2", "--eod-mask-loss"),
        ),
        _NO,
    ),
    "--moe-router-dtype": "leave it out, the router computes in float32",
    "--make-vocab-size-divisible-by": "leave it out, the vocabulary is padded to a multiple of 128 x tp",
    "--profile-ranks": "leave it out, rank 0 is profiled",
    **dict.fromkeys(("--nnodes", "--nproc-per-node"), "an option of fastmp launch, before train"),
}
