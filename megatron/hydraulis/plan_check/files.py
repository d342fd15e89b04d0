"""The four files that the checker reads, as plain records: no type of the planner is used.

Invalid profiles, pools and lengths raise DataError, an invalid plan BrokenRule.

The text of a strategy: terms joined by ``+``; a term is ``[N*]`` and a scheme or ``idle``; a scheme
is degrees ``tpN cpN[~] ppN`` in any order, then ``:`` and layers, then ``@`` and ranks. Without
``@`` replicas are placed in descending order of tp, then of cp, then in the order of the text: each
stage on the first node with room for it, else each of its TP groups on the first node with room for
that, else on the nodes with most room.
"""

import json
import math
import re
import struct
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron.hydraulis.errors import DataError

_VERSION = 1
# Larger whole numbers are typing errors, which numpy cannot hold.
_MOST = 10**18
_MOST_BYTES = 256 << 20
# Nesting of objects and lists; a plan has 8 levels.
_MOST_LEVELS = 32
_IDX_HEADER = struct.Struct("<9sQBQQ")
_IDX_MAGIC = b"MMIDIDX\0\0"
_TERM = re.compile(
    r"(?:(?P<copies>\d+)\*)?"
    r"(?:(?P<idle>idle)|(?P<degrees>(?:(?:tp|cp|ep|pp)\d+~?)+))"
    r"(?::(?P<layers>\d+(?:,\d+)*))?"
    r"(?:@(?P<ranks>\d+(?:,\d+)*))?"
)
# More ranks are a typing error, and would not fit in memory.
_MOST_RANKS = 10**7
_DEGREE = re.compile(r"(tp|cp|ep|pp)(\d+)(~?)")


class Rule(Enum):
    """The rules for a plan by name, in the order in which they are checked."""

    PLAN_FORMAT = "plan-format"
    """All keys are present, with values of the right type."""
    UNKNOWN_STRATEGY = "unknown-strategy"
    """The strategy is in the pool."""
    REPLICA_COUNT = "replica-count"
    """The plan lists every replica of the strategy,"""
    REPLICA_SCHEME = "replica-scheme"
    """with the strategy's scheme"""
    REPLICA_RANKS = "replica-ranks"
    """and on the strategy's ranks."""
    EMPTY_MICRO_BATCH = "empty-micro-batch"
    """Every micro-batch has sequences, and a length for each of them."""
    UNKNOWN_SEQUENCE = "unknown-sequence"
    """All sequences are from the batch,"""
    REPEATED_SEQUENCE = "repeated-sequence"
    """none occurs twice,"""
    SEQUENCE_LENGTH = "sequence-length"
    """their lengths are those of the batch,"""
    MISSING_SEQUENCE = "missing-sequence"
    """and none is missing."""
    SEQUENCE_IDS = "sequence-ids"
    """If the plan lists ids in the corpus, there is one for every sequence."""
    CONTEXT_GROUPS = "context-groups"
    """The groups of a micro-batch divide the cp ranks of a scheme with ``~``, and its sequences,
    into runs: aligned powers of two of cp ranks, for which the profile has a row."""
    ROWS = "rows"
    """If a micro-batch lists rows, there is one for each group, with room for its sequences, which
    the tp and cp ranks can share evenly."""
    TOKEN_LIMIT = "token-limit"
    """No micro-batch, or group of one, has more tokens than its scheme's limit; padding counts with
    cp > 1 and where it makes a row longer than its sequences need."""
    REPLICA_TIME = "replica-time"
    """A replica's predicted time is that of 1F1B over its micro-batches, in their order; a
    micro-batch in groups takes the time of its slowest group, and padding counts in listed rows."""
    ITERATION_TIME = "iteration-time"
    """The predicted time is the makespan plus the strategy's overhead."""
    STAGE_OBJECTIVE = "stage-objective"
    """The objective of dispatch and of packing is the makespan."""
    STAGE_BOUND = "stage-bound"
    """No bound is above the makespan."""
    STAGE_GAP = "stage-gap"
    """A gap is (objective - bound) / objective."""


