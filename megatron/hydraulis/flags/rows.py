"""The kinds of rows in the tables of options, see `flags.options`."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """A setting without which an option has no effect; it is then taken."""

    dest: str
    """Attribute of the parsed arguments that has to be set, or several of which one has."""
    flag: str
    """How a user sets it."""
    values: tuple[object, ...] | None = None
    """Values of the attribute that count; None accepts all but None, False and empty."""
    absent: bool = False
    """Whether the attribute has to be unset instead."""


@dataclass(frozen=True, slots=True)
class Honoured:
    """How one option is honoured: by default as upstream's help says."""

    here: str = ""
    """What the option does here if upstream's help says something else, one phrase."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Why another value is refused and what to do instead: ``why; fix``."""
    need: Need | None = None

    @property
    def help_text(self) -> str:
        """What --help says instead of upstream's words; empty where those are true."""
        if not self.here:
            return ""
        values = "" if self.only is None else f"; only {', '.join(map(str, self.only))}"
        return f"{self.here[0].upper()}{self.here[1:]}{values}."


@dataclass(frozen=True, slots=True)
class Taken:
    """Accepted without acting on it: the update is the same."""

    instead: str
    """What happens instead, one phrase."""
    only: tuple[object, ...] | None = None
    """The values that are accepted; None accepts all that the parser does."""
    otherwise: str = ""
    """Why another value is refused and what to do instead: ``why; fix``."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Options that are refused for the same reason: they would change model, data or update."""

    name: str
    why: str
    fix: str
    options: str = ""
    """Regular expression on the whole option without its dashes."""
    groups: tuple[str, ...] = ()
    """Titles of upstream's argument groups."""
    need: Need | None = None
    """A setting without which the options have no effect; they are then taken."""
    changes_costs: bool = True
    """Whether time or memory may depend on the options: planning commands refuse them, too."""

    def covers(self, option: str, group: str) -> bool:
        """Whether the option, or the group it stands in, belongs here."""
        by_name = self.options and re.fullmatch(self.options, option.removeprefix("--"))
        return bool(by_name) or group in self.groups


Row = Honoured | Taken | Refused
