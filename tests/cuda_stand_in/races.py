"""Races between CUDA streams: two accesses to the same bytes, at least one of them a write, that
nothing orders.

Like torch's CUDA sanitizer this compares vector clocks of streams, but by ranges of bytes, since
views of an arena begin at other addresses than the arena, and including what NCCL's kernels and
copies access, also in pinned memory of the host. `AccessMarks` writes the accesses of torch's
operations to the log of the stand-in; `find_races` reads the log.
"""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.cuda_stand_in.device import PlainDispatchMode, mark

MAX_RUNS = 4096
"""A view of more separate runs of bytes counts as all bytes between its first and last."""
HOST = -1
"""The stream number of what the CPU does."""

_WITHOUT_ACCESS = re.compile(
    "empty|empty_strided|empty_permuted|set_|resize_|resize_as_|record_stream|is_pinned|_pin_memory|"
    "lift_fresh"
)
"""Operations on memory, not on what it holds."""
_SHAPE_OF_FIRST = re.compile(r"new_.*|.*_like")
"""Factories that take the shape and type of their first argument, not its values."""
_OF_OTHERS = ("c10d", "c10d_functional", "_c10d_functional")
"""Operations whose accesses are those of NCCL calls in the log."""

Span = tuple[int, int]
"""First byte and the one after the last."""


class AccessMarks(PlainDispatchMode):
    """Marks every operation on device tensors in the log: what it reads and writes, on which
    stream, and from which line of Megatron or of ours."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation with marks before and after it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace in _OF_OTHERS or func.is_view or _WITHOUT_ACCESS.fullmatch(name):
            return func(*args, **kwargs)
        read, written, kept = _arguments(func, args, kwargs)
        if _SHAPE_OF_FIRST.fullmatch(name):
            read = read[1:]
        where = f"{name}@{_caller()}"
        _mark_access(where, read, written)
        result = func(*args, **kwargs)
        made = [x for x in _tensors(result) if id(x) not in kept]
        if any(x.is_cuda for x in read):  # on the host a copy writes, which the log has
            made = [x for x in made if x.is_cuda]
        if name not in ("empty_like", "new_empty", "new_empty_strided"):
            _mark_access(where, [], made)
        return result


def mark_kernel(name: str, read: list[Tensor], written: list[Tensor]) -> None:
    """Mark a kernel that is launched outside of torch's operations, where accesses are marked."""
    if any(isinstance(mode, AccessMarks) for mode in _get_current_dispatch_mode_stack()):
        _mark_access(f"{name}@{_caller()}", read, written)


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], set[int]]:
    """Tensors that are read, those that are written, and the ids of all."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (written if is_written else read).extend(_tensors(value))
    return read, written, {id(x) for x in (*read, *written)}


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or result of an operation; torch's trees take several times as
    long."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _mark_access(where: str, read: list[Tensor], written: list[Tensor]) -> None:
    for on_host in (False, True):
        texts = []
        for letter, tensors in (("r", read), ("w", written)):
            for tensor in tensors:
                if (tensor.is_pinned() if on_host else tensor.is_cuda) and tensor.numel():
                    texts += [f"{letter}{start:x}-{stop:x}" for start, stop in spans_of(tensor)]
        if texts:
            stream = HOST if on_host else torch.cuda.current_stream().cuda_stream
            mark(f"ACCESS {stream} {where} {' '.join(texts)}")


def spans_of(tensor: Tensor) -> list[Span]:
    """The bytes that a strided tensor covers."""
    item_bytes = tensor.element_size()
    dims = sorted(
        (stride * item_bytes, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1 and stride > 0
    )
    run_bytes = item_bytes
    while dims and dims[0][0] <= run_bytes:
        stride_bytes, size = dims.pop(0)
        run_bytes += stride_bytes * (size - 1)
    first = tensor.data_ptr()
    num_runs = 1
    for _, size in dims:
        num_runs *= size
    if num_runs > MAX_RUNS:
        return [(first, first + run_bytes + sum(stride * (size - 1) for stride, size in dims))]
    offsets = itertools.product(*(range(0, stride * size, stride) for stride, size in dims))
    return [(first + sum(offset), first + sum(offset) + run_bytes) for offset in offsets]


def _caller() -> str:
    """The nearest line of Megatron, of Transformer Engine or of ours; a backward may have none."""
    frame: Any = sys._getframe(1).f_back  # a backward has none
    while frame is not None:
        path = frame.f_code.co_filename
        for package in ("/megatron/", "/transformer_engine/"):
            if package in path:
                return f"{path.rpartition(package)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward"


@dataclass(frozen=True)
class Access:
    """One operation's access to a range of memory."""

    stream: int
    time: int
    """Number of operations that the stream has begun by then."""
    what: str
    phase: str


