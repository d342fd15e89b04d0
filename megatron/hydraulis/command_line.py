"""Parsing of commands' arguments, and their end when nobody reads their output."""

from __future__ import annotations

import argparse
import difflib
import errno
import itertools
import os
import select
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NoReturn, get_args, get_type_hints

from megatron.hydraulis.errors import ConfigurationError, NotInstalledError, Problems, printable
from megatron.hydraulis.ranges import RANGES_OF_COMMANDS, check_range

_EXIT_WITHOUT_READER = 141
"""128 + SIGPIPE, as shells report a program whose output nobody reads."""
_EXIT_WITHOUT_ROOM = 1
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
PLACEHOLDER = "FLAGS"
"""The word that stands for options that are not known in a printed command."""
NEVER_ABBREVIATIONS = ("--strategy", "--trace")
"""Options of training that are never read as abbreviations of longer ones in other commands."""
_FIX_OF_VALUE = {"int": "write a whole number", "float": "write a number, as in 0.5"}
"""Converter as argparse names it -> what to do about a value that it cannot read."""
_MIN_SIMILARITY = 0.8
"""`difflib`'s ratio from which a name is suggested: one or two wrong letters."""

Accept = Callable[[Sequence[str], Sequence[str]], tuple[list[str], Mapping[str, object]]]


class CommandParser(argparse.ArgumentParser):
    """A parser with a usage line that names what is required only, and errors that name the flag
    that was probably meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _ShortUsage} | kwargs)
        self._words: Sequence[str] = ()
        self.accept: Accept | None = None
        """Takes all words, and those that are no arguments; returns those that are an error, and
        attributes of the namespace."""

    def declares(self, option: str) -> bool:
        return option in self._option_string_actions

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, except for words that are accepted.

        Raises ConfigurationError for a number outside the range of its option, and for a value that
        is empty or controls a terminal.
        """
        namespace, rest = self.parse_known_args(args, namespace)
        self._check_words()
        if rest and self.accept is not None:
            try:
                rest, found = self.accept(self._words, rest)
            except NotInstalledError as error:
                words = " ".join(rest)
                self.error(f"unrecognized arguments: {words}; to read options of training, {error}")
            vars(namespace).update(found)
            self._words = rest
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        self._check_ranges(namespace)
        return namespace

    def _check_words(self) -> None:
        """Raise ConfigurationError as `problem_of_value` says."""
        words = itertools.takewhile(lambda word: word != "--", self._words)
        for before, word in itertools.pairwise(("", *words)):
            option, has_value, value = word.partition("=")
            if not (word.startswith("--") and has_value):
                option, value = before, word
            if option.startswith("--") and option not in self._option_string_actions:
                continue  # of a launch script
            if problem := problem_of_value(option if option[:2] == "--" else "an argument", value):
                raise ConfigurationError(problem)

    def _check_ranges(self, namespace: argparse.Namespace) -> None:
        """Raise ConfigurationError for numbers outside the range of their option."""
        problems = Problems()
        for action in self._actions:
            option = next(iter(action.option_strings), "")
            value = getattr(namespace, action.dest, None)
            if (bounds := RANGES_OF_COMMANDS.get(option)) is not None:
                for each in value if isinstance(value, list) else [value]:
                    if (line := bounds.problem(option, each)) is not None:
                        problems.add(line)
        problems.raise_any()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, and keeps the words for `error`."""
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Options that this may abbreviate; argparse calls it."""
        if option_string.split("=")[0] in NEVER_ABBREVIATIONS:
            return []
        return super()._get_option_tuples(option_string)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, the usage and the message, with the flags that were meant."""
        for converter, fix in _FIX_OF_VALUE.items():
            if f": invalid {converter} value: " in message:
                message += f"; {fix}"
        super().error(printable(message + self.suggestions()))

    def suggestions(self) -> str:
        """``; did you mean --strategy instead of --stratgy?`` for unknown flags, or nothing."""
        # Without their dashes, which would make all of them similar.
        known = [
            option.removeprefix("--")
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
        ]
        # What follows a "--" belongs to another program.
        words = self._words[: self._words.index("--")] if "--" in self._words else self._words
        given = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("--"))
        found = [
            f"--{close} instead of {word}"
            for word in given
            if not self._accepts(word)
            and (close := closest(word.removeprefix("--"), known)) is not None
        ]
        return f"; did you mean {' and '.join(found)}?" if found else ""

    def _accepts(self, word: str) -> bool:
        if word in self._option_string_actions:
            return True
        return self.allow_abbrev and any(
            option.startswith(word) for option in self._option_string_actions
        )


def problem_of_value(option: str, value: str) -> str | None:
    """Says what is wrong with an empty value, as a shell makes of an unset variable, and with
    control characters, which a name in the output would send to a terminal; else None."""
    if not value:
        return f"{option} has an empty value; give one or leave it out"
    if any(unicodedata.category(each) == "Cc" and each not in "\n\t" for each in value):
        return f"{option} has no control characters but is {value!a:.100}; give another name"
    return None


class _ShortUsage(argparse.HelpFormatter):
    """Help whose usage shows required arguments, and ``[FLAGS]`` for all others."""

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        groups = [group for group in groups if group.required]
        needed = {id(one) for group in groups for one in group._group_actions}
        optional = argparse.Action([], "flags", metavar="[FLAGS]")
        flags = [one for one in actions if one.option_strings]
        positional = [one for one in actions if not one.option_strings]
        required = [one for one in flags if one.required or id(one) in needed]
        super().add_usage(usage, [*required, optional, *positional], groups, prefix)


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks a field of a request, ``Annotated[type, Flag(…)]``, that commands take as a flag."""

    help: str
    """The default is added unless the text names one."""
    name: str = ""
    """The flag, if it is not named after the field."""
    metavar: str | None = "N"
    choices: Sequence[str] | None = None
    parse: Callable[[str], Any] | None = None
    """Function from a word to the value; by default the type of the field."""


