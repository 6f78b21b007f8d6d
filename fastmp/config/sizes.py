"""Sizes of a model by formula: parameters, by how ranks hold them, and floating-point operations.

Standard library only, so that `fastmp plan` answers at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass

from fastmp.config.model import GPTConfig
from fastmp.config.specs import ACTIVATIONS, NORMS

__all__ = [
    "ParameterCounts",
    "count_parameters",
    "flops_per_token",
    "head_flops_per_token",
    "head_parameters",
    "layer_flops_per_token",
    "layer_parameters",
    "mtp_parameters",
    "norm_parameters",
    "num_parameters",
    "pad_vocab",
    "position_parameters",
    "projection_flops_per_token",
]


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of a model: `sharded` over tensor-parallel ranks, `replicated` on them, or of `experts`.

    `chosen` counts those of the experts that one token goes to.
    """

    sharded: int
    replicated: int
    experts: int
    chosen: int

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.experts

    @property
    def active(self) -> int:
        """Parameters that a token uses."""
        return self.sharded + self.replicated + self.chosen

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __mul__(self, number: int) -> ParameterCounts:
        return ParameterCounts(*(number * count for count in astuple(self)))


def pad_vocab(vocab_size: int, tp: int, multiple: int = 128) -> int:
    """Return `vocab_size` rounded up to a multiple of `multiple` x `tp`.

    Example:
        >>> pad_vocab(50257, tp=8)
        51200
    """
    if vocab_size < 1 or tp < 1 or multiple < 1:
        raise ValueError(
            f"pad_vocab: sizes must be positive, got vocab_size {vocab_size}, tp {tp}, multiple {multiple}"
        )
    unit = multiple * tp
    return -(-vocab_size // unit) * unit


def layer_parameters(config: GPTConfig) -> ParameterCounts:
    """Count the parameters of one layer; with experts, where `config` describes some."""
    h, ffn, moe, attention = config.hidden_size, _dense_ffn(config), config.moe, config.attention
    sharded = (_projections(config) + 1) * h * ffn + attention.sinks
    replicated = 2 * norm_parameters(config) + sum(size for _, size in attention.norms)
    for each in attention.projections:  # a bias after the sum over ranks is replicated
        sharded += each.elements * (each.split != "") + each.outputs * (each.bias and each.split == "columns")
        replicated += each.elements * (each.split == "") + each.outputs * (each.bias and each.split == "rows")
    if config.linear_bias:
        sharded += _projections(config) * ffn
        replicated += h if ffn else 0
    experts = chosen = 0
    if moe is not None:
        replicated += _router(config) + moe.num_experts * moe.router_bias
        biases = (_projections(config) * moe.expert_ffn_hidden_size + h) * moe.linear_bias
        experts, chosen = (
            _experts(config, number) + number * biases for number in (moe.num_experts, moe.top_k)
        )
    return ParameterCounts(sharded, replicated, experts, chosen)


def mtp_parameters(config: GPTConfig) -> ParameterCounts:
    """Count the parameters of all MTP modules: their layers, projections and norms."""
    own = 2 * config.hidden_size**2 + 3 * norm_parameters(config)
    return (layer_parameters(config.layers[-1]) + ParameterCounts(0, own, 0, 0)) * config.mtp_depth


def norm_parameters(config: GPTConfig) -> int:
    """Count the parameters of a norm of hidden states."""
    return config.hidden_size * NORMS[config.norm].params_per_hidden


def position_parameters(config: GPTConfig) -> int:
    """Count the parameters of the table of positions; 0 where they are not learned."""
    return config.max_seq_len * config.hidden_size if config.position == "learned" else 0


def count_parameters(config: GPTConfig, vocab_size: int | None = None) -> ParameterCounts:
    """Count the parameters of a model, without its MTP modules.

    vocab_size: rows of the embedding counted, the real vocabulary by default.
    """
    V = config.vocab_size if vocab_size is None else vocab_size
    words = V * config.hidden_size * (1 if config.tie_embeddings else 2)
    # one norm behind the last layer, or behind the embeddings
    ends = position_parameters(config) + norm_parameters(config)
    total = ParameterCounts(words, ends, 0, 0) + head_parameters(config, V)
    for kind, number in Counter(config.layers).items():
        total += layer_parameters(kind) * number
    return total


def head_parameters(config: GPTConfig, vocab_size: int) -> ParameterCounts:
    """Count the parameters of a BERT's token types and both of its heads; 0 without `bert`."""
    bert, h = config.bert, config.hidden_size
    if bert is None:
        return ParameterCounts(0, 0, 0, 0)
    dense, sentence = h * h + h, (h * h + h + 2 * h + 2) * bert.sentence_order
    whole = bert.num_token_types * h + dense + norm_parameters(config) + sentence
    return ParameterCounts(vocab_size, whole, 0, 0)  # the bias of every word


def num_parameters(config: GPTConfig, vocab_size: int | None = None, *, active: bool = False) -> int:
    """Return the parameters of a model; 12Lh^2 + 13Lh + Vh + sh + 2h for a plain GPT (no GQA, ffn 4h).

    MTP modules are not counted.

    Args:
        vocab_size: rows of the embedding to count; None: the unpadded vocabulary.
        active: count only the experts that a token goes to.

    Example:
        >>> gpt2 = GPTConfig(num_layers=12, hidden_size=768, num_heads=12, max_seq_len=1024)
        >>> num_parameters(gpt2, vocab_size=50257)
        124439808
    """
    count = count_parameters(config, vocab_size)
    return count.active if active else count.total


def flops_per_token(
    config: GPTConfig,
    seq_len: int | None = None,
    *,
    causal: bool = False,
    vocab_size: int | None = None,
    predicted: int | None = None,
) -> float:
    """Return the model FLOPs of training on one token, forward and backward (3 x forward), GEMMs only.

    A multiply-add is two FLOPs. Experts count for the tokens that they get; recomputation does not count.
    MTP modules count, each with its layer, projection and logits.

    Args:
        causal: False counts the full S x S attention matrix, the convention of published MFU figures; True
            the keys that a token attends to on average, (S + 1) / 2. A sliding window limits either.
        vocab_size: columns of the logits to count; None: the unpadded vocabulary.
        predicted: tokens of a sequence with logits, see `DataConfig.predicted`; None: all.
    """
    S = config.max_seq_len if seq_len is None else seq_len
    V = config.vocab_size if vocab_size is None else vocab_size
    layers = sum(
        number * sum(layer_flops_per_token(kind, S, causal=causal))
        for kind, number in Counter(config.layers).items()
    )
    of_sequence = sum(head_flops_per_token(config, S, V, S if predicted is None else predicted))
    layer = sum(layer_flops_per_token(config.layers[-1], S, causal=causal))
    ahead = config.mtp_depth * (layer + projection_flops_per_token(config) + of_sequence)
    return 3 * (layers + of_sequence + ahead)


def projection_flops_per_token(config: GPTConfig) -> float:
    """Return the forward FLOPs of the projection of an MTP module on one token."""
    return 2.0 * 2 * config.hidden_size**2


def head_flops_per_token(
    config: GPTConfig, seq_len: int, columns: int, predicted: int
) -> tuple[float, float]:
    """Return the forward FLOPs a token after the layers: (of the logits, of a BERT's heads before them).

    columns: of the logits. predicted: tokens of a sequence that go through the head.
    """
    h, bert, share = config.hidden_size, config.bert, predicted / seq_len
    logits = 2.0 * h * columns * share
    if bert is None:
        return logits, 0.0
    return logits, 2.0 * h * h * share + 2.0 * h * (h + 2) * bert.sentence_order / seq_len


def layer_flops_per_token(config: GPTConfig, seq_len: int, *, causal: bool = False) -> tuple[float, float]:
    """Return the forward FLOPs of a layer on one token: (of the weights, of attention's scores and values).

    It is a layer with experts if `config.moe` is set; `config.layers` has the configuration of each layer.
    """
    matrices = _attention(config) + (_projections(config) + 1) * config.hidden_size * _dense_ffn(config)
    if config.moe is not None:
        matrices += _router(config) + _experts(config, config.moe.top_k)
    window = min(config.sliding_window or seq_len, seq_len)
    keys: float = window
    if causal and config.bert is None:  # the first tokens see fewer
        keys *= 1 - (window - 1) / (2 * seq_len)
    widths = config.attention.query_size + config.attention.value_size
    return 2.0 * matrices, 2.0 * config.num_heads * widths * keys


# Elements of the matrices of one layer.


def _attention(config: GPTConfig) -> int:
    return sum(each.elements for each in config.attention.projections)


def _router(config: GPTConfig) -> int:
    """Return the elements of the router and of the shared expert's gate."""
    assert config.moe is not None
    return config.hidden_size * (config.moe.num_experts + config.moe.shared_expert_gate)


def _experts(config: GPTConfig, number: int) -> int:
    assert config.moe is not None
    return number * (_projections(config) + 1) * config.hidden_size * config.moe.expert_ffn_hidden_size


def _dense_ffn(config: GPTConfig) -> int:
    """Return the hidden units that every token goes through: of the MLP, or of the shared expert."""
    return config.ffn_size if config.moe is None else config.moe.shared_expert_ffn_hidden_size


def _projections(config: GPTConfig) -> int:
    """Return how many ffn-wide projections an MLP's first GEMM makes: two where the activation has a gate."""
    return ACTIVATIONS[config.activation].num_projections
