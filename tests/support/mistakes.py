"""Wrong commands and wrong calls, and what fastmp answers: tests/golden/mistakes.txt.

    python tests/support/mistakes.py > tests/golden/mistakes.txt

Read the difference like a user: does each answer say what was expected, what was given and what to type next?
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "mistakes.txt"

# Answered before torch is imported.
COMMANDS = """
fastmp
fastmp trian configs/gpt-small.toml
fastmp pretrain configs/gpt-small.toml --tp 2
fastmp configs/gpt-small.toml --steps 10
fastmp frobnicate
fastmp --verbose train
fastmp train configs/gpt-smal.toml
fastmp train gpt-small
fastmp train pyproject.toml
fastmp train configs/gpt-small.toml configs/moe-small.toml
fastmp train --config configs/gpt-small.toml
fastmp train configs/gpt-small.toml --lr 1e-3
fastmp train configs/gpt-small.toml --train-iters 100
fastmp train configs/gpt-small.toml --tensor-model-parallel-size 2
fastmp train configs/gpt-small.toml --batch-size 4
fastmp train configs/gpt-small.toml --bf16
fastmp train configs/gpt-small.toml --moe-grouped-gemm
fastmp train configs/gpt-small.toml --num-experts 8 --moe-layer-freq 1 --fp4-format e2m1
fastmp train configs/gpt-small.toml --optimizer.warmup-step 10
fastmp train configs/gpt-small.toml --whatever 10
fastmp train configs/gpt-small.toml --steps
fastmp train configs/gpt-small.toml --steps ten
fastmp train configs/gpt-small.toml --steps 10:13
fastmp train configs/gpt-small.toml --profile-steps 10
fastmp train configs/gpt-small.toml --profile nsight
fastmp train configs/gpt-small.toml --optimizer.name adam
fastmp train configs/gpt-small.toml --optimizer.schedule cosin
fastmp train configs/gpt-small.toml --optimizer.lr -1
fastmp train configs/gpt-small.toml --train.dtype fp8
fastmp train configs/gpt-small.toml --parallel.sequence-parallel true
fastmp train configs/gpt-small.toml --optimizer.shard=false
fastmp train configs/gpt-small.toml --graphs.scope full
fastmp train configs/gpt-small.toml --max-time tomorrow
fastmp train configs/gpt-small.toml --train.sinks mlflow
fastmp train configs/gpt-small.toml --tp 2 --steps 2
fastmp train configs/gpt-small.toml --tp 4
fastmp train configs/gpt-small.toml --model.num-heads 7 --optimizer.betas 0.9 1.0
fastmp train configs/llama-3-8b.toml
fastmp train configs/moe-small.toml --model.moe.top-k 16
fastmp plan
fastmp plan configs/llama-3-8b.toml --world-size 64
fastmp plan memory configs/llama-3-8b.toml --world-size 64
fastmp plan recipe configs/llama-3-8b.toml
fastmp plan recipe configs/llama-3-8b.toml --world-size 10
fastmp plan time configs/llama-3-8b.toml --world-size 64 --hardware a6000
fastmp plan schedule --pp 4 --vpp 2 --num-microbatches 6
fastmp plan graphs configs/moe-small.toml --world-size 1 --graphs.scope moe_experts
fastmp generate --prompt hi
fastmp generate --hf Qwen3-0.6B --checkpoint runs/gpt --prompt hi
fastmp generate --checkpoint runs/gpt --prompt hi --temperature -1
fastmp generate --checkpoint runs/gpt --prompt hi --tp 2 --pp 2
fastmp eval mmlu questions.json --hf model
fastmp eval heldout
fastmp eval wikitext wiki.test.tokens --hf model
fastmp finetune mnli --data glue/MNLI
fastmp hf import
fastmp hf convert model out
fastmp checkpoint verfy runs/gpt
fastmp data build --input notes.txt
fastmp data biuld --input notes.txt --out tokens
fastmp data build --input notes.txt --out tokens --dedup-jaccard 0.7
fastmp data overlap notes.txt tokens
fastmp warm
fastmp verify my_layer.py
fastmp verify pyproject.toml
fastmp verify setup.py --layouts tp
fastmp verify setup.py --case
fastmp hang runs/none
"""

# Answered after torch is imported, which takes seconds of a command.
HEAVY = """
fastmp launch
fastmp launch -n 2 trian configs/gpt-small.toml
fastmp launch -n 2 configs/gpt-small.toml
fastmp launch --gpus 2 train configs/gpt-small.toml
fastmp launch -n two train configs/gpt-small.toml
fastmp launch -n 2 finetune mnli --data glue/MNLI
fastmp train configs/gpt-small.toml --data.path nowhere
fastmp train configs/gpt-small.toml --data.path docs
fastmp train configs/gpt-small.toml --data.seq-len 1024
fastmp train configs/gpt-small.toml --resume runs/none
fastmp train configs/gpt-small.toml --init-from Qwen/Qwen3-0.6B
fastmp generate --checkpoint runs/none --prompt hi
fastmp generate --hf Qwen/Qwen3-0.6B --prompt hi
fastmp generate --hf docs --prompt hi
fastmp eval heldout nofile --hf nodir
fastmp hf import Qwen/Qwen3-0.6B
fastmp hf export runs/none out
fastmp data build --input *.nothing --out data/x
fastmp data build --input docs --out data/x
fastmp data check docs
fastmp checkpoint verify runs/none
fastmp checkpoint diff runs/none runs/nothing
"""

SETUP = """
import torch
from torch import nn
import fastmp
from fastmp.config import CheckpointConfig, DataConfig, GPTConfig, GraphConfig, MaskedLMConfig, MoEConfig
from fastmp.config import OptimizerConfig, ParallelConfig, TrainConfig
from fastmp.distributed import ParallelGroups, RankGrid
from fastmp.nn import GPT, Bert
from fastmp.nn.moe import MoELayer
from fastmp.ops import *
from fastmp.optim import clip_coefficient
from fastmp.tensor_parallel import ColumnParallelLinear, RowParallelLinear
torch.manual_seed(0)
x, t, W = torch.randn(8, 64), torch.randint(64, (8,)), torch.randn(100, 64)
q, k, cos = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64), torch.randn(16, 32)
small = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=100, max_seq_len=8)
def backward_twice():
    loss = linear_cross_entropy(x, W.clone().requires_grad_(), t, reduction="none", loss_grad=1.0).sum()
    loss.backward(retain_graph=True)
    loss.backward()
