"""Checks that the NCCL calls of all ranks match, and that one order contains all of them.

A rank's device runs its calls one after another, as if all streams shared one hardware queue. A
call ends when all ranks that it exchanges data with have reached their part of it. The calls of
all ranks are simulated by that rule; if some never end there is a deadlock: a cycle of ranks that
wait for one another.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMUNICATOR_MARK = "communicator {id} is {name}"
"""A mark that names a communicator whose id differs between ranks."""

_COMMUNICATOR = re.compile(r"COMM (\d+) id (\S+) size (\d+) rank (\d+)")
_CALL = re.compile(
    r"NCCL (\w+) comm (\d+) count (\d+) dtype (\d+) peer (-?\d+) stream \S+(?:.* redop (\d+))?"
)
_NAMED = re.compile(COMMUNICATOR_MARK.format(id=r"(\S+)", name=r"(\S+)"))
_NO_RANK = -1


@dataclass(frozen=True)
class Call:
    """One call of NCCL."""

    kind: str
    """Its name without "nccl", such as AllReduce, or Join, the creation of the communicator."""
    communicator: str
    place: int
    """The caller's rank in the communicator."""
    count: int
    dtype: int
    peer: int = _NO_RANK
    """The other rank of a message, or the root, in the communicator; negative if there is none."""
    reduction: int = 0

    @property
    def is_message(self) -> bool:
        """True for a send or a receive; otherwise all ranks of the communicator take part."""
        return self.kind in ("Send", "Recv")


@dataclass(frozen=True)
class Operation:
    """A call, or the calls of one group, which are in flight at the same time."""

    calls: tuple[Call, ...]
    phase: str = ""
    """The last mark in the log before it."""


@dataclass(frozen=True)
class RankLog:
    """The operations of one rank in the order of issue."""

    operations: tuple[Operation, ...]
    sizes: dict[str, int]
    """Number of ranks of each communicator that it joined."""
    places: dict[str, int]
    """Its rank in each of them."""


@dataclass(frozen=True)
class Wait:
    """A rank of a deadlock."""

    rank: int
    operation: Operation
    for_rank: int
    text: str
    """A readable description."""


@dataclass(frozen=True)
class OrderReport:
    """The result of the check."""

    num_operations: tuple[int, ...]
    """By rank."""
    num_exchanges: int
    """Collectives, and messages with a sender and a receiver."""
    mismatches: tuple[str, ...]
    cycle: tuple[Wait, ...]
    """A shortest cycle: each waits for the next and the last for the first. Empty if one order
    contains all operations."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{sum(self.num_operations)} operations, {self.num_exchanges} exchanges",
                *self.mismatches,
                "no order holds all:" if self.cycle else "one order holds all",
                *(f"  {wait.text}" for wait in self.cycle),
            ]
        )


def read_log(path: Path) -> RankLog:
    """The operations of one rank's log."""
    names: dict[str, str] = {}
    joined: dict[str, tuple[str, int, int]] = {}
    operations: list[Operation] = []
    group: list[Call] = []
    depth, phase = 0, ""
    for line in path.read_text(errors="replace").splitlines():
        what = line.partition(" ")[2]
        kind = what.partition(" ")[0]
        if kind == "MARK":
            text = what.removeprefix("MARK ")
            if named := _NAMED.fullmatch(text):
                names[named[1]] = named[2]
            else:
                phase = text
        elif found := _COMMUNICATOR.match(what):
            number, identity, size, place = found.groups()
            joined[number] = (names.get(identity, identity), int(size), int(place))
            # At its first call, even one between two ranks, all its ranks wait for one another.
            call = Call("Join", joined[number][0], int(place), count=0, dtype=0)
            if depth:
                group.append(call)
            else:
                operations.append(Operation((call,), phase))
        elif kind == "GROUP":
            depth += 1 if what == "GROUP start" else -1
            if depth == 0 and group:
                operations.append(Operation(tuple(group), phase))
                group = []
        elif found := _CALL.match(what):
            name, number, count, dtype, peer, reduction = found.groups()
            communicator, _, place_of_caller = joined[number]
            call = Call(
                name,
                communicator,
                place_of_caller,
                int(count),
                int(dtype),
                int(peer),
                int(reduction or 0),
            )
            if depth:
                group.append(call)
            else:
                operations.append(Operation((call,), phase))
    return RankLog(
        tuple(operations),
        sizes={name: size for name, size, _ in joined.values()},
        places={name: place for name, _, place in joined.values()},
    )


