"""Places of ranks under srun, mpirun and mpiexec, read from the variables that they set."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import fastmp
from fastmp.config import Environment
from fastmp.config.environment import DEFAULT_PORT, Place, first_host, read_place
from fastmp.testing.ranks import run_ranks

SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[003,007-008]",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}


def test_srun_over_machines_meets_on_the_first_machine_of_the_step():
    place = read_place(SRUN)
    assert (place.rank, place.world_size, place.local_rank) == (9, 16, 1)
    assert (place.master_addr, place.launcher, place.missing) == ("gpu007", "srun", "")


def test_on_one_machine_they_meet_at_the_loopback_address():
    assert read_place(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).master_addr == "localhost"
    assert read_place(MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).master_addr == "localhost"
    place = Place(3, 4, 3, "localhost", DEFAULT_PORT, "mpiexec")
    assert read_place(HYDRA) == place


def test_the_port_is_made_from_the_step_and_kept_out_of_the_way():
    steps = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in "123" for step in "01"]
    ports = {read_place(SRUN | step).master_port for step in steps}
    assert len(ports) == 6 and all(10000 <= port < 32768 for port in ports)
    other = read_place(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert other.master_port == read_place(SRUN).master_port
    jobs = {read_place(MPIRUN | {"PMIX_NAMESPACE": f"prterun-host-{n}@1"}).master_port for n in range(9)}
    assert len(jobs) == 9


def test_without_an_address_ranks_meet_at_localhost_and_port_6000():
    """Megatron's port, not torchrun's 29500: see docs/many-machines.md."""
    place = read_place({"RANK": "1", "WORLD_SIZE": "2"})
    assert (place.master_addr, place.master_port) == ("localhost", 6000)


@pytest.mark.parametrize("variables", [SRUN, MPIRUN, HYDRA, PALS])
def test_an_address_that_is_set_counts(variables):
    place = read_place(variables | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (place.master_addr, place.master_port, place.missing) == ("head", 1234, "")


@pytest.mark.parametrize("variables", [SRUN, MPIRUN, HYDRA, PALS])
def test_the_variables_of_torchrun_go_before_all(variables):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
    assert read_place(variables | torchrun) == Place(1, 2, 0, "a", 7)


def test_the_launcher_of_the_ranks_goes_before_that_of_their_daemons():
    """mpirun in an allocation of Slurm: one task of srun on each machine starts the ranks there."""
    daemon = SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for variables, launcher in ((MPIRUN, "mpirun"), (HYDRA, "mpiexec")):
        place = read_place(daemon | variables)
        assert (place.launcher, place.rank, place.world_size) == (launcher, 3, 4)
    assert read_place(SRUN | {"PMI_RANK": "9", "PMI_SIZE": "16"}).launcher == "srun"  # srun --mpi=pmi2


def test_a_process_alone_is_a_world_of_one():
    """An interactive step, too, whose job has more tasks; and one process of mpirun in a batch script."""
    assert read_place({}) == Place()
    assert read_place(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == Place()
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert read_place(batch | MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}) == Place()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            MPIRUN,
            "mpirun started 4 processes on several machines, and MASTER_ADDR is not set; set it to the host "
            "of rank 0: mpirun -x MASTER_ADDR=HOST ...",
        ),
        (
            PALS,
            "mpiexec started 4 processes on several machines, and MASTER_ADDR is not set; set it to the "
            "host of rank 0: mpiexec -genv MASTER_ADDR HOST ...",
        ),
        (
            SRUN | {"SLURM_STEP_NODELIST": "gpu[007-"},
            "srun started 16 processes on several machines (SLURM_STEP_NODELIST is 'gpu[007-', no list of "
            "nodes), and MASTER_ADDR is not set; set it to the host of rank 0: srun "
            "--export=ALL,MASTER_ADDR=HOST ...",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4"},
            "mpiexec started 4 processes, but MPI_LOCALRANKID and MPI_LOCALNRANKS are not set; set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each process, or start `fastmp launch` "
            "on every machine",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"},
            "this is the batch script of a job of 8 tasks; start the tasks with srun, or set RANK=0 "
            "WORLD_SIZE=1 for a run that is meant to be alone",
        ),
    ],
    ids=["mpirun", "mpiexec", "nodes", "few variables", "batch script"],
)
def test_what_cannot_be_worked_out_is_one_error_that_says_what_to_set(monkeypatch, variables, message):
    """No rank goes on alone: each would be a run of its own."""
    for name in ("RANK", *SRUN, *MPIRUN, *HYDRA, *PALS, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        fastmp.init(backend="gloo")
    assert str(caught.value) == f"fastmp.init: {message}"
    assert Environment.read().world_size > 1  # so that a failure names its rank, and the first one speaks


@pytest.mark.parametrize("variables", [SRUN | {"SLURM_LOCALID": "x"}, SRUN | {"MASTER_PORT": "x"}])
def test_a_variable_that_is_no_number_is_named(variables):
    with pytest.raises(ValueError, match=r"environment: [A-Z_]+ must be an integer, got 'x'"):
        read_place(variables)


numbers = st.tuples(st.integers(1, 4), st.integers(0, 9999)).map(lambda pair: f"{pair[1]:0{pair[0]}d}")
ranges = st.tuples(numbers, st.none() | numbers)
brackets = st.lists(ranges, min_size=1, max_size=3)
names = st.from_regex(r"[a-z][a-z0-9.-]{0,5}", fullmatch=True)
hosts = st.lists(st.tuples(names, st.none() | brackets), min_size=1, max_size=3)


@given(st.lists(hosts, min_size=1, max_size=4))
def test_the_first_host_of_a_list_of_nodes(nodes):
    """Every list is written from what it means: hosts of names and ranges, several ranges in one host."""

    def written(first: str, last: str | None) -> str:
        return first if last is None else f"{first}-{last}"

    text = ",".join(
        "".join(
            name + ("" if group is None else "[" + ",".join(written(*each) for each in group) + "]")
            for name, group in host
        )
        for host in nodes
    )
    expected = "".join(name + ("" if group is None else group[0][0]) for name, group in nodes[0])
    assert first_host(text) == expected


@pytest.mark.parametrize(
    "nodes", ["", ",a", "a[", "a[1", "a[]", "a]1", "a[1-]", "a[b]", "a[1-2", "a b", "a\n"]
)
def test_what_is_no_list_of_nodes_is_refused(nodes):
    with pytest.raises(ValueError, match="no list of nodes"):
        first_host(nodes)


def meet(
    rank: int, world_size: int, variables: dict[str, str], names: tuple[str, ...]
) -> tuple[float, int, bool]:
    """Join as one of srun's or mpirun's processes; the store of rank 0 must not be open to other machines."""
    dist.destroy_process_group()
    os.environ.update(variables | {name: str(rank) for name in names})
    runtime = fastmp.init(backend="gloo", join_seconds=20)
    total = torch.full((1,), rank + 1.0)
    dist.all_reduce(total)
    reachable = False
    if rank == 0:
        with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
            lines = [line.split() for file in (four, six) for line in file.readlines()[1:]]
        port = f":{Environment.read().master_port:04X}"
        listening = [line[1] for line in lines if line[3] == "0A" and line[1].endswith(port)]
        reachable = listening != [f"0100007F{port}"]
    dist.barrier()
    runtime.close()
    return total.item(), runtime.local_rank, reachable


def test_ranks_of_srun_and_of_mpirun_meet_at_the_loopback_address_alone():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    one = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": port}
    expected = [(6.0, rank, False) for rank in range(3)]
    assert run_ranks(meet, 3, one, ("SLURM_PROCID", "SLURM_LOCALID")) == expected
    many = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_PORT": port}
    assert run_ranks(meet, 3, many, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")) == expected