@dataclass(frozen=True)
class Race:
    """Two unordered accesses."""

    earlier: Access
    """The one that was issued first."""
    later: Access
    writes: tuple[bool, bool]
    """Whether the earlier and the later one write."""
    span: Span

    @property
    def places(self) -> tuple[str, str, int, int]:
        """The operations and their streams; the same each time the program gets there."""
        earlier, later = self.earlier, self.later
        return earlier.what, later.what, earlier.stream, later.stream

    def __str__(self) -> str:
        texts = [
            f"{'write' if is_write else 'read'} by {access.what} on stream {access.stream:#x}"
            f" ({access.phase})"
            for access, is_write in zip((self.earlier, self.later), self.writes, strict=True)
        ]
        return (
            f"bytes {self.span[0]:#x} to {self.span[1]:#x}: {texts[1]} does not wait for {texts[0]}"
        )


def find_races(path: Path) -> list[Race]:
    """The races of one rank's log, one for each pair of places in the program."""
    clocks = _Clocks()
    memory = _Memory()
    pinned: list[Span] = []
    races: dict[tuple[str, str, int, int], Race] = {}
    phase = ""
    for line in path.read_text(errors="replace").splitlines():
        words = line.split()[1:]
        kind = words[0]
        if kind == "MARK" and words[1] != "ACCESS":
            phase = phase if words[1] == "communicator" else " ".join(words[1:])
        elif kind == "RECORD":
            clocks.record(words[2], _number(words[4]))
        elif kind == "WAIT":
            clocks.wait(_number(words[2]), words[4])
        elif kind == "HSYNC":
            clocks.host_waits(words[1:])
        elif kind == "PIN":
            pinned += _span(words[1], words[2])
        else:
            for stream, what, read, written in _accesses(words, pinned):
                access = Access(stream, clocks.begin(stream), what, phase)
                for spans, writes in ((read, False), (written, True)):
                    for span in spans:
                        for cell in memory.cells_of(span):
                            for race in cell.meet(access, writes, clocks):
                                races.setdefault(race.places, race)
                        if writes:
                            memory.join(span)
                if kind == "COPYSYNC":
                    clocks.host_waits(["stream", "0"])
    return list(races.values())


def _accesses(
    words: list[str], pinned: list[Span]
) -> Iterator[tuple[int, str, list[Span], list[Span]]]:
    """Stream, name, what is read, what is written. A copy from or to unpinned memory of the host
    has ended when the host continues."""
    kind = words[0]
    if kind == "MARK":
        read = [_marked_span(text) for text in words[4:] if text.startswith("r")]
        written = [_marked_span(text) for text in words[4:] if text.startswith("w")]
        yield int(words[2]), words[3], read, written
    elif kind == "NCCL":
        named = dict(zip(words[2::2], words[3::2], strict=False))
        at = words.index("read")
        read_from, read_bytes, _, write_to, write_bytes = words[at + 1 : at + 6]
        yield (
            _number(named["stream"]),
            f"NCCL's {words[1]}",
            _span(read_from, read_bytes),
            _span(write_to, write_bytes),
        )
    elif kind in ("COPY", "COPYSYNC"):
        at = words.index("from")
        stream = _number(words[4]) if kind == "COPY" else 0
        size = words[2]
        read, written = _span(words[at + 1], size), _span(words[at + 3], size)
        if words[1] == "H2D":
            read = [span for span in read if _is_within(span, pinned)]
        if words[1] == "D2H":
            written = [span for span in written if _is_within(span, pinned)]
        yield stream, f"copy {words[1]}", read, written
    elif kind in ("SET", "SETSYNC"):
        stream = _number(words[3]) if kind == "SET" else 0
        yield stream, "memset", [], _span(words[-1], words[1])