def check_order(logs: Sequence[RankLog]) -> OrderReport:
    """Match the calls of all ranks and simulate them; ``logs`` by rank."""
    collectives, messages = _by_meeting(logs)
    mismatches: list[str] = []
    exchanges: list[list[_Place]] = []
    members = _members(logs, mismatches)
    for communicator, by_rank in collectives.items():
        ranks = members.get(communicator, [])
        exchanges += _match_collectives(communicator, ranks, by_rank, mismatches)
    for (communicator, sender, receiver), ends in messages.items():
        ranks = members.get(communicator, [])
        way = f"messages from rank {sender} to {receiver} of {_text(communicator, ranks)}"
        exchanges += _match_messages(way, *ends, mismatches)
    return OrderReport(
        num_operations=tuple(len(log.operations) for log in logs),
        num_exchanges=len(exchanges),
        mismatches=tuple(mismatches),
        cycle=_find_cycle(logs, exchanges, members),
    )


_Place = tuple[int, int]
"""A rank of the job and the number of one of its operations."""
_Issued = list[tuple[Call, _Place]]


def _by_meeting(
    logs: Sequence[RankLog],
) -> tuple[dict[str, dict[int, _Issued]], dict[tuple[str, int, int], tuple[_Issued, _Issued]]]:
    """The collectives of each communicator by rank of the job; sends and receives of each way, by
    communicator and its ranks from and to. All in the order in which they were issued."""
    collectives: dict[str, dict[int, _Issued]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple[str, int, int], tuple[_Issued, _Issued]] = defaultdict(lambda: ([], []))
    for rank, log in enumerate(logs):
        for number, operation in enumerate(log.operations):
            for call in operation.calls:
                if call.kind == "Send":
                    ends = messages[call.communicator, call.place, call.peer]
                elif call.kind == "Recv":
                    ends = messages[call.communicator, call.peer, call.place]
                else:
                    collectives[call.communicator][rank].append((call, (rank, number)))
                    continue
                ends[call.kind == "Recv"].append((call, (rank, number)))
    return collectives, messages


