"""Direct calls of ops from Python: results and errors of the overload, to which all but plain calls go."""

import sys
import warnings

import numpy
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastmp.ops import OPS
from fastmp.ops.core import backends
from fastmp.testing.ops import samples

SCHEMA = OPS["cross_entropy"].overload._schema


def arguments(op: str = "cross_entropy") -> tuple:
    return samples(op, device="cpu", dtype=torch.float32)[0]


@pytest.fixture
def left() -> list[tuple]:
    """The arguments of the calls that were left to the overload."""
    return []


@pytest.fixture
def call(left):
    """A direct call of `cross_entropy` whose other way is recorded."""
    if backends.AUTOGRAD_ABSENT:
        pytest.skip(backends.AUTOGRAD_ABSENT)
    from fastmp import _C_autograd

    overload = OPS["cross_entropy"].overload
    return _C_autograd.caller(SCHEMA.name, lambda *given: left.append(given) or overload(*given))


def copied(given: tuple) -> list:
    return [x.clone() if isinstance(x, Tensor) else x for x in given]


@pytest.mark.parametrize("name", sorted(OPS))
def test_results_are_those_of_the_overload(name):
    """On all samples, with what the op writes."""
    op = OPS[name]
    for given in samples(name, device="cpu", dtype=torch.float32):
        ours, theirs = copied(given), copied(given)
        results = op.run(*ours), op.overload(*theirs)
        assert type(results[0]) is type(results[1])
        both = [torch.utils._pytree.tree_leaves(each) for each in zip(results, (ours, theirs))]
        for one, other in zip(*both, strict=True):
            if isinstance(one, Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            else:
                assert one == other or one is other


def test_plain_arguments_are_read_directly(call, left):
    given = arguments()
    expected = OPS["cross_entropy"].overload(*given)
    torch.testing.assert_close(call(*given), expected, rtol=0, atol=0, equal_nan=True)
    call(torch.nn.Parameter(given[0]), *given[1:])
    assert given[9] is False and not left


@pytest.mark.parametrize("place", [1, 4, 9])  # a tensor, an integer and a flag
def test_other_types_are_left_to_the_overload(place, call, left):
    class Tagged(Tensor):
        pass

    given = list(arguments())
    other = {1: given[1].as_subclass(Tagged), 4: numpy.int64(given[4]), 9: numpy.bool_(False)}[place]
    given[place] = other
    try:
        call(*given)
    except (TypeError, RuntimeError):  # the overload may refuse it; what matters is that it was asked
        pass
    assert len(left) == 1 and left[0][place] is other


@pytest.mark.parametrize(
    "change",
    [
        lambda given: given[:3],  # too few
        lambda given: [*given, *given],  # too many
        lambda given: [None, *given[1:]],
        lambda given: [*given[:4], "0", *given[5:]],
        lambda given: [*given[:4], 1 << 63, *given[5:]],
        lambda given: [*given[:7], "\udc00", *given[8:]],
    ],
)
def test_wrong_arguments_raise_what_the_overload_raises(change, call, left):
    given = change(list(arguments()))
    with pytest.raises((RuntimeError, TypeError)) as ours:
        call(*given)
    with pytest.raises(ours.type) as theirs:
        OPS["cross_entropy"].overload(*given)
    assert len(left) == 1 and str(ours.value) == str(theirs.value)


def test_an_error_of_a_kernel_has_its_words(call, left):
    given = list(arguments())
    given[5] = 0  # vocab_size
    with pytest.raises(RuntimeError, match=r"^cross_entropy: expected 0 <= vocab_start and a positive"):
        call(*given)
    assert not left


def test_an_integer_is_a_number(call, left):
    given = list(arguments())
    assert SCHEMA.arguments[8].name == "z_loss"
    expected = call(*given[:8], 1.0, *given[9:])
    torch.testing.assert_close(call(*given[:8], 1, *given[9:]), expected, rtol=0, atol=0, equal_nan=True)
    assert not left
    with pytest.raises((RuntimeError, OverflowError)):
        call(*given[:8], 10**400, *given[9:])
    assert len(left) == 1


def test_an_error_after_a_warning_is_the_error():
    """Both of a function to which the call is left: a subclass's, here."""

    class Failing(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            torch.ops.aten.numpy_T.default(torch.ones(2, 2, 2))  # warns
            raise NotImplementedError("as it says")

    x = torch.ones(2, 8).as_subclass(Failing)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an earlier one", stacklevel=1)
            with pytest.raises(NotImplementedError, match="as it says"):
                OPS["bias_gelu"].run(x, None, "tanh")
    finally:
        torch.set_warn_always(before)


def test_modes_see_the_call(call, left):
    seen = []

    def see(mode, function, types, given=(), kwargs=None):
        seen.append(function)
        return function(*given, **(kwargs or {}))

    for mode, method in (
        (TorchFunctionMode, "__torch_function__"),
        (TorchDispatchMode, "__torch_dispatch__"),
    ):
        seen.clear()
        with type("Mode", (mode,), {method: see})():
            call(*arguments())
        assert OPS["cross_entropy"].overload in seen
    assert len(left) == 1  # of functions; the dispatcher knows the others


def test_defaults_are_filled_in(call, left):
    given = arguments()
    assert SCHEMA.arguments[-1].name == "divisor"
    without = call(*given[:10])
    torch.testing.assert_close(without, call(*given[:10], None), rtol=0, atol=0, equal_nan=True)
    assert not left


def test_a_call_keeps_no_reference(call):
    given = arguments()
    before = [sys.getrefcount(x) for x in given]
    for _ in range(10):
        call(*given)
        with pytest.raises(RuntimeError):
            call(*given[:5], 0, *given[6:])
    assert [sys.getrefcount(x) for x in given] == before


def test_gradients_are_recorded(call):
    logits, *others = arguments()
    logits = logits.clone().requires_grad_()
    call(logits, *others)[0].sum().backward()
    assert logits.grad is not None