def _marked_span(text: str) -> Span:
    start, _, stop = text[1:].partition("-")
    return int(start, 16), int(stop, 16)


def _number(text: str) -> int:
    return 0 if text == "(nil)" else int(text, 0)


def _span(address: str, num_bytes: str) -> list[Span]:
    start = _number(address)
    return [(start, start + int(num_bytes))] if int(num_bytes) else []


def _is_within(span: Span, spans: list[Span]) -> bool:
    return any(start <= span[0] and span[1] <= stop for start, stop in spans)


class _Clocks:
    """Vector clocks of each stream, each event and the host: the operations that come before."""

    def __init__(self) -> None:
        self._streams: dict[int, dict[int, int]] = defaultdict(dict)
        self._events: dict[str, dict[int, int]] = {}

    def begin(self, stream: int) -> int:
        """A stream's next operation, which comes after all that the host had waited for when it
        issued it."""
        clock = self._streams[stream]
        if stream != HOST:
            _merge(clock, self._streams[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def comes_after(self, stream: int, earlier: Access) -> bool:
        """True if the stream's last operation comes after the access."""
        return self._streams[stream].get(earlier.stream, 0) >= earlier.time

    def record(self, event: str, stream: int) -> None:
        """Record an event: it comes after what the stream does so far."""
        _merge(self._streams[stream], self._streams[HOST])
        self._events[event] = dict(self._streams[stream])

    def wait(self, stream: int, event: str) -> None:
        """Let a stream wait for an event; without effect if it was never recorded."""
        _merge(self._streams[stream], self._events.get(event, {}))

    def host_waits(self, words: list[str]) -> None:
        """The host waits for an event, a stream or the device."""
        host = self._streams[HOST]
        if words[0] == "event":
            _merge(host, self._events.get(words[1], {}))
        elif words[0] == "stream":
            _merge(host, self._streams[_number(words[1])])
        else:
            for clock in list(self._streams.values()):
                _merge(host, clock)


def _merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


@dataclass
class _Cell:
    """Adjacent bytes with the same past accesses."""

    start: int
    stop: int
    write: Access | None = None
    """The last one."""
    reads: dict[int, Access] = field(default_factory=dict)
    """The last of each stream since then."""

    def meet(self, access: Access, writes: bool, clocks: _Clocks) -> list[Race]:
        """The races of a new access, which is then recorded."""
        earlier: list[tuple[Access, bool]] = [(self.write, True)] if self.write else []
        if writes:
            earlier += [(read, False) for read in self.reads.values()]
        races = [
            Race(other, access, (other_writes, writes), (self.start, self.stop))
            for other, other_writes in earlier
            if other.stream != access.stream and not clocks.comes_after(access.stream, other)
        ]
        if writes:
            self.write = access
            self.reads = {}
        else:
            self.reads[access.stream] = access
        return races


class _Memory:
    """Cells by their first byte."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._cells: list[_Cell] = []

    def cells_of(self, span: Span) -> Iterable[_Cell]:
        """The cells that make up a range, cut and added where needed."""
        start, stop = span
        self._cut(start)
        self._cut(stop)
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, stop)
        found: list[_Cell] = []
        at = start
        for cell in self._cells[first:last]:
            if at < cell.start:
                found.append(_Cell(at, cell.start))
            found.append(cell)
            at = cell.stop
        if at < stop:
            found.append(_Cell(at, stop))
        self._cells[first:last] = found
        self._starts[first:last] = [cell.start for cell in found]
        return found

    def join(self, span: Span) -> None:
        """Make one cell of a range that one access has written, which has one past from then on."""
        first, last = (bisect_left(self._starts, at) for at in span)
        self._cells[first].stop = span[1]
        del self._cells[first + 1 : last], self._starts[first + 1 : last]

    def _cut(self, at: int) -> None:
        i = bisect_right(self._starts, at) - 1
        if i >= 0 and self._cells[i].start < at < self._cells[i].stop:
            cell = self._cells[i]
            self._cells.insert(i + 1, _Cell(at, cell.stop, cell.write, dict(cell.reads)))
            self._starts.insert(i + 1, at)
            cell.stop = at
