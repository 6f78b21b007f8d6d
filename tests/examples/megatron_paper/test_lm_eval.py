"""The command beside lm-eval, which evaluates with transformers what `fastmp hf export` has written."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import tokenizer_tools
from train_tools import arguments

from examples.megatron_paper.__main__ import main as paper
from fastmp.apps.cli import main
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenize import load_tokenizer

missing = [name for name in ("lm_eval", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]
LENGTH = 32  # positions of the model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that has learnt how lines end, on GPT-2's kind of tokens, and what transformers has of it."""
    folder = tmp_path_factory.mktemp("lm_eval")
    tokenizer_tools.gpt2(folder / "tokenizer")
    text = "".join(f"{i} times {i} is {i * i}{', the dog said.' * (i % 2)}\n" for i in range(300))
    (folder / "text.txt").write_text(text)
    tokens = build([str(folder / "text.txt")], folder / "tokens", tokenizer=str(folder / "tokenizer"))
    options = {
        "train__steps": 200,
        "checkpoint__interval": 200,
        "train__eval_interval": 200,
        "optimizer__lr": 0.02,
        "model__hidden_size": 32,
    }
    assert main(["train", *arguments(folder / "runs", tokens, **options)]) == 0
    assert main(["hf", "export", str(folder / "runs" / "tiny"), str(folder / "model")]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    from lm_eval.models.huggingface import HFLM
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    model = GPT2LMHeadModel.from_pretrained(folder / "model").eval()
    return HFLM(pretrained=model, tokenizer=tokenizer, max_length=LENGTH, batch_size=4)


def request(kind, *given):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=given, idx=0)


def ours(task, folder, data, *options):
    out = folder / f"{task}.json"
    command = ["evaluate", task, data, "--checkpoint", folder / "runs" / "tiny", "--out", out, *options]
    assert paper([*map(str, command)]) == 0
    return json.loads(out.read_text())


def test_rolling_log_likelihood(folder, theirs):
    """Of a text that whole windows fill: a rest theirs sees behind more of the text."""
    tokenizer, text = load_tokenizer(folder / "tokenizer"), ""
    for line in (folder / "text.txt").read_text().splitlines(keepends=True):
        text += line
        if len(tokenizer.encode(text)) % LENGTH == 0:
            break
    assert len(tokenizer.encode(text)) >= 2 * LENGTH and len(tokenizer.encode(text)) % LENGTH == 0
    (folder / "whole.txt").write_text(text)
    made = ours("heldout", folder, folder / "whole.txt", "--window", LENGTH)
    (expected,) = theirs.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert made["nats"] == pytest.approx(-expected, rel=1e-6)
    assert made["num_tokens"] == len(tokenizer.encode(text))


def test_overlapping_windows(folder, theirs):
    """The windows of `wikitext`, each as a continuation of the tokens that it does not score."""
    from examples.megatron_paper.evaluation.wikitext import detokenize
    from fastmp.apps.evaluation.tasks import ScoringWindows

    words = "".join(f" The {i} @-@ th dog 's end , and {i} @,@ 000 mats . \n" for i in range(9))
    (folder / "wiki.tokens").write_text(words)
    tokenizer = load_tokenizer(folder / "tokenizer")
    ids = [tokenizer.end_of_text, *tokenizer.encode(detokenize(words)).tolist()]
    requests = []
    for window in ScoringWindows(len(ids) - 1, LENGTH, 5):
        middle = window.end + 1 - window.scored
        requests.append((None, ids[window.begin : middle], ids[middle : window.end + 1]))
    expected = sum(log_prob for log_prob, _ in theirs._loglikelihood_tokens(requests))
    made = ours("wikitext", folder, folder / "wiki.tokens", "--stride", 5)
    assert made["nats"] == pytest.approx(-expected, rel=1e-6)


def test_last_words(folder, theirs):

    texts = [line for line in (folder / "text.txt").read_text().split("\n")[:40] if line]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pairs = [text.rpartition(" ")[::2] for text in texts]
    found = theirs.loglikelihood([request("loglikelihood", a, f" {b}") for a, b in pairs])
    made = ours("lambada", folder, folder / "lambada.jsonl")
    assert made["nats"] == pytest.approx(-sum(log_prob for log_prob, _ in found), rel=1e-6)
    assert made["num_correct"] == sum(greedy for _, greedy in found)
    assert 0 < made["num_correct"] < made["num_examples"] == len(texts)
