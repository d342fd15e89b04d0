"""Upstream's parser with our flags, which records the flags that the user gave."""

import argparse
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.flags.options import FORMER_OPTIONS, HONOURED, Honoured, Need, refusal

__all__ = ["FlagParser", "ParsedFlags"]

_GROUP_TITLE = "hydraulis"
_USAGE = "torchrun [TORCHRUN OPTIONS] --no-python hydraulis train [FLAGS]"
_DESCRIPTION = (
    "Balanced training of a GPT over variable-length sequences. `torchrun [TORCHRUN OPTIONS] -m "
    "megatron.hydraulis train [FLAGS]` and, in a checkout, `torchrun [TORCHRUN OPTIONS] "
    "pretrain_gpt.py [FLAGS]` are the same program. --help and --dry-run need no torchrun: "
    "`hydraulis train [FLAGS] --dry-run`. Megatron's flags that are not listed here are refused."
)


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """A command line that holds only options which are honoured."""

    args: argparse.Namespace
    """All attributes, given or default, those of our own flags included."""
    given: tuple[tuple[str, str], ...]
    """(option string as typed, attribute it sets) in the order of the command line."""

    def was_given(self, dest: str) -> bool:
        """Whether any option that sets the attribute was given."""
        return any(given == dest for _, given in self.given)

    @property
    def explicit(self) -> frozenset[str]:
        """The option strings that were given, as typed."""
        return frozenset(option for option, _ in self.given)


class _Record(argparse.Action):
    """Replaces an action and records that its option was given, and by which string."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.given.append((option_string, self.dest))


class _Member:
    """Converts the name of a member of an enumeration."""

    def __init__(self, option: str, members: Sequence[enum.Enum]) -> None:
        self._option = option
        self._members = {member.name: member for member in members}

    def __call__(self, name: str) -> enum.Enum:
        if name not in self._members:
            raise ConfigurationError(
                f"{self._option} takes one of {len(self._members)} names but is '{name}'; choose "
                f"one of {', '.join(self._members)}"
            )
        return self._members[name]


class FlagParser:
    """Parses command lines; keeps no state between them."""

    def __init__(self) -> None:
        self._parser = argparse.ArgumentParser(
            prog="hydraulis train",
            usage=_USAGE,
            description=_DESCRIPTION,
            allow_abbrev=False,
        )
        add_megatron_arguments(self._parser)
        self._upstream = {
            option: (action, group.title or "")
            for group in self._parser._action_groups
            for action in group._group_actions
            for option in action.option_strings
            if action.dest != "help"
        }
        self._show_honoured_only()
        self._name_enumerations()
        ArgumentGroupFactory(HydraulisConfig).build_group(self._parser, _GROUP_TITLE)
        self._recorder = self._build_recorder()

    @property
    def upstream_options(self) -> Mapping[str, str]:
        """Every option string of upstream's parser -> title of the group it stands in."""
        return {option: group for option, (_, group) in self._upstream.items()}

    @property
    def honoured_dests(self) -> tuple[str, ...]:
        """The attributes that honoured options of upstream set, in alphabetical order."""
        return tuple(sorted({self._upstream[option][0].dest for option in HONOURED}))

    def parse(self, argv: Sequence[str] | None) -> ParsedFlags:
        """Parse a command line, or ``sys.argv`` for None. The last value of a repeated flag wins.

        An unknown flag or a value of the wrong type ends the process with status 2, as with any
        argparse program. Raises ConfigurationError for options that are not honoured, honoured
        only with other values, or without effect in this combination.
        """
        # Before values are converted: a refused option is reported even if its value is invalid.
        given = tuple(self._recorder.parse_args(argv, argparse.Namespace(given=[])).given)
        self._refuse(option for option, _ in given)
        args = self._parser.parse_args(argv)
        for option, dest in given:
            honoured = self._honoured(option)
            if honoured is not None:
                _check_value(option, getattr(args, dest), honoured)
                _check_need(option, args, honoured.need)
        return ParsedFlags(args, given)

    def _honoured(self, option: str) -> Honoured | None:
        """How an option of upstream is honoured; None for our own and for refused ones."""
        if option not in self._upstream:
            return None
        action, _ = self._upstream[option]
        return HONOURED.get(action.option_strings[0])

    def _refuse(self, options: Iterable[str]) -> None:
        refusals = [
            refusal(option, self._upstream[option][1] if option in self._upstream else "")
            for option in dict.fromkeys(options)
            if option in FORMER_OPTIONS
            or (option in self._upstream and self._honoured(option) is None)
        ]
        if len(refusals) == 1:
            raise ConfigurationError(refusals[0])
        if refusals:
            lines = "".join(f"\n  {line}" for line in refusals)
            raise ConfigurationError(f"{len(refusals)} options are not honoured:{lines}")

    def _show_honoured_only(self) -> None:
        """Show only honoured options in --help, in upstream's groups, with our notes appended."""
        for group in self._parser._action_groups:
            group.description = None
            for action in group._group_actions:
                honoured = HONOURED.get(action.option_strings[0])
                if honoured is None and action.dest != "help":
                    action.help = argparse.SUPPRESS
                    continue
                text = (action.help or "").replace("%%", "%")
                if honoured is not None:
                    text = f"{text} {honoured.help_note}".strip()
                    if honoured.only is not None and action.choices is not None:
                        action.metavar = "{" + ",".join(map(str, honoured.only)) + "}"
                # argparse formats help texts with %; upstream has some that are no formats.
                action.help = text.replace("%", "%%")

    def _name_enumerations(self) -> None:
        """Let enumerations be read, and shown in --help, by the names of their members.

        Upstream's own converter raises a KeyError, which argparse does not catch, and its help
        lists values that the converter does not take.
        """
        for action, _ in self._upstream.values():
            members = list(action.choices or ())
            if members and all(isinstance(member, enum.Enum) for member in members):
                action.type = _Member(action.option_strings[0], members)
                action.metavar = "NAME"

    def _build_recorder(self) -> argparse.ArgumentParser:
        recorder = argparse.ArgumentParser(
            prog="hydraulis train", usage=_USAGE, allow_abbrev=False, add_help=False
        )
        for action in self._parser._actions:
            recorder.add_argument(
                *action.option_strings,
                action=_Record,
                dest=action.dest,
                nargs=action.nargs,
                default=argparse.SUPPRESS,
            )
        for option in FORMER_OPTIONS:
            recorder.add_argument(option, action=_Record, nargs="?", default=argparse.SUPPRESS)
        return recorder


def _check_value(option: str, value: object, honoured: Honoured) -> None:
    if honoured.only is not None and value not in honoured.only:
        raise ConfigurationError(f"{option} {value} is not honoured: {honoured.otherwise}")


def _check_need(option: str, args: argparse.Namespace, need: Need | None) -> None:
    if need is None:
        return
    value = getattr(args, need.dest)
    if need.values is not None:
        is_set = value in need.values
    else:
        is_set = value is not None and value is not False and value != []
    if is_set == need.absent:
        fix = "remove one of the two" if need.absent else f"add it or remove {option}"
        raise ConfigurationError(f"{option} has an effect only with {need.flag}; {fix}")
