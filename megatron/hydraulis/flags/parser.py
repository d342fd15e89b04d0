"""Upstream's parser with our flags: reads a command line and lists all that is wrong with it."""

import argparse
import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron.hydraulis.command_line import closest, problem_of_value
from megatron.hydraulis.errors import ConfigurationError, Problems
from megatron.hydraulis.flags.checks import SHAPE, check_shape
from megatron.hydraulis.flags.config import FIELDS_BY_TOPIC, HydraulisConfig, option_of
from megatron.hydraulis.flags.honoured import HONOURED, HONOURED_BY_TOPIC, Honoured, Need
from megatron.hydraulis.flags.options import (
    EQUIVALENTS,
    FORMER_OPTIONS,
    Refused,
    Row,
    Taken,
    refusal,
    row_of,
)
from megatron.hydraulis.ranges import RANGES

_USAGE = "torchrun [TORCHRUN OPTIONS] --no-python hydraulis train [FLAGS]"
_DESCRIPTION = (
    "Balanced training of a GPT over variable-length sequences. `torchrun [TORCHRUN OPTIONS] -m "
    "megatron.hydraulis train [FLAGS]` and, in a checkout, `torchrun [TORCHRUN OPTIONS] "
    "pretrain_gpt.py [FLAGS]` are the same program. --help and --dry-run need no torchrun: "
    "`hydraulis train [FLAGS] --dry-run`. The flags of Hydraulis come first, then those of "
    "Megatron; Megatron's flags that are not listed here are accepted if the update is the same "
    "without them, and refused otherwise: docs/coming-from-megatron.md."
)
_METAVARS: Mapping[Any, str] = {int: "N", float: "X"}
"""Names of upstream's numbers in --help, where argparse would repeat the flag."""
_PATTERN = "N, or a list as ([0]*3+[1])"
_FORMS = {"moe_freq_type": _PATTERN, "no_rope_freq_type": _PATTERN, "tuple_type": "N,0"}
"""Upstream's converters, which argparse names in errors -> what they take."""
_IGNORE_UNKNOWN = "--ignore-unknown-options"
_OF_MODEL = frozenset({**HONOURED_BY_TOPIC["Model"], **HONOURED_BY_TOPIC["Experts"]})
OF_MODEL_AND_LAYERS = _OF_MODEL | {"--sequence-parallel", "--cp-comm-type"}
"""Options that describe a model without the rest of a launch script."""
_SWITCHED_OFF_BY_0 = ("--num-experts", "--mtp-num-layers")
"""Honoured options whose 0 stands for their absence."""


@dataclass(frozen=True, slots=True)
class Given:
    """One option of a command line."""

    option: str
    """The option as typed."""
    dest: str
    """The attribute that it sets."""
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.option, *self.values))


@dataclass(frozen=True, slots=True)
class ParsedFlags:
    """A command line that holds only options which are honoured or taken."""

    args: argparse.Namespace
    """All attributes, given or default, those of our own flags included. Those of options that are
    taken have their defaults."""
    given: tuple[Given, ...]
    """Options that were honoured, in the order of the command line."""
    taken: tuple[tuple[str, str], ...]
    """Options that were taken: (the option with its values, what happens instead)."""
    unknown: tuple[tuple[str, str], ...]
    """Options that --ignore-unknown-options left out: (option with its values, our equivalent)."""
    attempted: frozenset[str]
    """The attributes of all options that were given, rightly or wrongly."""
    wrong: frozenset[str]
    """The attributes of options whose value cannot be read or is out of range."""

    def was_given(self, dest: str) -> bool:
        """True if any option that sets the attribute was given."""
        return any(given.dest == dest for given in self.given)

    @property
    def as_typed(self) -> tuple[str, ...]:
        """Options that were honoured, each with its last values."""
        return tuple({given.option: str(given) for given in self.given}.values())

    @property
    def explicit(self) -> frozenset[str]:
        """The honoured option strings that were given, as typed."""
        return frozenset(given.option for given in self.given)


class _Record(argparse.Action):
    """Replaces an action and records that its option was given, and with which values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.given.append(Given(option_string or "", self.dest, tuple(values or ())))


class _Raising(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the process."""

    def error(self, of_argparse: str) -> NoReturn:
        raise ConfigurationError(of_argparse)


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


