"""The layout of flat buffers: which element lies where, and who owns it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastmp.parallel.shards import Bucket, Piece, bucket_layout, shard_ranges

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
    layout = bucket_layout(sizes, 3, bucket_size=200, alone=["embedding"])
    assert layout.buckets == (
        Bucket(0, 384, ("c",)),
        Bucket(384, 768, ("b", "a")),
        Bucket(768, 768 + 1152, ("embedding",)),
    )
    assert layout.shards(1) == [(128, 256), (512, 640), (1152, 1536)]
    wide = bucket_layout(sizes, 3, bucket_size=200, unit=1 << 16)
    assert [bucket.end - bucket.start for bucket in wide.buckets] == [3 << 16] * 2


def test_what_lies_before_one_that_is_alone_has_its_own_bucket():
    layout = bucket_layout({"a": 1, "tied": 1, "b": 1}, 1, alone=["tied"])
    assert [bucket.names for bucket in layout.buckets] == [("b",), ("tied",), ("a",)]


def every_element_has_one_owner(sizes: list[int], pieces: list[list[Piece]], size: int) -> None:
    owned = [0] * size
    parts: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for of_rank in pieces:
        taken: set[int] = set()
        for piece in of_rank:
            length = piece.world[1] - piece.world[0]
            assert length > 0
            assert length == piece.local[1] - piece.local[0] == piece.within[1] - piece.within[0]
            local = set(range(*piece.local))
            assert not local & taken and max(local) < size // len(pieces)
            taken |= local
            for element in range(*piece.world):
                owned[element] += 1
            parts[piece.parameter].append(piece.within)
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
    layout = bucket_layout(named, num_ranks, bucket_size=bucket_size, unit=unit, alone=alone)
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shard_ranges([1], 0), "shard_ranges: there must be at least one rank, got 0"),
        (lambda: shard_ranges([1, -2], 2), "shard_ranges: parameter 1 must not have a negative size, got -2"),
        (lambda: bucket_layout({"w": -1}, 2), "bucket_layout: parameter w must not have a negative size"),
        (lambda: bucket_layout({}, 2, bucket_size=0), "bucket_layout: bucket_size must be at least 1, got 0"),
        (lambda: bucket_layout({}, 2, unit=0), "bucket_layout: unit must be at least 1, got 0"),
        (lambda: bucket_layout({"w": 1}, 2, alone=["v"]), "bucket_layout: 'v' shall be alone, but is no par"),
    ],
)
def test_a_layout_that_cannot_be_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
