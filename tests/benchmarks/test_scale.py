"""Control work of simulated jobs: nothing grows faster than N log N in total, or than log N on a rank."""

from __future__ import annotations

import json

import pytest

from benchmarks import scale


def check(rows, slack):
    """Every quantity grows like N log N in total, or log N on a rank, or says what requires more."""
    for name, exponent in scale.exponents(rows).items():
        quantity = next(each for each in scale.QUANTITIES if each.name == name)
        allowed = 1.0 if quantity.total or quantity.why else 0.0
        assert exponent < allowed + slack, (name, exponent, [row[name] for row in rows])


@pytest.fixture(scope="module")
def rows():
    return [scale.measure(world_size) for world_size in (64, 256)]


def test_nothing_counted_grows_faster_than_n_log_n(rows):
    counted = [{name: 1.0 if "second" in name else value for name, value in row.items()} for row in rows]
    check([row | {"leader_share": 1.0} for row in counted], slack=0.2)


@pytest.mark.full
def test_no_time_grows_faster_either():
    check([scale.measure(world_size) for world_size in (256, 1024, 4096)], slack=0.35)


@pytest.mark.parametrize("world_size", [2048, pytest.param(16_384, marks=pytest.mark.full)])
def test_heartbeats_of_a_large_job_stay_within_their_limits(world_size, rows):
    """Under 1 MB/s through the store, under 1 % of a node leader's time, the same bytes for each rank."""
    large = scale.heartbeat_traffic(world_size)
    assert large.store_rate < 1e6
    assert large.leader_share < 0.01
    assert large.heartbeat_bytes < 1.1 * rows[0]["heartbeat_bytes"]
    assert large.message_bytes < 1.1 * rows[0]["message_bytes"]


def test_a_counting_store_counts_keys_and_values_both_ways():
    store = scale.CountingStore()
    store.set("key", b"12345")
    assert store.bytes == scale.OVERHEAD + 3 + 5 + 8
    store.get("key")
    assert store.bytes == 2 * scale.OVERHEAD + 16 + 3 + 5


def test_the_page_holds_the_committed_results(tmp_path):
    """The table holds the measurements at all sizes, with their growth."""
    committed = json.loads(scale.RESULTS.read_text())
    assert tuple(row["world_size"] for row in committed["rows"]) == scale.WORLDS
    assert committed["growth"] == pytest.approx(scale.exponents(committed["rows"]))
    page = tmp_path / "scale.md"
    page.write_text(scale.PAGE.read_text())
    scale.write_page(committed["rows"], committed, page)
    assert page.read_text() == scale.PAGE.read_text()
    check(committed["rows"], slack=0.25)
    largest = committed["rows"][-1]
    assert largest["store_rate"] < 1e6 and largest["leader_share"] < 0.01
    assert largest["records_seconds"] + largest["diagnose_seconds"] < 10


@pytest.mark.full
def test_the_command_writes_results_and_a_picture(tmp_path, capsys, rows, monkeypatch):
    monkeypatch.setattr(scale, "measure", dict(zip((64, 256), rows)).__getitem__)
    out, plot = tmp_path / "scale.json", tmp_path / "scale.png"
    assert scale.main(["--worlds", "64", "256", "--json", str(out), "--plot", str(plot)]) == 0
    assert json.loads(out.read_text())["rows"] == rows and plot.stat().st_size > 10_000
    assert "| heartbeat of a rank |" in capsys.readouterr().out