def add_flags(parser: argparse._ActionsContainer, request: type, *names: str, **other: Any) -> None:
    """Declare the flags of some fields of a request, with its defaults.

    other: defaults that the command changes, by field.
    """
    found = _flags(request)
    for name in names:
        option, flag, kind, default = found[name]
        default = other.get(name, default)
        is_listed = isinstance(default, tuple)
        text = "" if default is None or "(default" in flag.help else " (default: %(default)s)"
        parser.add_argument(
            option,
            type=flag.parse or (str if flag.choices else next(iter(get_args(kind)), kind)),
            nargs="+" if is_listed else None,
            choices=flag.choices,
            default=default,
            metavar=flag.metavar,
            help=flag.help + text,
        )


def given_flags(request: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that a command takes as flags, with their values."""
    given, found = vars(namespace), {}
    for name, (option, *_) in _flags(request).items():
        destination = option.removeprefix("--").replace("-", "_")
        if destination in given:
            found[name] = given[destination]
    return found


def check_flags(request: Any) -> None:
    """Raise ConfigurationError for what the flag of a field would not take: a number outside its
    range or not whole, a word that is no choice."""
    for name, (option, flag, kind, _) in _flags(type(request)).items():
        value = getattr(request, name)
        if isinstance(value, float) and int in (kind, *get_args(kind)):
            raise ConfigurationError(f"{option} must be a whole number but is {value}; round it")
        if option in RANGES_OF_COMMANDS:
            check_range(option, value)
        if flag.choices is not None and isinstance(value, str) and value not in flag.choices:
            raise ConfigurationError(
                f"{option} {value!r} is none of {', '.join(flag.choices)}; use one of them"
            )


def _flags(request: type) -> dict[str, tuple[str, Flag, Any, Any]]:
    """Returns the option, flag, type and default of each field."""
    hints = get_type_hints(request, include_extras=True)
    return {
        each.name: (
            flag.name or f"--{each.name.replace('_', '-')}",
            flag,
            hints[each.name].__origin__,
            each.default,
        )
        for each in fields(request)
        for flag in getattr(hints[each.name], "__metadata__", ())
    }


def add_lengths_argument(parser: argparse._ActionsContainer, *, of_batch: bool = False) -> None:
    """Declare --lengths, of one batch or of a corpus."""
    what, histogram = "batch", ""
    if not of_batch:
        what, histogram = "corpus", ", or a histogram .csv with the header length_tokens,count"
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help=f"lengths of the {what} in tokens: an .idx (a document of D tokens trains D-1), a "
        f"JSON list, text with a number per line{histogram}",
    )


def add_profile_argument(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare --cost-profile, with a note on what else it is used for."""
    parser.add_argument(
        "--cost-profile",
        required=required,
        metavar="FILE",
        help="cost profile, JSON: times of schemes in ms, limits in tokens per micro-batch" + note,
    )


def add_pool_argument(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare --strategy-pool, or --pool for short, with a note on what it is used for."""
    parser.add_argument(
        "--strategy-pool",
        "--pool",
        dest="pool",
        type=_pool_file,
        required=required,
        metavar="FILE",
        help=f"pool of strategies, JSON{note}",
    )


def _pool_file(path: str) -> str:
    if path == "auto":
        raise argparse.ArgumentTypeError(
            "a pool is read from a file but this is auto, which training proposes itself; write "
            "one by hydraulis propose --out"
        )
    return path


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name most similar to a misspelt one; None if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=_MIN_SIMILARITY)
    return close[0] if close else None


@contextmanager
def quiet_without_reader() -> Iterator[None]:
    """End quietly, with status 141, when the reader of the output has gone, as with ``| head``;
    with one line and status 1 when there is no room for the output."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
        return
    except BrokenPipeError:
        if not reader_has_gone():
            raise  # another pipe broke, which is an error
        status = _EXIT_WITHOUT_READER
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:
            raise
        status = _EXIT_WITHOUT_ROOM
        print(
            f"error: the output must be written but: {error.strerror}; make room or send it "
            "elsewhere",
            file=sys.stderr,
        )
    # The interpreter flushes once more when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def reader_has_gone() -> bool:
    """True if standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
