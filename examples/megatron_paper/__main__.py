"""`python -m examples.megatron_paper`: the experiments of Shoeybi et al. 2019, with fastmp.

On several ranks: `fastmp launch -n N -m examples.megatron_paper COMMAND ...`.
"""

from __future__ import annotations

from fastmp.apps import cli

PROG = "python -m examples.megatron_paper"
COMMANDS = {
    "corpus": (
        "examples.megatron_paper.corpus.command",
        "build token files of a cleaned corpus; measure its overlap with a test set",
    ),
    "scaling": (
        "examples.megatron_paper.scaling.study",
        "model and data parallelism, as published, predicted, and measured",
    ),
    "finetune": (
        "examples.megatron_paper.finetune",
        "fine-tune a BERT on MNLI, QQP, SQuAD or RACE, with several seeds",
    ),
    "evaluate": (
        "examples.megatron_paper.evaluate",
        "evaluate a GPT on WikiText, LAMBADA or held-out text",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one of the commands above and return its exit status."""
    return cli.main(argv, PROG, COMMANDS, {})


if __name__ == "__main__":
    raise SystemExit(main())