"""

CALLS = """
cross_entropy(x, t[:5])
cross_entropy(x, t.int())
cross_entropy(x, t.float())
cross_entropy(x, torch.rand(8, 64))
cross_entropy(torch.randn(2, 64, 7), torch.randint(64, (2, 9)))
cross_entropy(x, t, reduction="avg")
cross_entropy(x, t, weight=torch.ones(3))
cross_entropy(x, t, label_smoothing=2.0)
cross_entropy(x, torch.full((8,), 64))
linear_cross_entropy(W, x, t)
linear_cross_entropy(x[:, :32], W, t)
linear_cross_entropy(x.bfloat16(), W, t)
linear_cross_entropy(x, W, t[:5])
rms_norm(x, torch.ones(32))
rms_norm(x, torch.ones(64, device="meta"))
rms_norm(x.long(), torch.ones(64))
layer_norm(x, torch.ones(64), torch.zeros(63))
swiglu(torch.randn(4, 7))
swiglu(torch.randn(4, 8), torch.randn(4, 6))
bias_gelu(x, torch.zeros(63))
bias_gelu(x, approximate="erf")
bias_dropout_add(x, torch.zeros(64), x, p=1.5)
bias_dropout_add(x, torch.zeros(64), x[:4], p=0.1)
rope_qk(q, k, cos, cos)
rope(q, cos[:, :16], cos[:, :16])
scaled_masked_softmax(torch.randn(2, 4, 8, 8), torch.zeros(8, 8))
topk_router(torch.randn(8, 4), 5)
topk_router(torch.randn(8, 4), 0)
permutation(torch.randint(4, (8, 2)), 4)
grouped_mm(torch.randn(16, 32), torch.randn(4, 48, 31), torch.tensor([4, 8, 12, 16], dtype=torch.int32))
grouped_mm(torch.randn(16, 32), torch.randn(4, 48, 32), torch.tensor([4, 8, 12, 16]))
grouped_mm(torch.randn(16, 32), torch.randn(4, 48, 32), torch.tensor([4, 8], dtype=torch.int32))
RankGrid(world_size=8, tp=3)
RankGrid(world_size=8, ep=16)
RankGrid(world_size=8, tp=0)
ParallelGroups.create(RankGrid(world_size=2, tp=2))
ColumnParallelLinear(64, 128)
ColumnParallelLinear.from_linear(nn.Linear(4, 4))
RowParallelLinear.from_linear(nn.Conv2d(3, 4, 1), group=None)
GPTConfig(hidden_size=100, num_heads=6)
GPTConfig(hidden=100)
GPTConfig(activation="relu")
GPTConfig(num_heads=8, num_kv_heads=3)
MoEConfig(num_experts=4, top_k=8, aux_loss=-1)
MoEConfig(dispatcher="deep_ep")
ParallelConfig(tp=0, schedule="gpipe")
OptimizerConfig(lr=1e-5)
TrainConfig(dtype="fp8", name="runs/mine")
GPT(small)(torch.tensor([[1, 2, 300]]))
GPT(small)(torch.tensor([1, 2, 3]))
GPT(small)(torch.zeros(1, 9, dtype=torch.long))
GPT(small)(torch.zeros(1, 8))
MoELayer(small)
Bert(small)
rope_cos_sin(8, dim=7)
clip_coefficient(torch.ones(()), -1.0)
linear_log_probs(x, W, t, temperature=0.0)
linear_distillation(x, W, x, W[:8])
linear_distillation(x, W, x, W, divergence="kl")
linear_topk_distillation(x, W, t, t.float())
permute(x, torch.zeros(5, 2, dtype=torch.int32), 16)
backward_twice()
fastmp.init(backend="mpi")
fastmp.init(join_seconds=-1)
MaskedLMConfig(mask_fraction=0.9)
DataConfig(blend=("data/web", "0.3 data/books"))
CheckpointConfig(interval=-5)
GraphConfig(scope=("full_step", "attn"))
"""


def lines(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line]


def answer_command(line: str) -> str:
    """Return the command, its output and its status, as a terminal would show them."""
    from fastmp.apps.cli import main

    shown = io.StringIO()
    before = os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                status = main(shlex.split(line)[1:])
            except SystemExit as leaving:
                status = leaving.code
    finally:
        os.chdir(before)
    return f"$ {line}\n{shown.getvalue().rstrip()}\n(status {status})\n"


def answer_call(code: str, scope: dict[str, object]) -> str:
    """Return the call and the error that it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = eval(code, scope)
    except Exception as error:
        kind = type(error).__name__
        return f">>> {code}\n{kind}: {error}\n"
    return f">>> {code}\nno error: {type(value).__name__}\n"


def answers_to_commands(commands: str) -> list[str]:
    return [answer_command(line) for line in lines(commands)]


def answers_to_calls() -> list[str]:
    scope: dict[str, object] = {}
    exec(SETUP, scope)
    return [answer_call(code, scope) for code in lines(CALLS)]


def golden() -> list[str]:
    """Return the expected answers, one for each mistake."""
    return re.split(r"\n(?=[$] |>>> )", GOLDEN.read_text())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    print(
        "\n".join([*answers_to_commands(COMMANDS), *answers_to_commands(HEAVY), *answers_to_calls()]), end=""
    )
