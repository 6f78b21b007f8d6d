"""Process groups: the ranks, sums and meshes of a grid, more than one set of them, and the world of one."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # the first use of a DTensor imports it: once here, not in every forked rank
import torch.distributed as dist
from marks import full
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastmp.parallel
from fastmp.distributed import groups as module
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.runtime import lost_peer
from fastmp.testing.ranks import RankError, run_ranks

AXES = {
    **{axis: axis for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "mp", "embedding")},
    "pp_backward": "pp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "tp_cp_dp": "tp-cp-dp",
    "etp_ep": "etp-ep",
    "expert_mp": "etp-ep-pp",
}
LAYOUTS = [
    {"tp": 2, "pp": 2},
    *full([{"tp": 8}, {"pp": 4, "ep": 2}]),
    {"tp": 2, "cp": 2, "ep": 4, "etp": 1},
    *full([{"tp": 4, "ep": 4, "etp": 2}]),
    {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "order": "pp-dp-ep-cp-tp"},
]


def layout_id(layout: dict) -> str:
    return "-".join(f"{key}{value}" for key, value in layout.items())


def describe(groups: ParallelGroups) -> dict[str, list[int] | None]:
    found = {}
    for attribute in AXES:
        group = getattr(groups, attribute)
        found[attribute] = None if group is None else dist.get_process_group_ranks(group)
    return found


def expected(grid: RankGrid, rank: int) -> dict[str, list[int] | None]:
    own = {}
    for attribute, axes in AXES.items():
        (group,) = [ranks for ranks in grid.ranks(axes) if rank in ranks] or [[]]
        own[attribute] = group if len(group) > 1 else None
    return own


@contextmanager
def pretended_world(size: int, rank: int) -> Iterator[None]:
    """A default group in which only this rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def noting(asked: list[tuple], make=dist.new_group):
    """Return a `dist.new_group` that notes (name, number of ranks, backend, options of NCCL)."""

    def new_group(ranks, *, group_desc, backend=None, pg_options=None, **options):
        asked.append((group_desc.removeprefix("fastmp:"), len(ranks), backend, pg_options))
        return make(ranks, group_desc=group_desc, **options)

    return new_group


def sums_and_meshes(rank: int, world_size: int, layout: dict) -> dict:
    groups = ParallelGroups.create(RankGrid(world_size=world_size, **layout))
    sums = {}
    for attribute in AXES:
        if (group := getattr(groups, attribute)) is not None:
            x = torch.tensor([10.0**rank], dtype=torch.float64)
            dist.all_reduce(x, group=group)
            sums[attribute] = x.item()
    meshes = {}
    for mesh in (groups.mesh, groups.expert_mesh):
        for name in mesh.mesh_dim_names:
            meshes[name] = dist.get_process_group_ranks(mesh.get_group(name))
            own = getattr(groups, name)
            assert own is None or mesh.get_group(name) is own
            assert mesh.get_local_rank(name) == meshes[name].index(rank)
    shard = distribute_tensor(torch.arange(16.0), groups.mesh["tp"], [Shard(0)])
    assert shard.full_tensor().tolist() == list(range(16))
    assert groups.rank == rank
    return {"ranks": describe(groups), "sums": sums, "meshes": meshes}


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_eight_ranks_sum_over_the_groups_the_grid_predicts(layout):
    grid = RankGrid(world_size=8, **layout)
    for rank, found in enumerate(run_ranks(sums_and_meshes, 8, layout)):
        own = expected(grid, rank)
        assert found["ranks"] == own
        digits = {name: sum(10.0**member for member in group) for name, group in own.items() if group}
        assert found["sums"] == digits
        for name, members in found["meshes"].items():
            assert members == (own[name] or [rank])


def two_models(rank: int, world_size: int) -> tuple:
    """A second model with another layout in the same process, and a third with that of the first."""
    layouts = [{"tp": 2}, {"pp": 4}, {"tp": 2}]
    made = [ParallelGroups.create(RankGrid(world_size=world_size, **layout)) for layout in layouts]
    assert made[0].tp is not made[2].tp
    x = torch.ones(1)
    for groups in (made[1], made[0], made[2]):  # in any order, as long as all ranks use the same
        for attribute in ("tp", "pp", "dp"):
            if (group := getattr(groups, attribute)) is not None:
                dist.all_reduce(x, group=group)
    return x.item(), [describe(groups) for groups in made]


def test_groups_are_made_several_times_in_one_process():
    for rank, (product, found) in enumerate(run_ranks(two_models, 4)):
        assert product == 4 * 2 * 2 * 2 * 2
        assert found[0] == found[2] == expected(RankGrid(world_size=4, tp=2), rank)
        assert found[1] == expected(RankGrid(world_size=4, pp=4), rank)


