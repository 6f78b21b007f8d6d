"""The layout of flat buffers: which element lies where, and who owns it."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmp.optim.flat_layout import (
    Bucket,
    ParamSpec,
    Piece,
    bucket_layout,
    owner_ranks,
    plan_buffers,
    shard_ranges,
    whole_layout,
)

SIZES = st.lists(st.integers(0, 300), max_size=12)


def test_four_parameters_over_four_ranks():
    """In a buffer of 16 elements each rank owns four: parts of one or of two parameters."""
    assert shard_ranges([3, 7, 1, 5], 4) == [
        [Piece(0, (0, 3), (0, 3), (0, 3)), Piece(1, (3, 4), (3, 4), (0, 1))],
        [Piece(1, (4, 8), (0, 4), (1, 5))],
        [
            Piece(1, (8, 10), (0, 2), (5, 7)),
            Piece(2, (10, 11), (2, 3), (0, 1)),
            Piece(3, (11, 12), (3, 4), (0, 1)),
        ],
        [Piece(3, (12, 16), (0, 4), (1, 5))],
    ]


def test_the_last_rank_owns_the_padding():
    assert shard_ranges([5], 2) == [[Piece(0, (0, 3), (0, 3), (0, 3))], [Piece(0, (3, 5), (0, 2), (3, 5))]]
    assert shard_ranges([1], 3) == [[Piece(0, (0, 1), (0, 1), (0, 1))], [], []]
    assert shard_ranges([], 2) == [[], []]


def test_parameters_come_in_reverse_at_multiples_of_64():
    layout = bucket_layout({"first": 100, "second": 64, "third": 1}, 2)
    assert layout.ranges == {"third": (0, 1), "second": (64, 128), "first": (128, 228)}
    assert list(layout.ranges) == ["third", "second", "first"]
    assert layout.buckets == (Bucket(0, 256, ("third", "second", "first")),)


def test_buckets_are_full_or_of_one_parameter():
    sizes = {"embedding": 1000, "a": 70, "b": 70, "c": 300}
    layout = bucket_layout(sizes, 3, bucket_size=200, own_bucket=["embedding"])
    assert layout.buckets == (
        Bucket(0, 384, ("c",)),
        Bucket(384, 768, ("b", "a")),
        Bucket(768, 768 + 1152, ("embedding",)),
    )
    assert layout.shards(1) == [(128, 256), (512, 640), (1152, 1536)]
    wide = bucket_layout(sizes, 3, bucket_size=200, unit=1 << 16)
    assert [bucket.end - bucket.start for bucket in wide.buckets] == [3 << 16] * 2


def test_what_lies_before_one_that_is_alone_has_its_own_bucket():
    layout = bucket_layout({"a": 1, "tied": 1, "b": 1}, 1, own_bucket=["tied"])
    assert [bucket.names for bucket in layout.buckets] == [("b",), ("tied",), ("a",)]


def every_element_has_one_owner(sizes: list[int], pieces: list[list[Piece]], size: int) -> None:
    owned = [0] * size
    parts: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for of_rank in pieces:
        taken: set[int] = set()
        for piece in of_rank:
            length = piece.global_range[1] - piece.global_range[0]
            assert length > 0
            assert (
                length
                == piece.shard_range[1] - piece.shard_range[0]
                == piece.param_range[1] - piece.param_range[0]
            )
            local = set(range(*piece.shard_range))
            assert not local & taken and max(local) < size // len(pieces)
            taken |= local
            for element in range(*piece.global_range):
                owned[element] += 1
            parts[piece.parameter].append(piece.param_range)
    assert max(owned, default=0) <= 1
    assert sum(owned) == sum(sizes)
    for length, found in zip(sizes, parts, strict=True):
        assert sorted(e for part in found for e in range(*part)) == list(range(length))


@given(SIZES, st.integers(1, 9))
def test_shard_ranges_cover_every_element_once(sizes, num_ranks):
    each = -(-sum(sizes) // num_ranks)
    every_element_has_one_owner(sizes, shard_ranges(sizes, num_ranks), each * num_ranks)


@given(
    SIZES,
    st.integers(1, 9),
    st.none() | st.integers(1, 700),
    st.sampled_from([1, 128, 512]),
    st.sets(st.integers(0, 11)),
)
def test_bucket_layouts_cover_every_element_once(sizes, num_ranks, bucket_size, unit, alone):
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    alone = {f"p{i}" for i in alone} & named.keys()
    layout = bucket_layout(named, num_ranks, bucket_size=bucket_size, unit=unit, own_bucket=alone)
    in_order = [named[name] for name in layout.ranges]
    assert [end - start for start, end in layout.ranges.values()] == in_order
    every_element_has_one_owner(
        in_order, [[*layout.pieces(r).values()] for r in range(num_ranks)], layout.size
    )
    assert [name for bucket in layout.buckets for name in bucket.names] == [*reversed(named)]
    before = 0
    for bucket in layout.buckets:
        assert bucket.start == before
        assert (bucket.end - bucket.start) % num_ranks == (bucket.end - bucket.start) % unit == 0
        assert len(bucket.names) == 1 or not alone & set(bucket.names)
        for name in bucket.names:
            start, end = layout.ranges[name]
            assert bucket.start <= start <= end <= bucket.end and start % 64 == 0
        before = bucket.end
    assert before == layout.size


def test_each_part_of_a_bucket_has_whole_parameters():
    """The dearest, `a`, has a rank to itself; the parts are as long as the longest."""
    layout = whole_layout({"a": 100, "b": 70, "c": 10}, {"a": 9, "b": 5, "c": 4}, 2)
    assert layout.ranges == {"a": (0, 100), "c": (192, 202), "b": (256, 326)}
    assert layout.buckets == (Bucket(0, 384, ("a", "c", "b")),)
    assert layout.pieces(1)["b"] == Piece(2, (256, 326), (64, 134), (0, 70))


def test_a_bucket_of_whole_parameters_closes_where_its_parts_are_even():
    sizes = {f"w{i}": 128 for i in range(7)}
    layout = whole_layout(sizes, sizes, 2, bucket_size=1)
    assert [bucket.names for bucket in layout.buckets] == [("w6", "w5"), ("w4", "w3"), ("w2", "w1"), ("w0",)]
    assert [bucket.end - bucket.start for bucket in layout.buckets] == [256] * 4


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 9)), max_size=12),
    st.integers(1, 9),
    st.integers(1, 700),
    st.sampled_from([1, 128, 512]),
)
def test_whole_layouts_cut_no_parameter(parameters, num_ranks, bucket_size, unit):
    sizes = {f"p{i}": size for i, (size, _) in enumerate(parameters)}
    costs = {f"p{i}": cost for i, (_, cost) in enumerate(parameters)}
    layout = whole_layout(sizes, costs, num_ranks, bucket_size=bucket_size, unit=unit)
    assert {name: end - start for name, (start, end) in layout.ranges.items()} == sizes
    pieces = [layout.pieces(rank) for rank in range(num_ranks)]
    in_order = [sizes[name] for name in layout.ranges]
    every_element_has_one_owner(in_order, [[*of_rank.values()] for of_rank in pieces], layout.size)
    owners = owner_ranks(costs, num_ranks)
    for rank, of_rank in enumerate(pieces):
        assert of_rank.keys() == {name for name in sizes if sizes[name] and owners[name] == rank}
        assert all(piece.param_range == (0, sizes[name]) for name, piece in of_rank.items())
    for bucket in layout.buckets:
        assert (bucket.end - bucket.start) % num_ranks == (bucket.end - bucket.start) % unit == 0
        assert all(layout.ranges[name][0] % 64 == 0 for name in bucket.names)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_homes_are_at_most_a_third_above_the_best(costs, num_ranks):
    def most(owners):
        return max(sum(cost for cost, owner in zip(costs, owners) if owner == r) for r in range(num_ranks))

    best = min(most(owners) for owners in product(range(num_ranks), repeat=len(costs)))
    assert (
        most(owner_ranks({f"p{i}": cost for i, cost in enumerate(costs)}, num_ranks).values()) <= 4 / 3 * best
    )


def test_whole_parameters_have_buffers_of_their_own():
    facts = {
        "matrix": ParamSpec(100, "float32", cost=8),
        "vector": ParamSpec(10, "float32"),
        "experts": ParamSpec(300, "float32", experts=True, cost=24),
    }
    buffers = plan_buffers(facts, num_ranks=2, num_expert_ranks=3)
    found = {name: (b.whole, b.experts, b.layout.num_ranks) for b in buffers for name in b.layout.ranges}
    assert found == {"matrix": (True, False, 2), "vector": (False, False, 2), "experts": (True, True, 3)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: whole_layout({"w": -1}, {"w": 1}, 2), "whole_layout: parameter w must not have a negative"),
        (lambda: whole_layout({}, {}, 2, bucket_size=0), "whole_layout: bucket_size must be at least 1"),
        (lambda: shard_ranges([1], 0), "shard_ranges: there must be at least one rank, got 0"),
        (lambda: shard_ranges([1, -2], 2), "shard_ranges: parameter 1 must not have a negative size, got -2"),
        (lambda: bucket_layout({"w": -1}, 2), "bucket_layout: parameter w must not have a negative size"),
        (lambda: bucket_layout({}, 2, bucket_size=0), "bucket_layout: bucket_size must be at least 1, got 0"),
        (lambda: bucket_layout({}, 2, unit=0), "bucket_layout: unit must be at least 1, got 0"),
        (lambda: bucket_layout({"w": 1}, 2, own_bucket=["v"]), "bucket_layout: own_bucket names 'v'"),
    ],
)
def test_a_layout_that_cannot_be_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
