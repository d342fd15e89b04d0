"""Who is missing, and who says so."""

from datetime import timedelta

import torch.distributed as dist

from megatron.hydraulis.loop.hang_guard import HangGuard, Place, missing_ranks, report_of
from megatron.hydraulis.loop.job_store import fresh_store

NOW_S, SILENT_S, TIMEOUT_S = 1000.0, 10.0, 60.0


def place(iteration: int, phase: str, *, for_s: float = 50.0, silent_for_s: float = 1.0) -> Place:
    return Place(iteration, phase, "strategy 'x', plan 12ab", NOW_S - for_s, NOW_S - silent_for_s)


def test_who_is_behind_or_silent_is_missing() -> None:
    places = [
        place(3, "scatter"),
        place(3, "gather"),
        place(2, "optimizer"),
        place(3, "scatter", silent_for_s=30.0),
        None,
        place(3, "scatter"),
    ]
    assert missing_ranks(places, NOW_S, SILENT_S) == [1, 2, 3, 4]
    # A rank that went on before it fell silent makes nobody else late.
    ahead = [place(3, "scatter"), place(4, "planning", silent_for_s=30.0)]
    assert missing_ranks(ahead, NOW_S, SILENT_S) == [1]


def test_the_first_that_waits_speaks_for_all() -> None:
    places = [place(2, "gather"), place(3, "scatter"), place(3, "scatter"), None]
    said = [report_of(rank, places, NOW_S, SILENT_S, TIMEOUT_S) for rank in (1, 2)]
    assert said[1] is None
    assert said[0] == (
        "hang: rank 1 and 1 others have been in phase 'scatter' of iteration 3 (strategy 'x', plan "
        "12ab) for 50 s (--distributed-timeout-minutes ends the job after 60 s of waiting); "
        "missing: rank 0, alive, for 50 s in phase 'gather' of iteration 2 (strategy 'x', plan "
        "12ab); rank 3, never heard of"
    )


def test_many_that_are_missing_are_counted_and_none_is_told_apart() -> None:
    everyone = [place(1, "gather")] * 3
    text = report_of(0, everyone, NOW_S, SILENT_S, TIMEOUT_S)
    assert text is not None
    assert "no rank is missing" in text
    text = report_of(0, [place(1, "gather"), *[None] * 20], NOW_S, SILENT_S, TIMEOUT_S)
    assert text is not None
    assert text.endswith("; and 12 more")


def test_a_guard_tells_of_a_wait_once_and_names_the_silent() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))
    said: list[str] = []
    guard = HangGuard(store, 0, 2, 0.5, say=said.append)
    guard.enter("gather", 7, "strategy 'x', plan 12ab")
    for _ in range(200):
        guard._thread.join(0.05)
        if said:
            break
    guard.close()
    (text,) = said
    assert text.startswith(
        "hang: rank 0 has been in phase 'gather' of iteration 7 (strategy 'x', plan 12ab)"
    )
    assert text.endswith("missing: rank 1, never heard of")


def test_a_store_of_an_earlier_start_is_not_taken() -> None:
    second = timedelta(seconds=20)
    shared = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=second)
    earlier = fresh_store(shared, "127.0.0.1", 0, 2, second)
    earlier.set("plan", "of the earlier start")
    # Its process has gone, and another store is where it was.
    port = shared.get("hydraulis_store").decode().split()[0]
    shared.set("hydraulis_store", f"{port} another")
    own = fresh_store(shared, "127.0.0.1", 0, 2, second)
    found = fresh_store(shared, "127.0.0.1", 1, 2, second)
    own.set("plan", "new")
    assert found.get("plan") == b"new"
    assert not found.check(["hydraulis_places/0"])
