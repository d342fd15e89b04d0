"""What is wrong with a command line, so that the user sees all of it at once."""

import contextlib
from collections.abc import Collection, Iterator

from megatron.hydraulis.errors import ConfigurationError


class SeveralProblems(ConfigurationError):
    """Several errors as one, with a line for each.

    Like every error of ours it can be made from its text alone, as other ranks do that get it.
    """

    def __init__(self, text: str, errors: Collection[ConfigurationError] = ()) -> None:
        super().__init__(text)
        self.errors = tuple(errors)


class Problems:
    """Collects errors, each its rule, numbers and fix in one line."""

    def __init__(self) -> None:
        self._errors: list[ConfigurationError] = []
        self._hidden: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, collected: str) -> None:
        """Add one problem."""
        self._errors.append(ConfigurationError(collected))

    def hide(self, settings: object, names: Collection[str]) -> None:
        """Remove attributes that have a problem: a check that reads one of them is left out.

        So that nobody gets two messages for one mistake.
        """
        for name in names:
            if hasattr(settings, name):
                object.__delattr__(settings, name)
                self._hidden.add(name)

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Add the ConfigurationError that the block raises, if any, and go on after the block.

        The block ends where it reads a hidden attribute.
        """
        try:
            yield
        except SeveralProblems as several:
            self._errors += several.errors or [several]
        except ConfigurationError as error:
            self._errors.append(error)
        except AttributeError as error:
            if error.name not in self._hidden:
                raise

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each, in the order in which they were found."""
        return tuple(dict.fromkeys(map(str, self._errors)))

    def raise_any(self) -> None:
        """Raise the only one, or one ConfigurationError with a line for each."""
        unique = list({str(error): error for error in self._errors}.values())
        if len(unique) == 1:
            raise unique[0]
        if unique:
            listed = "".join(f"\n  {error}" for error in unique)
            raise SeveralProblems(f"{len(unique)} problems with these flags:{listed}", unique)
