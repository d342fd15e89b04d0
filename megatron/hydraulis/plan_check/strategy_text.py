"""Strategies as text, read and placed on ranks by the rules in words.

The text: terms joined by ``+``; a term is ``[N*]`` and a scheme or ``idle``; a scheme is degrees
``tpN cpN[~] ppN`` in any order, then ``:`` and layers, then ``@`` and ranks. Without ``@`` replicas
are placed by falling tp, then falling cp, then in the order of the text: each stage on the first
node with room for it, else each of its TP groups on the first node with room for that, else on
the nodes with most room.
"""

import re
from typing import NamedTuple

__all__ = ["Shape", "read_shape", "read_strategy"]

_TERM = re.compile(
    r"(?:(?P<copies>\d+)\*)?"
    r"(?:(?P<idle>idle)|(?P<degrees>(?:(?:tp|cp|pp)\d+~?)+))"
    r"(?::(?P<layers>\d+(?:,\d+)*))?"
    r"(?:@(?P<ranks>\d+(?:,\d+)*))?"
)
# Of a job: what is larger is a typing error, and would not fit the memory.
_MOST_RANKS = 10**7
_DEGREE = re.compile(r"(tp|cp|pp)(\d+)(~?)")


class Shape(NamedTuple):
    """Degrees of a replica; layers when the text lists them; whether its cp splits."""

    tp: int
    cp: int
    pp: int
    layers: tuple[int, ...] | None = None
    splits_cp: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of a replica."""
        return self.tp * self.cp * self.pp

    @property
    def at_full_width(self) -> "Shape":
        """The shape under which a cost profile lists it."""
        return self._replace(splits_cp=False)

    def __str__(self) -> str:
        split = "~" if self.splits_cp else ""
        layers = "" if self.layers is None else ":" + ",".join(map(str, self.layers))
        return f"tp{self.tp}cp{self.cp}{split}pp{self.pp}{layers}"


def read_shape(text: str) -> Shape:
    """A scheme alone; ValueError for anything else."""
    match = _TERM.fullmatch("".join(text.split()))
    if match is None or match["idle"] or match["copies"] or match["ranks"]:
        raise ValueError(f"{text!r} is no scheme")
    return _shape(match)


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
        shape = _shape(match)
        if copies * shape.num_ranks > num_ranks:
            raise ValueError(f"{term!r} needs more ranks than the {num_ranks} of the job")
        if shape.num_ranks < 1:
            raise ValueError(f"{term!r} has a degree of 0")
        ranks = None if match["ranks"] is None else _numbers(match["ranks"])
        size = shape.num_ranks
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


def _shape(match: re.Match[str]) -> Shape:
    degrees = {"tp": 1, "cp": 1, "pp": 1}
    for axis, degree, _ in _DEGREE.findall(match["degrees"]):
        degrees[axis] = int(degree)
    layers = None if match["layers"] is None else tuple(_numbers(match["layers"]))
    return Shape(degrees["tp"], degrees["cp"], degrees["pp"], layers, "~" in match["degrees"])


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _place(shape: Shape, free: set[int], ranks_per_node: int) -> list[int]:
    """Ranks for all stages of a replica, taken out of the free ones."""
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
