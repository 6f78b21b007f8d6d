"""What `fastmp generate` does on each rank: groups, tokenizer, prompts, weights, then all texts at once."""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fastmp.apps.generation.load import ends_of, load_model, make_groups, model_tokenizer, open_weights
from fastmp.apps.generation.loop import Generated, check_prompts, generate
from fastmp.apps.generation.on_ranks import run_on_ranks
from fastmp.apps.generation.sample_text import check_choice
from fastmp.distributed.runtime import Runtime
from fastmp.training.checkpoint.load import agree
from fastmp.training.trainer import DTYPES

__all__ = ["run"]


def run(options: Namespace) -> int:
    """Generate as this process's whole program; returns the exit status, 2 for what the user did wrong.

    BrokenPipeError where nobody reads the texts any more.
    """
    return run_on_ranks("generate", partial(_generate, options), partial(_print, options.prompt))


def _print(prompts: list[str], generated: Generated) -> None:
    """Print all texts, and on stderr how fast they came; what stdout cannot encode is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    for number, (prompt, row) in enumerate(zip(prompts, generated.rows), 1):
        text = f"== prompt {number}: {row.reason}\n" * (len(prompts) > 1) + prompt + row.text
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
    print(_speed(generated), file=sys.stderr)


def _generate(options: Namespace, runtime: Runtime) -> Generated:
    check_choice(options.temperature, options.top_k, options.top_p)
    groups = make_groups(options, runtime.world_size, "generate")
    world = dist.group.WORLD if runtime.world_size > 1 else None
    reader, config = open_weights(options.checkpoint, options.hf, world, options.ignore)
    tokenizer = agree(world, partial(model_tokenizer, options, reader))
    ids = [tokenizer.encode_prompt(prompt) for prompt in options.prompt]
    room = config.max_seq_len + 1 - max(map(len, ids))
    new = options.max_new_tokens or max(min(128, room), 1)
    check_prompts(config, ids, new, min(config.vocab_size, tokenizer.vocab_size))
    auto = torch.bfloat16 if runtime.device.type == "cuda" else torch.float32
    dtype = DTYPES.get(options.dtype, auto)
    model = load_model(reader, config, groups, device=runtime.device, dtype=dtype)
    ends = {tokenizer.end_of_text} | (ends_of(Path(options.hf)) if options.hf else set())
    chosen = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    return generate(
        model,
        ids,
        max_new_tokens=new,
        tokenizer=tokenizer,
        stop=options.stop,
        ends=ends,
        seed=options.seed,
        groups=groups,
        **chosen,
    )


def _speed(generated: Generated) -> str:
    """A line on how fast it went."""
    prompts, new = generated.prompt_tokens, generated.decoded_tokens
    before, after = generated.prefill_seconds, generated.decode_seconds
    return (
        f"prompts: {prompts} tokens in {before:.3f} s, {prompts / before:.1f} tokens/s; after the first new "
        f"tokens: {new} in {after:.3f} s, {new / max(after, 1e-9):.1f} tokens/s"
    )
