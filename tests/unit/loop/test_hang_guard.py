"""Which ranks are missing, and which rank reports it."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.loop.faults import HangGuard, RankPlace, missing_ranks, report_of
from megatron.hydraulis.loop.startup import fresh_store, meet
from tests.support.counted_store import CountedStore

NOW_S, SILENT_S, TIMEOUT_S = 1000.0, 10.0, 60.0


def place(
    iteration: int, phase: str, *, for_s: float = 50.0, silent_for_s: float = 1.0
) -> RankPlace:
    return RankPlace(
        iteration, phase, "strategy 'x', plan 12ab", NOW_S - for_s, NOW_S - silent_for_s
    )


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=20))


def test_ranks_that_are_behind_or_silent_are_missing() -> None:
    places = [
        place(3, "scatter"),
        place(3, "gather"),
        place(2, "optimizer"),
        place(3, "scatter", silent_for_s=30.0),
        None,
        place(3, "scatter"),
    ]
    assert missing_ranks(places, NOW_S, SILENT_S) == [1, 2, 3, 4]
    # A rank that advanced before it fell silent does not make others late.
    ahead = [place(3, "scatter"), place(4, "planning", silent_for_s=30.0)]
    assert missing_ranks(ahead, NOW_S, SILENT_S) == [1]


def test_the_first_waiting_rank_reports_for_all() -> None:
    places = [place(2, "gather"), place(3, "scatter"), place(3, "scatter"), None]
    reports = [report_of(rank, places, NOW_S, SILENT_S, TIMEOUT_S) for rank in (1, 2)]
    assert reports[1] is None
    assert reports[0] == (
        "hang: rank 1 and 1 other rank have been in phase 'scatter' of iteration 3 (strategy 'x', "
        "plan 12ab) for 50 s (--distributed-timeout-minutes ends the job after 60 s of waiting); "
        "missing: rank 0, alive, for 50 s in phase 'gather' of iteration 2 (strategy 'x', plan "
        "12ab); rank 3, which has reported nothing yet"
    )


def test_many_missing_ranks_are_counted() -> None:
    everyone = [place(1, "gather")] * 3
    text = report_of(0, everyone, NOW_S, SILENT_S, TIMEOUT_S)
    assert text is not None
    assert "no rank is missing" in text
    text = report_of(0, [place(1, "gather"), *[None] * 20], NOW_S, SILENT_S, TIMEOUT_S)
    assert text is not None
    assert text.endswith("; and 12 more")


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="is one of start, load, planning"):
        place(3, "siesta")


def test_an_error_is_reported_with_its_place(store: dist.Store) -> None:
    guard = HangGuard(store, 0, 1, 60.0)
    guard.enter("planning", 7, "strategy 'x', plan 12ab")
    with pytest.raises(RuntimeError) as caught, guard.noting(), guard.phase("save"):
        raise RuntimeError("disk")
    assert caught.value.__notes__ == ["phase 'save' of iteration 7 (strategy 'x', plan 12ab)"]
    with guard.phase("scatter"):
        pass
    with pytest.raises(RuntimeError) as between, guard.noting():
        raise RuntimeError("connection reset")
    guard.close()
    assert between.value.__notes__ == ["phase 'loss' of iteration 7 (strategy 'x', plan 12ab)"]


def test_an_error_of_a_load_is_reported_as_it_is(store: dist.Store) -> None:
    guard = HangGuard(store, 0, 1, 60.0)
    for error, notes in ((HydraulisError("x"), []), (RuntimeError("y"), ["phase 'load'"])):
        with pytest.raises(type(error)) as caught, guard.phase("load"):
            raise error
        assert getattr(caught.value, "__notes__", []) == notes
    guard.close()


def wait_long(guard: HangGuard, timeout_s: float, is_over: Callable[[], object]) -> None:
    """Act as if the rank had been in a phase for nearly the timeout of collectives."""
    guard.enter("gather", 7, "strategy 'x', plan 12ab")
    guard._place = replace(guard._place, since_s=time.time() - 0.9 * timeout_s)
    deadline_s = time.monotonic() + 60.0
    while not is_over() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    guard.close()


def test_a_guard_reports_a_wait_once_and_names_silent_ranks(store: dist.Store) -> None:
    messages: list[str] = []
    timeout_s = 8.0
    wait_long(HangGuard(store, 0, 2, timeout_s, say=messages.append), timeout_s, lambda: messages)
    (text,) = messages
    place = "in phase 'gather' of iteration 7 (strategy 'x', plan 12ab)"
    assert text.startswith(f"hang: rank 0 has been {place}")
    assert text.endswith("missing: rank 1, which has reported nothing yet")


def test_ranks_that_wait_with_rank_0_read_no_other_place(store: dist.Store) -> None:
    counted = CountedStore(store)
    now_s = time.time()
    of_rank_0 = [7, "gather", "strategy 'x', plan 12ab", now_s, now_s + 60.0]
    dist.PrefixStore("hydraulis_places", store).set("0", json.dumps(of_rank_0))
    said: list[str] = []
    guard = HangGuard(counted, 1, 1000, 4.0, say=said.append)
    wait_long(guard, 4.0, lambda: counted.num_requests["ours get"])
    assert counted.num_requests["ours get"] == 1
    assert not said


def hold_store(port: Connection) -> None:
    """Acts as rank 0."""
    store = dist.TCPStore(
        "127.0.0.1", 0, 2, True, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    port.send(store.port)
    time.sleep(3600)


def test_a_frozen_rank_0_is_reported_and_no_longer_waited_for() -> None:
    """Although the store is frozen with it, and torch waits for its answers without a timeout."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold_store, args=(theirs,))
    holder.start()
    assert holder.pid is not None
    messages: list[str] = []
    ended = threading.Event()
    timeout_s = 2.0
    try:
        store = dist.TCPStore(
            "127.0.0.1",
            ours.recv(),
            2,
            False,
            timeout=timedelta(seconds=20),
            wait_for_workers=False,
        )
        guard = HangGuard(store, 1, 2, timeout_s, say=messages.append, end=ended.set)
        os.kill(holder.pid, signal.SIGSTOP)
        wait_long(guard, timeout_s, ended.is_set)
    finally:
        holder.kill()
        holder.join()
    assert ended.is_set()
    report, why_it_ends = messages
    assert report.startswith("hang: rank 1 has been in phase 'gather' of iteration 7 ")
    assert report.endswith("missing: rank 0, in whose process it is, is frozen")
    assert why_it_ends.startswith("error: rank 1 ends")


