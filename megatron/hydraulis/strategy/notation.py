"""The notation of strategies: ``tp2@0,3+pp2:5,3@1,2``, ``tp16+2*tp8pp3``, ``2*cp8~+4*idle``.

    strategy = term ('+' term)*
    term     = [N '*'] (scheme | 'idle')
    scheme   = degree+ ['r'] [':' layers (',' layers)*] ['@' rank (',' rank)*]
    degree   = 'tp' N | 'cp' N ['~'] | 'fs' [N] | 'ep' N | 'pp' N

``fs`` without a number shares weights among all cp ranks, as in ``cp8fs`` and ``cp8~fs``; ``r``
recomputes every layer. Blanks are allowed between any two symbols. The ranks after ``@`` are
ordered by stage, then cp, then tp; with ``N*`` copies, those of the first copy come first.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.hydraulis.errors import StrategyError, counted
from megatron.hydraulis.strategy.scheme import Replica, Scheme, place

# Longer numbers are typing errors.
_NUMBER = r"[0-9]{1,9}"
_NUMBERS = rf"{_NUMBER}(?:\s*+,\s*+{_NUMBER})*"
_DEGREE = rf"(tp|cp|ep|fs|pp)(?:\s*+({_NUMBER})|(?<=fs))\s*+(~?)"
_TERM = re.compile(
    rf"\s*+(?:(?P<copies>{_NUMBER})\s*+\*\s*+)?(?:idle|(?P<degrees>(?:{_DEGREE}\s*+)+)(?P<again>r?)\s*+"
    rf"(?::\s*+(?P<layers>{_NUMBERS})\s*+)?(?:@\s*+(?P<ranks>{_NUMBERS}))?)\s*+"
)
_EXAMPLE = "write for example 'tp4+2*tp2pp2+idle'"


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a strategy: copies of a scheme, or idle ranks when the scheme is None."""

    num_copies: int
    scheme: Scheme | None
    ranks: tuple[int, ...] | None = None
    """Ranks of all copies, one copy after another; None for the default placement."""


def parse_terms(text: str, *, label: str) -> tuple[Term, ...]:
    """Read a strategy text into its terms, in the order of the text.

    The label is the strategy's name in errors. Raises StrategyError for a text that does not
    follow the notation, an invalid scheme, and a number of ``@`` ranks other than copies times
    ranks of the scheme. The number of ranks of the job is not checked.
    """
    terms, at = [], 0
    for part in text.split("+"):
        match = _TERM.fullmatch(part)
        if match is None:
            raise StrategyError(
                f"strategy {label!r}: terms of tp, cp, fs, ep and pp, numbers of at most 9 "
                f"digits, look like 4*idle, tp2cp8~ or 2*pp2:5,3@0,1,2,3 but {part.strip()!r} at "
                f"character {at + 1} is none; {_EXAMPLE}"
            )
        try:
            terms.append(_term(match))
        except StrategyError as error:
            raise StrategyError(f"strategy {label!r}: {error}") from None
        at += len(part) + 1
    return tuple(terms)


def parse_scheme(text: str, *, label: str) -> Scheme:
    """Read a text that is one scheme; StrategyError, which names the label, for any other."""
    terms = parse_terms(text, label=label)
    scheme = terms[0].scheme
    if scheme is None or terms != (Term(1, scheme),):
        raise StrategyError(
            f"strategy {label!r}: expected one scheme, without copies and ranks, but found "
            f"{text!r}; write for example 'tp4pp2'"
        )
    return scheme


def _term(match: re.Match[str]) -> Term:
    """The term of a match of `_TERM`; StrategyError, without the strategy's name, for numbers that
    do not fit together."""
    num_copies = int(match["copies"] or 1)
    if num_copies < 1:
        raise StrategyError(
            f"a term stands for at least 1 copy but one says {num_copies}*; remove that term"
        )
    if match["degrees"] is None:
        return Term(num_copies, None)
    degrees: dict[str, int] = {}
    splitting = ""
    for axis, degree, mark in re.findall(_DEGREE, match["degrees"]):
        if axis in degrees:
            raise StrategyError(
                f"a scheme has a degree once but {match['degrees'].strip()} has {axis} twice; "
                "remove one"
            )
        if mark and axis != "cp":
            raise StrategyError(
                f"'~' belongs behind the degree of cp, not of {axis}; {_EXAMPLE} or 'cp8~fs'"
            )
        degrees[axis] = int(degree or 0)
        splitting += mark
    if degrees.get("fs") == 0:
        degrees["fs"] = degrees.get("cp", 1)
    if degrees.get("fs") == 1:
        raise StrategyError(
            f"fs shares weights among the cp ranks but {match['degrees'].strip()} has 1 of them; "
            f"give cp a degree from 2 on or drop the fs"
        )
    scheme = Scheme(
        **degrees,
        layers=_numbers(match["layers"]),
        splits_cp=bool(splitting),
        recomputes=bool(match["again"]),
    )
    ranks = _numbers(match["ranks"])
    num_needed = num_copies * scheme.num_ranks
    if ranks is not None and len(ranks) != num_needed:
        copies = f"{num_copies} copies of {scheme}" if num_copies > 1 else f"{scheme}"
        raise StrategyError(
            f"'@' lists the ranks of every copy, one copy after another, but {copies} "
            f"with {num_needed} ranks in all {'has' if num_copies == 1 else 'have'} "
            f"{len(ranks)} listed; list {num_needed} ranks or drop the '@'"
        )
    return Term(num_copies, scheme, ranks)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(map(int, text.split(",")))