def _split(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Words of the options, with their values, and all other words."""
    found: list[str] = []
    others: list[str] = []
    belongs = others
    for word in words:
        if word.startswith("--"):
            belongs = found if word.split("=")[0] in options else others
        belongs.append(word)
    return found, others


class FlagParser:
    """Parses command lines; keeps no state between them."""

    def __init__(self) -> None:
        self._parser = _Raising(
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
        self._upstream_by_dest: dict[str, list[argparse.Action]] = {}
        for action, _ in self._upstream.values():
            self._upstream_by_dest.setdefault(action.dest, []).append(action)
        self._show_honoured_only()
        self._name_enumerations()
        ArgumentGroupFactory(HydraulisConfig).build_group(self._parser)
        self._group_by_topic()
        self._actions = {
            option: action
            for action in self._parser._actions
            for option in action.option_strings
            if action.dest != "help"
        }
        self._recorder = self._build_recorder()
        self._readers: dict[str, argparse.ArgumentParser] = {}

    @property
    def upstream_options(self) -> Mapping[str, str]:
        """Every option string of upstream's parser -> title of the group it stands in."""
        return {option: group for option, (_, group) in self._upstream.items()}

    @property
    def rows(self) -> Mapping[str, Row]:
        """Primary option string of upstream -> its row."""
        return {
            option: row_of(option, group)
            for option, (action, group) in self._upstream.items()
            if option == action.option_strings[0]
        }

    @cached_property
    def honoured_defaults(self) -> Mapping[str, Any]:
        """Attribute that honoured options of upstream set -> its default, in alphabetical order."""
        dests = sorted({self._upstream[option][0].dest for option in HONOURED})
        return {dest: self._parser.get_default(dest) for dest in dests}

    def knows_shape(self, problems: Problems) -> bool:
        """True if no setting of the model has a problem."""
        of_model = {self._upstream[option][0].dest for option in _OF_MODEL}
        return problems.wrong.isdisjoint({SHAPE, *of_model})

    def as_typed(self, dest: str, value: object) -> str:
        """Words that give an attribute this value; empty for a switch that is not given."""
        actions = self._upstream_by_dest.get(dest, [])
        switches = [action for action in actions if action.nargs == 0]
        if switches and isinstance(value, bool):
            named = [action.option_strings[0] for action in switches if action.const is value]
            return named[0] if named else ""
        if value is None:
            return "none"
        values = value if isinstance(value, list | tuple) else [value]
        return " ".join((actions[0].option_strings[0], *map(str, values)))

    def parse(self, argv: Sequence[str] | None, problems: Problems | None = None) -> ParsedFlags:
        """Parse a command line, or ``sys.argv`` for None. The last value of a repeated flag wins.

        --help ends the process. Unknown and refused options and values of the wrong type or out of
        range are added to problems, which the caller raises; without problems they are raised here
        as one ConfigurationError.
        """
        mine = Problems() if problems is None else problems
        recorded, rest = self._recorder.parse_known_args(argv, argparse.Namespace(given=[]))
        if any(word in ("-h", "--help") for word in rest):
            self._parser.parse_args(["--help"])
        last = {given.dest: given for given in recorded.given}
        everything: list[Given] = [
            given
            for given in recorded.given
            if given is last[given.dest] or not self._may_be_off(given)
        ]
        ignores = any(given.option == _IGNORE_UNKNOWN for given in everything)
        unknown = self._unknown(rest, mine, ignores=ignores)

        honoured: list[Given] = []
        taken: dict[str, tuple[str, str]] = {}
        """Option -> its last mention."""
        wrong: set[str] = set()
        set_here = {given.dest for given in everything if not self._switches_off(given)}
        for given in everything:
            row = self._row(given.option)
            lacking = _lacking(row, set_here)
            if lacking is not None:
                taken[given.option] = (str(given), f"it has an effect only with {lacking.flag}")
            elif self._switches_off(given) and (
                isinstance(row, Refused) or given.option in _SWITCHED_OFF_BY_0
            ):
                taken[given.option] = (str(given), "the feature is off, as by default")
            elif isinstance(row, Refused):
                mine.add(refusal(given.option, row))
            elif self._has_right_values(given, row, mine):
                if isinstance(row, Taken):
                    taken[given.option] = (str(given), row.instead)
                else:
                    honoured.append(given)
            else:
                wrong.add(given.dest)
        words = [word for given in honoured for word in (given.option, *given.values)]
        args = self._parser.parse_args(words)
        if args.use_rotary_position_embeddings:
            # As upstream's checks do, but before options are judged that need these positions.
            args.position_embedding_type = "rope"
        for given in tuple(honoured):
            row = self._row(given.option)
            if isinstance(row, Honoured) and row.need is not None and not _is_met(row.need, args):
                needs = f"it has an effect only with {row.need.flag}"
                taken[given.option] = (str(given), needs)
                setattr(args, given.dest, self._parser.get_default(given.dest))
                honoured.remove(given)
        if problems is None:
            mine.raise_any()
        attempted = frozenset(given.dest for given in everything)
        return ParsedFlags(
            args, tuple(honoured), tuple(taken.values()), unknown, attempted, frozenset(wrong)
        )

    def parse_launch_options(
        self, words: Sequence[str], rest: Sequence[str]
    ) -> tuple[ParsedFlags, list[str], list[str]]:
        """Parse the options of training in the command line of another command.

        Raises ConfigurationError as `parse`, and for a model that training refuses.

        Args:
            words: the whole command line.
            rest: those that the command does not know itself.

        Returns:
            The options of training in rest, and those that describe the model in words; refused
            ones on which no costs depend; all other words of rest.
        """
        options = {word.split("=")[0] for word in rest if word.startswith("--")}
        rows = {option: self._row(option) for option in options}
        without_costs = {
            option
            for option, row in rows.items()
            if isinstance(row, Refused) and not row.changes_costs
        }
        known = options - without_costs
        if _IGNORE_UNKNOWN not in rest:
            known &= {*self._actions, *FORMER_OPTIONS}
        refused, others = _split(rest, without_costs)
        here, others = _split(others, known)
        problems = Problems()
        flags = self.parse([*here, *_split(words, _OF_MODEL - options)[0]], problems)
        described = {name for name, value in vars(flags.args).items() if value is not None}
        problems.wrong |= {*flags.wrong, *({"num_layers", "num_attention_heads"} - described)}
        check_shape(flags.args, problems)
        if flags.args.hybrid_layer_pattern is not None:
            problems.add(
                "--hybrid-layer-pattern: times and memory by kind of layer are not estimated yet, "
                "training alone takes it; --dry-run shows its limits, where every layer counts as "
                "attention and an MLP or experts"
            )
        problems.raise_any()
        return flags, refused, others

    def words_of_training(self, words: Sequence[str], without: Collection[str]) -> list[str]:
        """The options among the words of a command that training accepts, with their values.

        without: options that have another meaning in the command.
        """
        accepted = {each for each in self._actions if not isinstance(self._row(each), Refused)}
        return _split(words, accepted - set(without))[0]

    def _row(self, option: str) -> Row | None:
        """The row of an option of upstream, or of a former one of ours; None for our own."""
        if option in FORMER_OPTIONS:
            return row_of(option, "")
        if option not in self._upstream:
            return None
        action, group = self._upstream[option]
        return row_of(action.option_strings[0], group)

    def _unknown(
        self, rest: Sequence[str], problems: Problems, *, ignores: bool
    ) -> tuple[tuple[str, str], ...]:
        """The options that nobody knows, each with its values and our equivalent."""
        options: list[list[str]] = []
        for word in rest:
            if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
                options.append(word.split("=", 1))
            elif options:
                options[-1].append(word)
            else:
                problems.add(
                    f"{word!r} belongs to no option, as it stands before the first; remove it"
                )
        found = {}
        for option, *values in options:
            equivalent = EQUIVALENTS.get(option, "")
            found[" ".join((option, *values))] = equivalent
            if not ignores:
                near = closest(option, self._actions)
                fix = f"did you mean {near}? Otherwise " if near else ""
                if equivalent:
                    fix = f"use {equivalent}, or "
                problems.add(
                    f"{option} is unknown to Megatron and to this program; {fix}remove it, or add "
                    f"{_IGNORE_UNKNOWN} to go on without such options"
                )
        return tuple(found.items()) if ignores else ()

    def _may_be_off(self, given: Given) -> bool:
        """True if a value may switch the option off, so that only its last mention counts."""
        return given.option in _SWITCHED_OFF_BY_0 or isinstance(self._row(given.option), Refused)

    def _switches_off(self, given: Given) -> bool:
        """True if an option has a value that leaves its feature off: its default, or 0."""
        action = self._actions.get(given.option)
        if action is None or action.nargs == 0 or not given.values:
            return False
        default = "0" if action.default in (None, []) else str(action.default)
        return given.values in ((default,), (default.removesuffix(".0"),))

    def _reader(self, option: str) -> argparse.ArgumentParser:
        """Reads one option; a parser of all options would set hundreds of defaults."""
        if option not in self._readers:
            self._readers[option] = _Raising(allow_abbrev=False, add_help=False)
            self._readers[option]._add_action(self._actions[option])
        return self._readers[option]

    def _has_right_values(self, given: Given, row: Row | None, problems: Problems) -> bool:
        """True if the values can be converted and lie in their range; adds a problem otherwise."""
        nargs = self._actions[given.option].nargs
        most = 1 if nargs in (None, "?") else nargs
        if isinstance(most, int) and len(given.values) > most:
            problems.add(_stray(given, most))
            return False
        if isinstance(row, Taken) and row.only is None:
            return True
        for value in given.values:
            if problem := problem_of_value(given.option, value):
                problems.add(problem)
                return False
        try:
            args = self._reader(given.option).parse_args([given.option, *given.values])
        except ConfigurationError as error:
            problems.add(_in_our_words(given, str(error)))
            return False
        except Exception as error:  # upstream's converters raise their own kinds
            reason = " ".join(str(error).split())
            problems.add(f"{given}: {reason} cannot be read; correct the value")
            return False
        value = getattr(args, given.dest)
        values = value if isinstance(value, list | tuple) else [value]
        if isinstance(row, Honoured | Taken) and row.only is not None:
            for each in (each for each in values if each not in row.only):
                problems.add(f"{given.option} {each} is not honoured: {row.otherwise}")
                return False
        bounds = RANGES.get(self._actions[given.option].option_strings[0])
        if bounds is None or given.values == ():
            return True
        lines = [line for each in values if (line := bounds.problem(given.option, each))]
        for line in lines:
            problems.add(line)
        return not lines

    def _show_honoured_only(self) -> None:
        """Show only honoured options in --help, with our text where upstream's is not true here."""
        for action in self._parser._actions:
            if action.dest == "help":
                continue
            honoured = HONOURED.get(action.option_strings[0])
            if honoured is None:
                action.help = argparse.SUPPRESS
                continue
            if action.type in _METAVARS and action.metavar is None and action.choices is None:
                action.metavar = _METAVARS[action.type]
            text = honoured.help_text or (action.help or "").replace("%%", "%")
            if honoured.only is not None and action.choices is not None:
                action.metavar = "{" + ",".join(map(str, honoured.only)) + "}"
            # argparse formats help texts with %; upstream has some that are no formats.
            action.help = text.replace("%", "%%")

    def _group_by_topic(self) -> None:
        """Show our flags first, then upstream's, each by topic."""
        action_of = self._parser._option_string_actions
        topics = {
            topic: [option_of(name) for name in names] for topic, names in FIELDS_BY_TOPIC.items()
        } | {
            f"Megatron: {topic.lower()}": list(options)
            for topic, options in HONOURED_BY_TOPIC.items()
        }
        self._parser._action_groups = self._parser._action_groups[:2]  # positionals and --help
        for topic, options in topics.items():
            group = self._parser.add_argument_group(topic)
            group._group_actions = [action_of[option] for option in options]

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
        """A parser of the same options that takes any number of any values."""
        recorder = _Raising(prog="hydraulis train", allow_abbrev=False, add_help=False)
        for action in self._parser._actions:
            if action.dest == "help":
                continue
            # Many times faster than `add_argument`, which makes a formatter of help for each.
            recorder._add_action(
                _Record(action.option_strings, action.dest, nargs="*", default=argparse.SUPPRESS)
            )
        for option in FORMER_OPTIONS:
            recorder.add_argument(option, action=_Record, nargs="*", default=argparse.SUPPRESS)
        return recorder


def _stray(given: Given, most: int) -> str:
    """The problem with the words after an option beyond the most values that it takes."""
    words = given.values[most:]
    fix = "quote a value with blanks, give the option that is missing, or remove them"
    if not any(word.strip() for word in words):
        fix = "remove the blank after a backslash at the end of a line"
    takes = f"{most or 'no'} value{'s' * (most > 1)}"
    return (
        f"{' '.join(map(repr, words))} after {' '.join((given.option, *given.values[:most]))} "
        f"belong{'s' * (len(words) == 1)} to no option, as {given.option} takes {takes}; {fix}"
    )


def _in_our_words(given: Given, message: str) -> str:
    """A problem with the values of an option as one line with its fix."""
    if message.startswith(given.option):  # of a converter of ours
        return message
    reason = message.removeprefix(f"argument {given.option}").partition(": ")[2] or message
    for converter, form in _FORMS.items():
        if f"invalid {converter} value: " in reason:
            return f"{given}: this is no value of the option; write {form}"
    return f"{given}: {reason}; correct the value"


def _lacking(row: Row | None, set_here: Collection[str]) -> Need | None:
    """Returns what an option needs, if it is refused without that and no option sets it.

    set_here: the attributes that options of the command line set.
    """
    if row is None or isinstance(row, Taken) or row.need is None:
        return None
    if isinstance(row, Honoured) and row.only is None:
        return None
    need = row.need
    depends_on_value = need.absent or need.values is not None
    return None if depends_on_value or {*need.dest.split()} & {*set_here} else need


def _is_met(need: Need, args: argparse.Namespace) -> bool:
    values = [getattr(args, dest) for dest in need.dest.split()]
    if need.values is not None:
        is_set = any(value in need.values for value in values)
    else:
        is_set = any(value is not None and value is not False and value != [] for value in values)
    return is_set != need.absent