def test_a_store_of_an_earlier_start_is_not_used() -> None:
    second = timedelta(seconds=20)
    shared = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=second)
    earlier = fresh_store(shared, "127.0.0.1", 0, 2, second)
    earlier.set("plan", "of the earlier start")
    # Its process has ended, and another store has its address.
    port = shared.get("hydraulis_store").decode().split()[0]
    shared.set("hydraulis_store", f"{port} another")
    own = fresh_store(shared, "127.0.0.1", 0, 2, second)
    found = fresh_store(shared, "127.0.0.1", 1, 2, second)
    own.set("plan", "new")
    assert found.get("plan") == b"new"
    assert not found.check(["hydraulis_places/0"])


NUM_FILES = 16
"""A process can open so many at first: fewer than the connections it gets."""


def meet_with_few_files(port: int, met: Connection) -> None:
    """Act as rank 0 of a job of one rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + NUM_FILES, hard))
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    _store = meet(timedelta(seconds=20))
    met.send("yes")
    time.sleep(3600)


def test_rank_0_takes_more_connections_than_the_usual_limit_of_open_files() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    holder = context.Process(target=meet_with_few_files, args=(port, theirs))
    holder.start()
    try:
        ours.recv()
        # Those that say nothing are accepted, too; a client of the store takes longer.
        waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_FILES)]
        stores = [
            dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=False,
                timeout=timedelta(seconds=20),
                wait_for_workers=False,
            )
            for _ in range(2)
        ]
        stores[-1].set("key", "value")
        assert stores[0].get("key") == b"value"
        for connection in waiting:
            connection.close()
    finally:
        holder.kill()
        holder.join()
