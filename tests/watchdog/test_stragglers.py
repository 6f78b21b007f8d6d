"""A straggler is warned of once in ten minutes, however often ranks are compared."""

from __future__ import annotations

from types import SimpleNamespace

from fastmp.watchdog.heartbeat import pack
from fastmp.watchdog.records import Call, RankRecord
from fastmp.watchdog.stragglers import WARN_SECONDS, StragglerCheck

WORLD = "world 0"


def record(rank: int, late: float) -> RankRecord:
    """A rank that comes `late` to eight collectives, a second apart."""
    calls = tuple(Call("all_reduce", WORLD, n, ((4,),), ("Float",), n + late) for n in range(8))
    return RankRecord(rank, calls=calls, groups={WORLD: (0, 1)})


def test_one_warning_in_ten_minutes():
    records = [record(0, 0.0), record(1, 0.9)]
    channel = SimpleNamespace(gathered=(), received={f"calls-{r.rank}": pack([r.as_json()]) for r in records})
    inspector = SimpleNamespace(recorded=(), groups={})
    node = SimpleNamespace(rank=0, post=lambda key, content: None)
    warnings: list[str] = []
    check = StragglerCheck(node, channel, 2, 1.0, warnings.append)

    def compare(now: float) -> int:
        """Post at `now`, compare when it is due, and return the number of warnings so far."""
        check.post(now, inspector, records[0])
        assert check.compare(now + 3.5)
        assert not check.compare(now + 4.0)  # once for each post
        return len(warnings)

    assert [compare(0.0), compare(60.0), compare(WARN_SECONDS - 60)] == [1, 1, 1]
    assert compare(WARN_SECONDS + 60) == 2
    assert all("rank 1 (" in line and "is slow: the others wait for it" in line for line in warnings)
