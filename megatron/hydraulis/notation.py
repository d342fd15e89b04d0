"""The strategy notation as text: ``tp2@0,3+pp2:5,3@1,2``, ``tp16+2*tp8pp3``, ``2*cp8~+4*idle``.

    strategy = term ('+' term)*
    term     = [N '*'] (scheme | 'idle')
    scheme   = ('tp' N | 'cp' N ['~'] | 'pp' N)+ [':' layers (',' layers)*] ['@' rank (',' rank)*]

Blanks may stand between any two symbols. The ranks after ``@`` run stage by stage, in a stage cp
by cp, in that tp by tp; those of ``N*`` copies follow one another, the first copy first.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.scheme import Replica, Scheme

__all__ = ["Term", "format_terms", "parse_terms"]

_AXES = ("tp", "cp", "pp")
_SYMBOL = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<word>[A-Za-z]+)|(?P<mark>\S))")
# Longer numbers are typing errors; int() itself refuses some thousand digits with another error.
_MAX_DIGITS = 9
_EXAMPLE = "write for example 'tp4+2*tp2pp2+idle'"


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a strategy: copies of a scheme, or idle ranks when the scheme is None."""

    num_copies: int
    scheme: Scheme | None
    ranks: tuple[int, ...] | None = None
    """Ranks of all copies, one copy after another; None leaves the placement open."""


class _Reader:
    """Walks over the symbols of one strategy text; all errors name the text and the place."""

    def __init__(self, text: str, label: str) -> None:
        self._label = label
        # (symbol, index of its first character); the end is an empty symbol.
        self._symbols: list[tuple[str, int]] = [
            (match.group().strip(), match.end() - len(match.group().strip()))
            for match in _SYMBOL.finditer(text)
        ]
        self._symbols.append(("", len(text)))
        self._next = 0

    @property
    def symbol(self) -> str:
        return self._symbols[self._next][0]

    def take(self) -> str:
        symbol = self.symbol
        self._next += 1
        return symbol

    def take_if(self, symbol: str) -> bool:
        if self.symbol != symbol:
            return False
        self._next += 1
        return True

    @property
    def at_number(self) -> bool:
        # isdigit alone also accepts digits of other scripts and superscripts.
        return self.symbol.isascii() and self.symbol.isdigit()

    def take_number(self, what: str) -> int:
        if not self.at_number or len(self.symbol) > _MAX_DIGITS:
            raise self.error(f"expected {what} of at most {_MAX_DIGITS} digits")
        return int(self.take())

    def take_numbers(self, what: str) -> tuple[int, ...]:
        numbers = [self.take_number(what)]
        while self.take_if(","):
            numbers.append(self.take_number(what))
        return tuple(numbers)

    def error(self, rule: str) -> StrategyError:
        symbol, place = self._symbols[self._next]
        found = f"found {symbol!r} at character {place + 1}" if symbol else "the text ends"
        return StrategyError(f"strategy {self._label!r}: {rule} but {found}; {_EXAMPLE}")

    def refuse(self, message: str) -> StrategyError:
        return StrategyError(f"strategy {self._label!r}: {message}")


def parse_terms(text: str, *, label: str) -> tuple[Term, ...]:
    """Read a strategy text into its terms, in the order of the text.

    The label is the strategy's name in errors. Raises StrategyError for a text that does not
    follow the notation, a scheme that is none, and a number of ``@`` ranks other than copies
    times ranks of the scheme. How many ranks the job has is not looked at here.
    """
    reader = _Reader(text, label)
    terms = [_read_term(reader)]
    while reader.take_if("+"):
        terms.append(_read_term(reader))
    if reader.symbol:
        raise reader.error("expected '+' or the end after a term")
    return tuple(terms)


def _read_term(reader: _Reader) -> Term:
    num_copies = 1
    if reader.at_number:
        num_copies = reader.take_number("a number of copies")
        if not reader.take_if("*"):
            raise reader.error(f"expected '*' between the number of copies {num_copies} and 'tp…'")
        if num_copies < 1:
            raise reader.refuse(
                f"a term stands for at least 1 copy but one says {num_copies}*; remove that term"
            )
    if reader.take_if("idle"):
        return Term(num_copies, None)
    scheme = _read_scheme(reader)
    ranks = None
    if reader.take_if("@"):
        ranks = reader.take_numbers("a rank")
        num_needed = num_copies * scheme.num_ranks
        if len(ranks) != num_needed:
            copies = f"{num_copies} copies of {scheme}" if num_copies > 1 else f"{scheme}"
            raise reader.refuse(
                f"'@' lists the ranks of every copy, one copy after another, but {copies} "
                f"with {num_needed} ranks in all {'has' if num_copies == 1 else 'have'} "
                f"{len(ranks)} listed; list {num_needed} ranks or drop the '@'"
            )
    return Term(num_copies, scheme, ranks)


def _read_scheme(reader: _Reader) -> Scheme:
    degrees: dict[str, int] = {}
    splits_cp = False
    while reader.symbol in _AXES:
        axis = reader.symbol
        if axis in degrees:
            raise reader.error(f"expected {axis} once in a scheme")
        reader.take()
        degrees[axis] = reader.take_number(f"the degree of {axis}")
        if reader.symbol == "~":
            if axis != "cp":
                raise reader.error(f"'~' belongs behind the degree of cp, not of {axis},")
            reader.take()
            splits_cp = True
    if not degrees:
        raise reader.error("expected a scheme of tp, cp, pp with their degrees, or 'idle',")
    layers = reader.take_numbers("a number of layers") if reader.take_if(":") else None
    try:
        return Scheme(
            tp=degrees.get("tp", 1),
            cp=degrees.get("cp", 1),
            pp=degrees.get("pp", 1),
            layers=layers,
            splits_cp=splits_cp,
        )
    except StrategyError as error:
        raise reader.refuse(str(error)) from None


def format_terms(replicas: Sequence[Replica], *, num_idle: int, with_ranks: bool) -> str:
    """Write replicas and idle ranks in the notation, neighbours of one scheme as one term.

    With with_ranks every replica's placement is written out behind ``@``.
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