class BrokenRule(Exception):
    """A plan breaks a rule."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(message)
        self.rule = rule


class Shape(NamedTuple):
    """Degrees of a replica, layers if the text lists them, whether its cp splits, and over how many
    ranks the experts are distributed."""

    tp: int
    cp: int
    pp: int
    layers: tuple[int, ...] | None = None
    splits_cp: bool = False
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def at_full_width(self) -> "Shape":
        """The shape under which a cost profile lists it."""
        return self._replace(splits_cp=False)

    def __str__(self) -> str:
        split = "~" if self.splits_cp else ""
        layers = "" if self.layers is None else ":" + ",".join(map(str, self.layers))
        experts = "" if self.ep == 1 else f"ep{self.ep}"
        return f"tp{self.tp}cp{self.cp}{split}{experts}pp{self.pp}{layers}"


@dataclass(frozen=True)
class SchemeFigures:
    """Time ``a·Σs² + b·Σs + c`` of a micro-batch on a stage, its limit, and the stages.

    Where some layers attend to a window of w tokens, s² is less by their share of ``(s - w)²``.
    """

    a_ms_per_token2: float
    b_ms_per_token: float
    c_ms: float
    max_tokens: int
    num_stages: int
    tp: int = 1
    cp: int = 1
    groups: "tuple[SchemeFigures, ...]" = ()
    """If the cp ranks split: figures of the groups of each size that the profile has."""
    longest_tokens: int | None = None
    """The longest sequence that fits, if that is not max_tokens."""
    window_tokens: int = 0
    windowed_share: float = 0.0
    """Of the layers, those with the window."""
    forward_share: float = 1 / 3
    """Of the forward in the time. By default the forward of a matrix product, which is one product;
    its backward is two."""

    @property
    def longest(self) -> int:
        return self.max_tokens if self.longest_tokens is None else self.longest_tokens

    @property
    def row_multiple(self) -> int:
        """Rows are a multiple of this, for tp ranks and two chunks of each of several cp ranks."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    def needed_tokens(self, lengths: list[int]) -> int:
        """Tokens of the shortest row: with cp > 1 each sequence fills 2·cp equal chunks."""
        chunks = 2 * self.cp if self.cp > 1 else 1
        padded = sum(math.ceil(length / chunks) * chunks for length in lengths)
        return max(1, math.ceil(padded / self.row_multiple)) * self.row_multiple

    def held_tokens(self, lengths: list[int], row: int | None = None) -> int:
        """Number of tokens that count against the limit; row: tokens of a listed row."""
        if row is None and not lengths:
            return 0
        needed = self.needed_tokens(lengths)
        if self.cp == 1 and row in (None, needed):
            return sum(lengths)
        return needed if row is None else row

    @property
    def at_best(self) -> "SchemeFigures":
        """Figures for bounds: no micro-batch of the scheme is faster or holds more.

        A wave takes at least the mean over its cp ranks, so a sequence in a group of c of W ranks
        adds at least ``(a_c·s² + b_c·s)·c/W``, and a group without sequences takes its c.
        """
        if not self.groups:
            return self
        return SchemeFigures(
            a_ms_per_token2=min(g.cp * g.a_ms_per_token2 for g in self.groups) / self.cp,
            b_ms_per_token=min(g.cp * g.b_ms_per_token for g in self.groups) / self.cp,
            c_ms=min(g.c_ms for g in self.groups),
            max_tokens=max(self.cp // g.cp * g.max_tokens for g in self.groups),
            num_stages=self.num_stages,
            longest_tokens=max(g.max_tokens for g in self.groups),
            window_tokens=self.window_tokens,
            windowed_share=self.windowed_share,
            forward_share=self.forward_share,
        )

    def attended(self, length: float) -> float:
        """What attention computes of a sequence's s², in tokens²."""
        beyond = max(0.0, length - self.window_tokens)
        return length * length - self.windowed_share * beyond * beyond

    def time_ms(self, lengths: list[int], row: int | None = None) -> float:
        """Forward and backward of a micro-batch on one stage; row: tokens of a listed row."""
        squares = sum(map(self.attended, lengths))
        computed = sum(lengths) if row is None else row
        return self.a_ms_per_token2 * squares + self.b_ms_per_token * computed + self.c_ms


@dataclass(frozen=True)
class StrategyFigures:
    """A strategy of the pool on its ranks, with the figures of each replica's scheme."""

    name: str
    replicas: list[tuple[Shape, list[int]]]
    """Shape and ranks of every replica."""
    figures: list[SchemeFigures]
    """Shape (num_replicas,)."""
    overhead_ms: float | None
    """Of regrouping and optimizer; None where the profile has no time of it."""


class PlannedMicroBatch(NamedTuple):
    """Sequences and their lengths; groups as (offset, size, sequences), none for a plain one; rows
    in tokens, none if they are as short as possible."""

    sequences: list[int]
    lengths: list[int]
    groups: list[tuple[int, int, int]]
    rows: list[int]


@dataclass(frozen=True)
class PlannedReplica:
    """A replica of the plan."""

    shape: Shape
    ranks: list[int]
    micro_batches: list[PlannedMicroBatch]
    predicted_time_s: float


@dataclass(frozen=True)
class StageClaim:
    """A plan's claim about dispatch or packing."""

    objective_s: float
    bound_s: float
    gap: float


@dataclass(frozen=True)
class Plan:
    """A plan as it is in the file; only types have been checked."""

    strategy: str
    replicas: list[PlannedReplica]
    predicted_time_s: float
    claims: dict[str, StageClaim]
    """By the name of the stage, if the plan has them."""
    sequence_ids: list[int] | None = None
    """In the corpus, by place in the batch, if training recorded the plan."""

    def named(self, sequence: int) -> str:
        """A place in the batch for messages, with the id in the corpus if it is known."""
        ids = self.sequence_ids or []
        return (
            f"{sequence} ({ids[sequence]} of the corpus)" if sequence < len(ids) else str(sequence)
        )


def read_lengths(path: str) -> list[int]:
    """Lengths of the batch from a JSON list, lines, or an ``.idx``; DataError otherwise."""
    lengths = _lengths_of_index(path) if path.endswith(".idx") else _lengths_of_text(path)
    for length in lengths:
        if type(length) is not int or not 1 <= length <= _MOST:
            raise DataError(
                f"{path}: a length is from 1 to {_MOST} but one is {length!r:.60}; correct it"
            )
    if not lengths:
        raise DataError(
            f"{path}: a batch has at least 1 sequence but this has 0; give another file"
        )
    return lengths


def _lengths_of_text(path: str) -> list[Any]:
    text = _text(path)
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [int(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: lengths are numbers but: {error}; correct the file") from error


def _lengths_of_index(path: str) -> list[int]:
    """Trained tokens of every document: one less than it has."""
    try:
        content = Path(path).read_bytes()
        magic, version, _, num_stored, num_boundaries = _IDX_HEADER.unpack_from(content)
        if magic != _IDX_MAGIC or version != 1:
            raise ValueError(f"begins with {magic!r}, version {version}")
        start = _IDX_HEADER.size
        stored = struct.unpack_from(f"<{num_stored}i", content, start)
        boundaries = struct.unpack_from(f"<{num_boundaries}q", content, start + 12 * num_stored)
        documents = [sum(stored[first:end]) for first, end in pairwise(boundaries)]
    except (OSError, ValueError, struct.error) as error:
        raise DataError(f"{path}: an index of Megatron's is expected but: {error}") from error
    return [num_tokens - 1 for num_tokens in documents if num_tokens > 1]


def read_pool(
    pool_path: str, profile_path: str, gradient_bytes: int = 4
) -> dict[str, StrategyFigures]:
    """Strategies by name; DataError if a file is damaged or a scheme is not in the cost profile.

    gradient_bytes: of a gradient on the wire; overheads of another size do not count.
    """
    profile, pool = _json(profile_path), _json(pool_path)
    try:
        if profile.get("gradient_bytes", 4) != gradient_bytes:
            profile.pop("strategies", None)
        return _strategies(pool, profile)
    except KeyError as error:
        raise DataError(f"{pool_path}, {profile_path}: needs {error} but lacks it") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DataError(f"{pool_path}, {profile_path}: {error}; correct the file") from error


def _strategies(pool: Any, profile: Any) -> dict[str, StrategyFigures]:
    _check_version(pool)
    _check_version(profile)
    window = _window(profile.get("model", {}))
    rows = _once("scheme", [(_shape(row), row | window) for row in profile["schemes"]])
    overheads = _once(
        "strategy of the profile", [(row["name"], row) for row in profile.get("strategies", [])]
    )
    strategies = []
    entries = pool["strategies"]
    num_ranks, ranks_per_node = _whole(pool["num_ranks"]), _whole(pool["ranks_per_node"])
    for entry in entries:
        placed = read_strategy(entry["replicas"], num_ranks, ranks_per_node)
        limits = {read_shape(key): limit for key, limit in entry.get("max_tokens", {}).items()}
        figures = []
        for shape, _ in placed:
            if shape.at_full_width not in rows:
                raise ValueError(f"strategy {entry['name']!r} uses {shape}, which has no row")
            figures.append(_figures(shape, rows, limits.get(shape)))
        name = _word(entry["name"])
        overhead_ms = None
        for row in overheads.values():
            row_ms = _number(row.get("regroup_ms", 0.0)) + _number(row.get("optimizer_ms", 0.0))
            if overhead_ms is None and _is_of(row, name, placed, num_ranks, ranks_per_node):
                overhead_ms = row_ms
        strategies.append((name, StrategyFigures(name, placed, figures, overhead_ms)))
    return _once("strategy of the pool", strategies)


def _is_of(
    row: Any,
    name: str,
    placed: list[tuple[Shape, list[int]]],
    num_ranks: int,
    ranks_per_node: int,
) -> bool:
    """Whether a row of the profile is of these replicas on these ranks; if it does not say and its
    name is no notation, whether it has this name."""
    try:
        of_row = read_strategy(row.get("replicas", row["name"]), num_ranks, ranks_per_node)
    except ValueError:
        return "replicas" not in row and bool(row["name"] == name)
    return of_row == placed


def _figures(shape: Shape, rows: dict[Shape, Any], limit: Any) -> SchemeFigures:
    """Figures of a scheme and its groups; limit: the strategy's, divided evenly over cp ranks."""
    row = rows[shape.at_full_width]
    groups = []
    size = shape.cp if shape.splits_cp else 0
    while size:
        narrow = shape.at_full_width._replace(cp=size)
        if narrow in rows:
            of_group = None if limit is None else _whole(limit) * size // shape.cp
            if of_group is not None:
                of_group -= of_group % (shape.tp * (2 * size if size > 1 else 1))
            groups.append(_figures(narrow, rows, of_group))
        size //= 2
    return SchemeFigures(
        a_ms_per_token2=_number(row["a_ms_per_token2"]),
        b_ms_per_token=_number(row["b_ms_per_token"]),
        c_ms=_number(row["c_ms"]),
        max_tokens=_whole(row["max_tokens"] if limit is None else limit),
        num_stages=shape.pp,
        tp=shape.tp,
        cp=shape.cp,
        groups=tuple(groups),
        window_tokens=row["window_tokens"],
        windowed_share=row["windowed_share"],
        forward_share=_number(row.get("forward_share", SchemeFigures.forward_share)),
    )


def _window(model: dict[str, Any]) -> dict[str, float]:
    """The window of a profile's model, by the names of `SchemeFigures`."""
    num_windowed = _whole(model.get("num_windowed_layers", 0))
    if not num_windowed:
        return {"window_tokens": 0, "windowed_share": 0.0}
    return {
        "window_tokens": _whole(model["window_tokens"]),
        "windowed_share": num_windowed / _whole(model["num_layers"]),
    }


def _once[Key, Value](noun: str, entries: list[tuple[Key, Value]]) -> dict[Key, Value]:
    """The entries by key; ValueError if a key occurs twice."""
    found: dict[Key, Value] = {}
    for key, value in entries:
        if key in found:
            raise ValueError(f"a {noun} is listed once but {key} twice")
        found[key] = value
    return found


def read_plan(path: str) -> Plan:
    """The plan; DataError if the file is not JSON, BrokenRule if it is not a plan."""
    content = _json(path)
    try:
        _check_version(content)
        return Plan(
            strategy=_word(content["strategy"]),
            replicas=[_replica(entry) for entry in content["replicas"]],
            predicted_time_s=_number(content["predicted_time_s"]),
            claims={
                stage: _claim(content[stage])
                for stage in ("dispatch", "packing")
                if content[stage] is not None
            },
            sequence_ids=(
                [_whole(number) for number in content["sequence_ids"]]
                if "sequence_ids" in content
                else None
            ),
        )
    except KeyError as error:
        raise BrokenRule(Rule.PLAN_FORMAT, f"the plan needs {error} but lacks it") from error
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BrokenRule(Rule.PLAN_FORMAT, f"the plan is not written as one: {error}") from error


def _replica(entry: Any) -> PlannedReplica:
    return PlannedReplica(
        shape=_shape(entry["scheme"]),
        ranks=[_whole(rank) for rank in entry["ranks"]],
        micro_batches=[
            PlannedMicroBatch(
                [_whole(sequence) for sequence in micro_batch["sequences"]],
                [_whole(length) for length in micro_batch["lengths"]],
                [_group(*group) for group in micro_batch.get("groups", [])],
                [_whole(row) for row in micro_batch.get("rows", [])],
            )
            for micro_batch in entry["micro_batches"]
        ],
        predicted_time_s=_number(entry["predicted_time_s"]),
    )


def _group(offset: Any, size: Any, num_sequences: Any) -> tuple[int, int, int]:
    return _whole(offset), _whole(size), _whole(num_sequences)


def _claim(entry: Any) -> StageClaim:
    return StageClaim(
        objective_s=_number(entry["objective_s"]),
        bound_s=_number(entry["bound_s"]),
        gap=_number(entry["gap"]),
    )


def _shape(entry: Any) -> Shape:
    layers = entry.get("layers")
    return Shape(
        _whole(entry["tp"]),
        _whole(entry["cp"]),
        _whole(entry["pp"]),
        None if layers is None else tuple(_whole(num) for num in layers),
        bool(entry.get("splits_cp", False)),
        _whole(entry.get("ep", 1)),
    )


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"a whole number from 0 to {_MOST} is expected but there is {value!r:.60}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0.0 <= value < math.inf:
        raise ValueError(f"a finite number from 0 on is expected but there is {value!r:.60}")
    return float(value)


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a name is expected but there is {value!r:.60}")
    return value


def _check_version(content: Any) -> None:
    if content.get("version", _VERSION) != _VERSION:
        raise ValueError(f"version {_VERSION} can be read but this is {content['version']!r}")


def _json(path: str) -> Any:
    try:
        content = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: JSON is expected but: {error}; correct the file") from error
    level = [content]
    for _ in range(_MOST_LEVELS + 1):
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [v for outer in nested for v in (outer.values() if type(outer) is dict else outer)]
    if nested:
        raise DataError(
            f"{path}: objects and lists are nested at most {_MOST_LEVELS} deep but these are "
            "deeper; correct the file"
        )
    return content


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}; correct the path") from error
    if len(raw) > _MOST_BYTES:
        raise DataError(f"{path}: has more than {_MOST_BYTES} bytes; give another file")
    return text


# --- strategies as text ------------------------------------------------------------------------


def read_shape(text: str) -> Shape:
    """A scheme without copies and ranks; ValueError for anything else."""
    match = _TERM.fullmatch("".join(text.split()))
    if match is None or match["idle"] or match["copies"] or match["ranks"]:
        raise ValueError(f"{text!r} is no scheme")
    return _shape_of(match)


def read_strategy(text: str, num_ranks: int, ranks_per_node: int) -> list[tuple[Shape, list[int]]]:
    """Shape and ranks of every replica, in the order of the text; ValueError if impossible."""
    if num_ranks > _MOST_RANKS:
        raise ValueError(f"a job has at most {_MOST_RANKS} ranks but num_ranks is {num_ranks}")
    shapes: list[Shape] = []
    named: list[list[int] | None] = []
    num_idle = 0
    for term in "".join(text.split()).split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"{term!r} in {text!r} is no term of a strategy")
        copies = int(match["copies"] or 1)
        if match["idle"]:
            num_idle += copies
            continue
        shape = _shape_of(match)
        size = shape.num_ranks
        if copies * size > num_ranks:
            raise ValueError(f"{term!r} needs more ranks than the {num_ranks} of the job")
        if size < 1 or shape.ep < 1:
            raise ValueError(f"{term!r} has a degree of 0")
        if shape.tp * shape.cp % shape.ep:
            raise ValueError(f"{term!r} has an ep that does not divide tp times cp")
        ranks = None if match["ranks"] is None else _numbers(match["ranks"])
        if ranks is not None and len(ranks) != copies * size:
            raise ValueError(f"{term!r} names {len(ranks)} ranks but needs {copies * size}")
        for copy in range(copies):
            shapes.append(shape)
            named.append(None if ranks is None else ranks[copy * size : (copy + 1) * size])
    num_used = sum(shape.num_ranks for shape in shapes)
    if num_used + num_idle != num_ranks:
        raise ValueError(f"{text!r} is for {num_used + num_idle} ranks but the job has {num_ranks}")
    taken = [rank for ranks in named if ranks is not None for rank in ranks]
    if len(set(taken)) != len(taken) or max(taken, default=0) >= num_ranks:
        raise ValueError(f"{text!r} names a rank twice or one that the job does not have")
    free = set(range(num_ranks)) - set(taken)
    placed = dict(enumerate(named))
    for index in sorted(placed, key=lambda i: (-shapes[i].tp, -shapes[i].cp)):
        if named[index] is None:
            placed[index] = _place(shapes[index], free, ranks_per_node)
    return [(shape, placed[index] or []) for index, shape in enumerate(shapes)]


def _shape_of(match: re.Match[str]) -> Shape:
    degrees = {"tp": 1, "cp": 1, "ep": 1, "pp": 1}
    for axis, degree, _ in _DEGREE.findall(match["degrees"]):
        degrees[axis] = int(degree)
    layers = None if match["layers"] is None else tuple(_numbers(match["layers"]))
    tp, cp, ep, pp = degrees.values()
    return Shape(tp, cp, pp, layers, "~" in match["degrees"], ep)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _place(shape: Shape, free: set[int], ranks_per_node: int) -> list[int]:
    """Ranks for all stages of a replica; removes them from the free ones."""
    ranks: list[int] = []
    for _ in range(shape.pp):
        stage = _in_one_node(shape.tp * shape.cp, free, ranks_per_node)
        if stage is None:
            stage = []
            for _ in range(shape.cp):
                group = _in_one_node(shape.tp, free, ranks_per_node)
                stage += _across(shape.tp, free, ranks_per_node) if group is None else group
        ranks += stage
    return ranks


def _by_node(free: set[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in sorted(free):
        nodes.setdefault(rank // max(ranks_per_node, 1), []).append(rank)
    return list(nodes.values())


def _in_one_node(size: int, free: set[int], ranks_per_node: int) -> list[int] | None:
    for node in _by_node(free, ranks_per_node):
        if len(node) >= size:
            free.difference_update(node[:size])
            return node[:size]
    return None


def _across(size: int, free: set[int], ranks_per_node: int) -> list[int]:
    roomiest = sorted(_by_node(free, ranks_per_node), key=lambda node: -len(node))
    group = sorted([rank for node in roomiest for rank in node][:size])
    free.difference_update(group)
    return group
