"""The order checker on small logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cuda_stand_in.order import OrderReport, check_order, read_log

FP32, INT8 = 7, 0


def joins(number: int, name: str, place: int, size: int = 2) -> str:
    """The line of a rank that joins a communicator."""
    return f"COMM {number} id {name} size {size} rank {place}"


def collective(number: int = 0, count: int = 8, dtype: int = FP32, kind: str = "AllReduce") -> str:
    return f"NCCL {kind} comm {number} count {count} dtype {dtype} peer -1 stream 0x10 redop 0"


def message(kind: str, peer: int, count: int = 8, number: int = 0) -> str:
    return f"NCCL {kind} comm {number} count {count} dtype {FP32} peer {peer} stream (nil)"


def group(*lines: str) -> list[str]:
    return ["GROUP start", *lines, "GROUP end"]


def pair(*lines: str | list[str], place: int) -> list[str]:
    """The log of a rank of a job of two, which have one communicator."""
    flat = [joins(0, "both", place)]
    for line in lines:
        flat += [line] if isinstance(line, str) else line
    return flat


def check(folder: Path, *logs: Sequence[str]) -> OrderReport:
    """The report on these ranks' lines."""
    found = []
    for rank, lines in enumerate(logs):
        path = folder / f"{rank}.log"
        path.write_text("\n".join(f"{i} {line}" for i, line in enumerate(lines)))
        found.append(read_log(path))
    return check_order(found)


def test_calls_that_match_have_an_order(tmp_path: Path) -> None:
    report = check(
        tmp_path,
        pair(collective(), "KERNEL stream 0x10 add", message("Send", 1), collective(), place=0),
        pair(collective(), message("Recv", 0), collective(), place=1),
    )
    assert report.num_operations == (4, 4)  # joining the communicator is one
    assert report.num_exchanges == 4
    assert report.mismatches == report.cycle == ()
    assert "one order holds all" in str(report)


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (collective(), collective(count=9), "count 8.*count 9"),
        (collective(), collective(dtype=INT8), "dtype 7.*dtype 0"),
        (collective(), collective().replace("redop 0", "redop 2"), "reduction 0.*reduction 2"),
        (collective(), collective(kind="AllGather"), "AllReduce.*AllGather"),
        (
            collective(kind="Broadcast").replace("peer -1", "peer 0"),
            collective(kind="Broadcast").replace("peer -1", "peer 1"),
            "root 0.*root 1",
        ),
        (collective(), "MARK nothing", r"unequal numbers of collectives, by rank \{0: 2, 1: 1\}"),
        (message("Send", 1), message("Recv", 0, count=9), "sent as 8 .* received as 9"),
        (message("Send", 1), "MARK nothing", "1 are sent but 0 received"),
    ],
)
def test_calls_that_differ_are_named(tmp_path: Path, ours: str, theirs: str, text: str) -> None:
    report = check(tmp_path, pair(ours, place=0), pair(theirs, place=1))
    (mismatch,) = report.mismatches
    assert "communicator both of ranks [0, 1]" in mismatch
    assert re.search(text, mismatch), mismatch
    assert report.cycle == ()


def test_a_rank_that_never_joins_is_reported(tmp_path: Path) -> None:
    report = check(tmp_path, pair(collective(), place=0), [])
    assert report.mismatches == ("communicator both of size [2] was joined by ranks [0] only",)


def test_two_ranks_in_one_place_are_named(tmp_path: Path) -> None:
    report = check(tmp_path, pair(place=0), pair(place=0))
    assert "ranks 0 and 1 are both its rank 0" in report.mismatches[0]


def test_a_communicator_may_have_another_id_on_every_rank(tmp_path: Path) -> None:
    logs = [
        [f"MARK communicator x{rank} is both", joins(0, f"x{rank}", rank), collective()]
        for rank in range(2)
    ]
    report = check(tmp_path, *logs)
    assert report.mismatches == ()
    assert report.num_exchanges == 2


def test_a_communicator_is_joined_by_all_of_its_ranks_at_once(tmp_path: Path) -> None:
    """Two of three exchange a message; the third joins the communicator later, or too late."""

    def log(rank: int, *lines: str) -> list[str]:
        return [joins(1, "pair", rank - 1), *lines] if rank else list(lines)

    def report(*last: str) -> OrderReport:
        return check(
            tmp_path,
            log(0, joins(0, "all", 0, size=3), message("Send", 1)),
            log(1, joins(0, "all", 1, size=3), message("Recv", 0), collective(1)),
            log(2, *last),
        )

    join = joins(0, "all", 2, size=3)
    assert report(join, collective(1)).cycle == ()
    late = report(collective(1), join)
    assert late.mismatches == ()
    assert [(wait.rank, wait.for_rank) for wait in late.cycle] == [(1, 2), (2, 1)]


def test_two_ranks_that_wait_for_one_another(tmp_path: Path) -> None:
    report = check(
        tmp_path,
        pair("MARK scatter", collective(), "MARK schedule", message("Recv", 1), place=0),
        pair("MARK schedule", message("Send", 0), "MARK scatter", collective(), place=1),
    )
    assert report.mismatches == ()
    assert [(wait.rank, wait.for_rank) for wait in report.cycle] == [(0, 1), (1, 0)]
    assert [wait.operation.phase for wait in report.cycle] == ["scatter", "schedule"]
    assert (
        "rank 0, operation 1, scatter: AllReduce of 8 on ranks [0, 1] waits for rank 1's operation "
        "2, scatter: AllReduce of 8 on ranks [0, 1]" in str(report)
    )


def test_the_shortest_cycle_is_reported(tmp_path: Path) -> None:
    """Ranks 1 and 2 wait for one another; 0 waits for 1, 3 for 0, and 1 also for 3."""

    def log(rank: int, *calls: str) -> list[str]:
        return [joins(0, "all", rank, size=4), *calls]

    def send(to: int) -> str:
        return message("Send", to)

    def receive(source: int) -> str:
        return message("Recv", source)

    report = check(
        tmp_path,
        log(0, send(1), send(3)),
        log(1, *group(send(2), receive(3)), receive(2), receive(0)),
        log(2, send(1), receive(1)),
        log(3, receive(0), send(1)),
    )
    assert report.mismatches == ()
    assert sorted(wait.rank for wait in report.cycle) == [1, 2]


def test_the_calls_of_a_group_are_in_flight_together(tmp_path: Path) -> None:
    """Each sends and receives: this ends in a group, but not one after the other."""

    def calls(peer: int) -> tuple[str, str]:
        return message("Send", peer), message("Recv", peer)

    apart = check(tmp_path, pair(*calls(1), place=0), pair(*calls(0), place=1))
    assert len(apart.cycle) == 2
    together = check(tmp_path, pair(group(*calls(1)), place=0), pair(group(*calls(0)), place=1))
    assert together.cycle == ()
    assert together.num_operations == (2, 2)
    one_side = check(
        tmp_path,
        pair(group(*calls(1)), place=0),
        pair(message("Recv", 0), message("Send", 0), place=1),
    )
    assert one_side.cycle == ()


def test_groups_within_groups_are_one(tmp_path: Path) -> None:
    inner = group(message("Send", 1), message("Recv", 1))
    report = check(
        tmp_path,
        pair(group(*inner, *group(collective())), place=0),
        pair(group(message("Send", 0), message("Recv", 0), collective()), place=1),
    )
    assert report.num_operations == (2, 2)
    assert report.num_exchanges == 4
    assert report.cycle == ()
