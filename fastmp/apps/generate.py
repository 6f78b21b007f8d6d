"""`fastmp generate`: continue prompts with a trained model; torch is imported after parsing the arguments."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastmp.apps.first_rank import only_rank0_prints, run_on_ranks
from fastmp.apps.launch import check_ranks
from fastmp.config import ParallelConfig
from fastmp.config.command_line import Parser, number
from fastmp.config.console import Console, printable, to_stderr
from fastmp.config.options import DTYPES, dtype_name

if TYPE_CHECKING:
    from fastmp.apps.generation.batched import Generated
    from fastmp.distributed.runtime import Runtime

__all__ = ["add_model_options", "layout_of", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp generate` with the arguments `argv`; return the exit status (2: invalid arguments)."""
    with only_rank0_prints():
        parser = _parser()
        options = parser.parse_args(argv)
        check_ranks(parser, layout_of(options), "generate", list(argv or []))
    return run_on_ranks("fastmp generate", partial(_generate, options), partial(_print, options.prompt))


def _parser() -> Parser:
    parser = Parser(
        prog="fastmp generate",
        description="Continue prompts with a trained model, as one batch. On several ranks: fastmp launch "
        "-n N generate ...; the remaining ranks form the data-parallel dimension and share the prompts."
        "\n\n  fastmp generate --checkpoint runs/gpt --prompt 'def main' --max-new-tokens 64",
    )
    add = parser.add_argument
    add(
        "--prompt", metavar="TEXT", action="append", required=True,
        help="text to continue; may be repeated",
    )  # fmt: skip
    add(
        "--max-new-tokens", metavar="N", type=number(int, 1),
        help="new tokens for each prompt (128, or as many as fit the model's positions)",
    )  # fmt: skip
    add(
        "--temperature", metavar="T", type=number(float, 0), default=1.0,
        help="divisor of the logits; 0: greedy decoding (1)",
    )  # fmt: skip
    add(
        "--top-k", metavar="K", type=number(int, 0), default=0,
        help="sample among the K most likely tokens; 0: all tokens (0)",
    )  # fmt: skip
    add(
        "--top-p", metavar="P", type=number(float, 0), default=1.0,
        help="sample among the most likely tokens with total probability P [nucleus sampling] (1)",
    )  # fmt: skip
    add(
        "--stop", metavar="TEXT", action="append", type=_text, default=[],
        help="end a continuation before this text; may be repeated",
    )  # fmt: skip
    add(
        "--seed", metavar="N", type=number(int, 0), default=0,
        help="random seed; prompt i uses N + i, from i = 0 (0)",
    )  # fmt: skip
    add(
        "--speculative", action="store_true",
        help="draft tokens with the model's MTP modules, verify them together: the same texts in fewer steps",
    )  # fmt: skip
    add_model_options(parser, "dtype of weights and KV cache")
    return parser


def add_model_options(parser: Parser, of_dtype: str) -> None:
    """Add the options that select a trained model, its dtype and its parallel layout."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint", metavar="DIR", help="a checkpoint, or the directory of a run for its latest one"
    )
    source.add_argument("--hf", metavar="DIR", help="a transformers model: config.json and safetensors files")
    add = parser.add_argument
    add(
        "--tokenizer", metavar="FILE",
        help="byte, a tokenizer.json, or its directory (the tokenizer of the run or of the model)",
    )  # fmt: skip
    add(
        "--dtype", choices=DTYPES, type=dtype_name, default="auto",
        help=f"{of_dtype}; auto: bfloat16 on a GPU, float32 on a CPU",
    )  # fmt: skip
    for axis, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        text = f"{what}-parallel ranks (1)"
        add(f"--{axis}", metavar="N", type=number(int, 1), default=1, help=text)
    add("--etp", metavar="N", type=number(int, 1), help="tensor-parallel ranks of each expert (--tp)")
    text = "ignore this unknown key of config.json; may be repeated"
    add("--ignore", metavar="NAME", action="append", default=[], help=text)


def layout_of(options: Namespace) -> ParallelConfig:
    """Return the parallel layout of options that `add_model_options` has added."""
    cp = getattr(options, "cp", 1)  # not an option of `generate`
    return ParallelConfig(tp=options.tp, cp=cp, pp=options.pp, ep=options.ep, etp=options.etp)


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _generate(options: Namespace, runtime: Runtime) -> Generated:
    """Load the model on all ranks and continue the prompts."""
    import torch
    import torch.distributed as dist

    from fastmp.apps.generation.batched import check_prompts, generate
    from fastmp.apps.generation.incremental import check_speculation
    from fastmp.apps.generation.sample_text import check_choice
    from fastmp.apps.generation.trained_models import (
        eos_token_ids,
        load_model,
        make_groups,
        model_tokenizer,
        open_weights,
    )
    from fastmp.training.checkpoint.collective_load import agree
    from fastmp.training.trainer import DTYPES

    check_choice(options.temperature, options.top_k, options.top_p)
    groups = make_groups(options, runtime.world_size)
    world = dist.group.WORLD if runtime.world_size > 1 else None
    reader, config = open_weights(options.checkpoint, options.hf, world, options.ignore)
    tokenizer = agree(world, partial(model_tokenizer, options, reader))
    ids = [tokenizer.encode_prompt(prompt) for prompt in options.prompt]
    check_speculation(config, options.speculative)
    config = replace(config, mtp_depth=config.mtp_depth if options.speculative else 0)
    positions_left = config.max_seq_len + 1 - config.mtp_depth - max(map(len, ids))
    new = options.max_new_tokens or max(min(128, positions_left), 1)
    check_prompts(config, ids, new, min(config.vocab_size, tokenizer.vocab_size), drafts=config.mtp_depth)
    auto = torch.bfloat16 if runtime.device.type == "cuda" else torch.float32
    dtype = DTYPES.get(options.dtype, auto)
    model = load_model(reader, config, groups, device=runtime.device, dtype=dtype)
    return generate(
        model,
        ids,
        max_new_tokens=new,
        tokenizer=tokenizer,
        stop=options.stop,
        ends={tokenizer.end_of_text} | (eos_token_ids(Path(options.hf)) if options.hf else set()),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        speculative=options.speculative,
        groups=groups,
    )


def _print(prompts: list[str], generated: Generated) -> None:
    """Print all texts, on a terminal without control characters, and the speed on stderr."""
    shown = printable if Console(sys.stdout).is_terminal else str
    for i, (prompt, row) in enumerate(zip(prompts, generated.rows), 1):
        print(f"== prompt {i}: {row.reason}\n" * (len(prompts) > 1) + shown(prompt + row.text), flush=True)
    prompt_tokens, new = generated.prompt_tokens, generated.decoded_tokens
    prefill, decode = generated.prefill_seconds, generated.decode_seconds
    to_stderr(
        f"prompts: {prompt_tokens} tokens in {prefill:.3f} s, {prompt_tokens / prefill:.1f} tokens/s; after "
        f"the first new tokens: {new} in {generated.decode_steps} steps and {decode:.3f} s, "
        f"{new / max(decode, 1e-9):.1f} tokens/s",
    )