def _members(logs: Sequence[RankLog], mismatches: list[str]) -> dict[str, list[int]]:
    """The ranks of the job in each communicator, by their rank in it."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    sizes: dict[str, set[int]] = defaultdict(set)
    for rank, log in enumerate(logs):
        for communicator, place in log.places.items():
            if place in found[communicator]:
                mismatches.append(
                    f"communicator {communicator}: ranks {found[communicator][place]} and {rank} "
                    f"are both its rank {place}"
                )
            found[communicator][place] = rank
            sizes[communicator].add(log.sizes[communicator])
    for communicator, places in found.items():
        if sizes[communicator] != {len(places)} or sorted(places) != list(range(len(places))):
            mismatches.append(
                f"communicator {communicator} of size {sorted(sizes[communicator])} was joined by "
                f"ranks {sorted(places.values())} only"
            )
    return {name: [places[place] for place in sorted(places)] for name, places in found.items()}


def _match_collectives(
    communicator: str, ranks: list[int], by_rank: dict[int, _Issued], mismatches: list[str]
) -> Iterable[list[_Place]]:
    """Match the k-th call of each rank."""
    where = _text(communicator, ranks)
    numbers = {rank: len(by_rank.get(rank, ())) for rank in ranks}
    if len(set(numbers.values())) > 1:
        mismatches.append(f"{where}: unequal numbers of collectives, by rank {numbers}")
    for k in range(max(numbers.values(), default=0)):
        meeting = [by_rank[rank][k] for rank in ranks if k < numbers[rank]]
        calls = {_comparable(call): rank for call, (rank, _) in meeting}
        if len(calls) > 1:
            texts = ", ".join(f"rank {rank}: {' '.join(map(str, c))}" for c, rank in calls.items())
            mismatches.append(f"{where}: collective {k} differs: {texts}")
        yield [place for _, place in meeting]


def _comparable(call: Call) -> tuple[object, ...]:
    return (
        call.kind,
        f"count {call.count}",
        f"dtype {call.dtype}",
        f"reduction {call.reduction}",
        f"root {call.peer}",
    )


def _match_messages(
    way: str, sent: _Issued, received: _Issued, mismatches: list[str]
) -> Iterable[list[_Place]]:
    """Match the k-th send and the k-th receive."""
    if len(sent) != len(received):
        mismatches.append(f"{way}: {len(sent)} are sent but {len(received)} received")
    for k, ((send, start), (receive, end)) in enumerate(zip(sent, received, strict=False)):
        if (send.count, send.dtype) != (receive.count, receive.dtype):
            mismatches.append(
                f"{way}: number {k} is sent as {send.count} elements of dtype {send.dtype} but "
                f"received as {receive.count} of dtype {receive.dtype}"
            )
        yield [start, end]


def _find_cycle(
    logs: Sequence[RankLog], exchanges: Sequence[list[_Place]], members: dict[str, list[int]]
) -> tuple[Wait, ...]:
    """Simulate the operations of all ranks; a shortest cycle of those that never end."""
    partners: dict[_Place, list[_Place]] = defaultdict(list)
    for exchange in exchanges:
        for place in exchange:
            partners[place] += (other for other in exchange if other[0] != place[0])
    at = [0] * len(logs)
    to_try = deque(range(len(logs)))
    waiters: dict[int, set[int]] = defaultdict(set)
    while to_try:
        rank = to_try.popleft()
        before = at[rank]
        while at[rank] < len(logs[rank].operations):
            late = next((p for p, number in partners[rank, at[rank]] if at[p] < number), None)
            if late is not None:
                waiters[late].add(rank)
                break
            at[rank] += 1
        if at[rank] > before:
            to_try.extend(waiters.pop(rank, ()))
    stuck = [rank for rank, log in enumerate(logs) if at[rank] < len(log.operations)]
    late_of = {
        rank: {p: number for p, number in partners[rank, at[rank]] if at[p] < number}
        for rank in stuck
    }
    cycles = [cycle for rank in stuck if (cycle := _cycle_through(rank, late_of))]
    if not cycles:
        return ()
    cycle = min(cycles, key=len)
    waits = []
    for rank, late in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        operation = logs[rank].operations[at[rank]]
        part = logs[late].operations[late_of[rank][late]]
        text = (
            f"rank {rank}, operation {at[rank]}, {operation.phase or 'no phase'}: "
            f"{_operation_text(operation, members)} waits for rank {late}'s operation "
            f"{late_of[rank][late]}, {part.phase or 'no phase'}: {_operation_text(part, members)}"
        )
        waits.append(Wait(rank, operation, late, text))
    return tuple(waits)


def _cycle_through(start: int, late_of: dict[int, dict[int, int]]) -> list[int]:
    """The shortest cycle of waits through a rank; empty if there is none."""
    came_from = {start: start}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for late in late_of[rank]:
            if late == start:
                way = [rank]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if late not in came_from:
                came_from[late] = rank
                queue.append(late)
    return []


def _text(communicator: str, ranks: Sequence[int]) -> str:
    return f"communicator {communicator} of ranks {list(ranks)}"


def _operation_text(operation: Operation, members: dict[str, list[int]]) -> str:
    if len(operation.calls) > 1:
        ranks = set()
        for call in operation.calls:
            of_call = members[call.communicator]
            ranks |= {of_call[call.peer]} if call.is_message else set(of_call)
        kinds = " and ".join(sorted({call.kind for call in operation.calls}))
        return f"a group of {len(operation.calls)} {kinds} with ranks {sorted(ranks)}"
    (call,) = operation.calls
    ranks_of_call = members[call.communicator]
    if call.is_message:
        direction = "to" if call.kind == "Send" else "from"
        return f"{call.kind} of {call.count} {direction} rank {ranks_of_call[call.peer]}"
    return f"{call.kind} of {call.count} on ranks {ranks_of_call}"