def format_terms(replicas: Sequence[Replica], *, num_idle: int, with_ranks: bool) -> str:
    """Write replicas and idle ranks in the notation, neighbours of the same scheme as one term.

    with_ranks: whether to write the placement of every replica after ``@``.
    """
    terms = []
    for scheme, group in groupby(replicas, key=lambda replica: replica.scheme):
        copies = tuple(group)
        text = f"{len(copies)}*{scheme}" if len(copies) > 1 else f"{scheme}"
        if with_ranks:
            text += "@" + ",".join(str(rank) for copy in copies for rank in copy.ranks)
        terms.append(text)
    if num_idle:
        terms.append(f"{num_idle}*idle" if num_idle > 1 else "idle")
    return "+".join(terms)


def place_terms(
    terms: Sequence[Term], num_ranks: int, ranks_per_node: int, *, label: str
) -> tuple[Replica, ...]:
    """The replicas in the order of the text, those without ``@`` placed on the remaining ranks.

    Raises StrategyError, which names the label, unless the terms use or name idle as many ranks as
    the job has, and if a replica lists a rank twice.
    """
    _check_num_ranks(terms, num_ranks, label)
    wanted: list[tuple[Scheme, tuple[int, ...] | None]] = []
    for term in terms:
        if term.scheme is None:
            continue
        size = term.scheme.num_ranks
        for copy in range(term.num_copies):
            start = copy * size
            ranks = None if term.ranks is None else term.ranks[start : start + size]
            wanted.append((term.scheme, ranks))
    named = {rank for _, ranks in wanted if ranks is not None for rank in ranks}
    free = [rank for rank in range(num_ranks) if rank not in named]
    open_schemes = [scheme for scheme, ranks in wanted if ranks is None]
    if sum(scheme.num_ranks for scheme in open_schemes) > len(free):
        # A listed rank is outside the job or listed twice: Strategy raises the error that says so.
        free += range(num_ranks, num_ranks + sum(scheme.num_ranks for scheme in open_schemes))
    placed = iter(place(open_schemes, free, ranks_per_node))
    try:
        return tuple(
            Replica(scheme, next(placed) if ranks is None else ranks) for scheme, ranks in wanted
        )
    except StrategyError as error:
        raise StrategyError(f"strategy {label!r}: {error}") from None


def _check_num_ranks(terms: Iterable[Term], num_ranks: int, label: str) -> None:
    num_replicas = num_used = num_idle = 0
    for term in terms:
        if term.scheme is None:
            num_idle += term.num_copies
        else:
            try:
                term.scheme.check_replica()
            except StrategyError as error:
                raise StrategyError(f"strategy {label!r}: {error}") from None
            num_replicas += term.num_copies
            num_used += term.num_copies * term.scheme.num_ranks
    num_named = num_used + num_idle
    use = "uses" if num_replicas == 1 else "use"
    what = f"{counted(num_replicas, 'replica')} {use} {counted(num_used, 'rank')}"
    if num_idle:
        what += f", {num_idle} more {'is' if num_idle == 1 else 'are'} idle,"
    if num_named > num_ranks:
        fix = "remove idle ranks" if num_used <= num_ranks else "remove a replica"
        raise StrategyError(
            f"strategy {label!r}: {what} but the job has {num_ranks}; "
            f"{fix} or start {counted(num_named, 'rank')}"
        )
    if num_named < num_ranks:
        num_missing = num_ranks - num_named
        idle = "idle" if num_missing == 1 else f"{num_missing}*idle"
        raise StrategyError(
            f"strategy {label!r}: {what} but the job has {num_ranks}, all to be used or named "
            f"idle; append '+{idle}', add a replica or start {counted(num_named, 'rank')}"
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in the order given, with consecutive ones combined: ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
