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
    "finetune.path": "--data",
    "finetune.init_from": "--init-from",
    "finetune.name": "--name",
    "finetune.seeds": "--seeds",
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
    "fine-tuning": (
        *("finetune.path", "finetune.init_from", "finetune.tokenizer", "finetune.name", "finetune.seeds"),
        *("finetune.batch_size", "finetune.micro_batch_size", "finetune.epochs", "finetune.dtype"),
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
        *("train.dtype", "optimizer.name", "optimizer.lr", "optimizer.warmup_steps"),
        *("optimizer.schedule", "optimizer.clip_grad_norm"),
    ),
    "checkpoints": ("checkpoint.interval", "checkpoint.keep", "checkpoint.resume", "checkpoint.init_from"),
    "speed": ("graphs.enabled", "graphs.scope", "train.profile", "train.profile_steps"),
}
ORDER = ("finetune", "train", "data", "parallel", "optimizer", "checkpoint", "graphs", "model")  # of tables
METAVARS = {
    **dict.fromkeys(("path", "validation_path", "init_from", "tokenizer"), "PATH"),
    **{"run_dir": "DIR", "max_time": "TIME", "resume": "auto|PATH", "blend": "'WEIGHT PATH'"},
}  # of options that hold a text, by the name of the field
DTYPE_ALIASES = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16"},
    **{"fp32": "float32", "float": "float32"},
}
# Options of Megatron-LM, torchtitan and transformers, and what to type here.
SYNONYMS = {
    "--config": "--recipe",
    "--config-file": "--recipe",
    "--job.config-file": "--recipe",
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--tensor-parallel": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--pipeline-parallel": "--pp",
    "--num-virtual-stages-per-pipeline-rank": "--vpp",
    "--context-parallel-size": "--cp",
    "--expert-model-parallel-size": "--ep",
    "--expert-parallel": "--ep",
    "--expert-tensor-parallel-size": "--etp",
    "--use-distributed-optimizer": "--optimizer.shard (enabled by default)",
    "--recompute-activations": "--parallel.recompute",
    "--recompute-granularity": "--parallel.recompute",
    "--activation-checkpointing": "--parallel.recompute",
    "--gradient-checkpointing": "--parallel.recompute",
    "--gradient-accumulation-steps": "--train.global-batch-size",
    "--batch-size": "--data.micro-batch-size or --train.global-batch-size",
    "--train-iters": "--steps",
    "--max-steps": "--steps",
    "--iterations": "--steps",
    "--seq-length": "--data.seq-len",
    "--sequence-length": "--data.seq-len",
    "--learning-rate": "--optimizer.lr",
    "--lr-decay-style": "--optimizer.schedule",
    "--lr-warmup-iters": "--optimizer.warmup-steps",
    "--warmup": "--optimizer.warmup-steps",
    "--clip-grad": "--optimizer.clip-grad-norm",
    "--data-path": "--data.path",
    "--data": "--data.path",
    "--load": "--resume",
    "--save": "--train.run-dir and --name",
    "--output-dir": "--train.run-dir",
    "--save-interval": "--checkpoint.interval",
    "--bf16": "--train.dtype bfloat16",
    "--fp16": "--train.dtype float16",
    "--dtype": "--train.dtype",
    "--swiglu": "--model.activation swiglu",
    "--num-experts": "--model.moe.num-experts",
    "--moe-router-topk": "--model.moe.top-k",
    "--moe-token-dispatcher-type": "--dispatcher",
    "--num-attention-heads": "--model.num-heads",
    "--num-query-groups": "--model.num-kv-heads",
    "--max-position-embeddings": "--model.max-seq-len",
    "--wandb-project": "--train.sinks wandb",
    "--tensorboard-dir": "--train.sinks tensorboard",
    "--cuda-graph-scope": "--graphs.scope",
    "--cuda-graph-impl": "--graphs",
    "--enable-cuda-graph": "--graphs",
}