@pytest.mark.parametrize("backends", ("nccl", "cpu:gloo,cuda:nccl", "gloo"))
def test_nccl_is_asked_for_streams_of_high_priority(backends, monkeypatch):
    """By a stand-in for the options of NCCL, which not every build of torch has."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    timeout = timedelta(minutes=1)
    options = module._priority(backends, timeout)
    expected = SimpleNamespace(is_high_priority_stream=True, _timeout=timeout)
    assert options == (expected if "nccl" in backends else None)


def prioritised(rank: int, world_size: int) -> dict[str, bool]:
    """Whether streams of high priority are asked for, by name of the group."""
    asked = []
    dist.new_group, module._priority = noting(asked), lambda *arguments: "options"
    ParallelGroups.create(RankGrid(world_size=world_size, tp=2, pp=2, ep=2, etp=1))
    return {name: options is not None for name, _, _, options in asked}


def test_groups_that_communicate_beside_compute_have_streams_of_high_priority():
    for asked in run_ranks(prioritised, 8):
        urgent = [name for name, high in asked.items() if high]
        assert sorted(urgent) == ["dp", "dp_cp", "edp", "ep", "pp", "pp_backward", "tp"]
        assert {"alone", "embedding", "pp-tp"} <= set(asked)


@pytest.mark.parametrize("layout", ({"tp": 8, "pp": 16, "ep": 64, "etp": 1}, {"tp": 4, "ep": 16, "etp": 1}))
def test_new_groups_are_counted_and_a_rank_makes_one_for_itself(layout, monkeypatch):
    """At 1,024 ranks or more: those of an axis of size n are world_size / n, on every rank."""
    grid, asked = RankGrid(world_size=1024 * layout.get("pp", 4) // 4, **layout), []
    monkeypatch.setattr(dist, "new_group", noting(asked))
    with pretended_world(grid.world_size, 5):
        groups = ParallelGroups.create(grid)
        assert groups.mesh.get_local_rank("tp") == 5 % grid.tp
    made = [(name, size) for name, size, *_ in asked]
    assert made.count(("alone", 1)) == 1 and [size for _, size in made].count(1) == 1
    of_name = Counter(name for name, _ in made)
    for name, size in dict(made).items():
        whole = grid.world_size if name != "embedding" else 2 * grid.world_size // grid.pp
        assert name == "alone" or of_name[name] == whole // size
    assert len(made) < grid.world_size


def test_a_pretended_world_has_the_groups_of_its_rank_alone():
    grid, found = RankGrid(world_size=1024, tp=4, pp=4, ep=16, etp=1), []
    for local_only in (False, True):
        with pretended_world(grid.world_size, 5):
            created = describe(ParallelGroups.create(grid, local_only=local_only))
            found.append((created, dist.distributed_c10d._world.group_count))
    (whole, all_counted), (local, counted) = found
    assert local == whole == expected(grid, 5)
    assert counted < 20 < 500 < all_counted  # torch 2.15 counts the groups of a rank, older ones none


@pytest.mark.parametrize("backends", ("cpu:gloo,cuda:nccl", "gloo", "nccl"))
def test_groups_of_device_tensors_have_no_gloo_beside_nccl(backends, monkeypatch):
    grid, made = RankGrid(world_size=32, tp=2, pp=2, cp=2, ep=2, etp=2), []
    monkeypatch.setattr(dist, "new_group", noting(made))
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(module, "_priority", lambda *arguments: None)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *arguments: None)
    monkeypatch.setattr(module.DeviceMesh, "from_group", lambda *arguments, **options: None)
    with pretended_world(grid.world_size, 0):
        ParallelGroups.create(grid)
    asked = {name: backend for name, _, backend, _ in made}
    device_only = {"dp_cp", "edp", "ep-etp-pp", "pp-tp", "pp_backward"}
    assert {name for name, backend in asked.items() if backend == "nccl"} == (
        device_only if "nccl" in backends else set()
    )
    assert {"tp", "cp", "dp", "pp", "ep", "etp", "ep-etp", "cp-dp-tp", "cp-tp", "alone"} < set(asked)
    assert set(asked.values()) <= {None, "nccl"}


def timeouts(rank: int, world_size: int) -> set[timedelta]:
    groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2), timeout=timedelta(minutes=7))
    made = (groups.tp, groups.dp, groups.dp_cp)
    return {group._get_backend(torch.device("cpu")).options._timeout for group in made}


def test_groups_keep_their_own_timeout():
    """Ranks connect within a minute, or one of them is gone; collectives take as long as was asked."""
    assert run_ranks(timeouts, 4) == [{timedelta(minutes=7)}] * 4


def missing(rank: int, world_size: int, groups_made: int) -> tuple[bool, bool]:
    """Rank 1 makes so many groups, and no more; the other misses it within the minute, here one second."""

    def new_group(*arguments, make=dist.new_group, **options):
        nonlocal groups_made
        if rank == 1 and groups_made == 0:
            raise InterruptedError
        groups_made -= 1
        return make(*arguments, **options)

    module.CONNECTING, dist.new_group = timedelta(seconds=1), new_group
    began = time.monotonic()
    with pytest.raises((RuntimeError, InterruptedError)) as error:
        ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
    return lost_peer(error.value), time.monotonic() - began < 15


@pytest.mark.parametrize("groups_made", (0, 1))
def test_a_rank_that_is_lost_while_groups_are_made_is_missed_soon(groups_made):
    assert run_ranks(missing, 2, groups_made) == [(True, True), (False, True)]


def gone(rank: int, world_size: int, said: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
    except RuntimeError as error:
        said.write_text(str(lost_peer(error)))


def test_a_rank_that_is_gone_before_groups_are_made_is_missed_at_once(tmp_path):
    """By the connection that has closed: no group connects to it."""
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(gone, 2, tmp_path / "said")
    assert (tmp_path / "said").read_text() == "True"


def shared(rank: int, world_size: int) -> tuple[bool, ...]:
    groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2, ep=2, etp=1))
    return groups.mp is groups.tp, groups.tp_cp is groups.tp, groups.ep is groups.tp


def test_the_same_ranks_share_a_communicator_within_a_grid_but_not_across_the_two():
    assert run_ranks(shared, 4) == [(True, True, False)] * 4


def of_buckets(rank: int, world_size: int) -> None:
    """No axis and no joined group that a layer communicates over is one that buckets travel over."""
    for layout in ({"cp": 2}, {"cp": 1}, {"tp": 2}, {"tp": 2, "etp": 1, "ep": 1}):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, **layout))
        of_layers = (groups.tp, groups.cp, groups.dp, groups.pp, groups.etp, groups.ep)
        of_layers += (groups.tp_cp, groups.tp_cp_dp, groups.etp_ep, groups.mp, groups.expert_mp)
        buckets = [group for group in (groups.dp_cp, groups.edp) if group is not None]
        assert buckets or layout == {"tp": 2}
        assert not any(bucket is group for bucket in buckets for group in of_layers), layout


def test_buckets_have_communicators_of_their_own():
    run_ranks(of_buckets, 2)


def too_small(rank: int, world_size: int) -> None:
    ParallelGroups.create(RankGrid(world_size=8, tp=2))


def test_a_grid_of_another_size_than_the_world_is_an_error_that_names_both():
    with pytest.raises(RankError) as caught:
        run_ranks(too_small, 4)
    assert "ValueError: ParallelGroups: the grid has 8 ranks = tp 2" in str(caught.value)
    assert "torch.distributed has 4" in str(caught.value)


def test_a_grid_without_torch_distributed_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"the grid has 2 ranks .* torch.distributed has 1 .*fastmp.init"):
        ParallelGroups.create(RankGrid(world_size=2, tp=2))


def test_a_world_of_one_needs_no_torch_distributed():
    groups = ParallelGroups.create(RankGrid(world_size=1))
    assert describe(groups) == dict.fromkeys(AXES)
    assert groups == ParallelGroups.alone() and ParallelGroups.alone() is ParallelGroups.alone()
    assert (groups.rank, groups.mesh, groups.expert_mesh) == (0, None, None)
    assert not dist.is_initialized()


def alone(rank: int, world_size: int) -> tuple:
    groups = ParallelGroups.create(RankGrid(world_size=1))
    return describe(groups), groups.mesh.mesh_dim_names, groups.expert_mesh.mesh_dim_names


def test_a_world_of_one_under_a_launcher_has_meshes():
    ((found, dense, expert),) = run_ranks(alone, 1)
    assert found == dict.fromkeys(AXES)
    assert (dense, expert) == (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp"))


def late(rank: int, world_size: int) -> str:
    groups = ParallelGroups.create(RankGrid(world_size=2, tp=2), timeout=timedelta(seconds=1))
    if rank == 1:
        return ""
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=groups.tp)
    return str(caught.value)


def test_a_collective_that_a_rank_never_joins_fails_at_the_timeout_of_the_groups():
    assert "Timed out waiting 1000ms" in run_ranks(late, 2, timeout=20)[0]


@pytest.mark.parametrize(
    "name",
    [
        "cuda_graphs",
        "distributed",
        "hf",
        "nn",
        "optim",
        "pipeline",
        "tensor_parallel",
        "training",
        "watchdog",
    ],
)
def test_every_exported_name_is_there(name):
    package = importlib.import_module(f"fastmp.{name}")
    assert package.__all__ and all(getattr(package, each) is not None for each in package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'parallel_state'"):
        package.parallel_state  # noqa: B018


def test_names_of_the_former_package_warn_and_are_the_new_ones():
    for name in fastmp.parallel.__all__:
        with pytest.warns(DeprecationWarning, match=f"fastmp.parallel.{name} is now fastmp") as caught:
            found = getattr(fastmp.parallel, name)
        _, package, new_name = str(caught[0].message).rsplit(" ", 1)[1].split(".")
        assert found is getattr(importlib.import_module(f"fastmp.{package}"), new_name)
    with pytest.raises(AttributeError, match="no attribute 'parallel_state'"):
        fastmp.parallel.parallel_state  # noqa: B018
