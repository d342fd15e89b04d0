"""Every exception this package raises on purpose.

A message states the rule that was broken, the numbers that broke it, and the fix, for example
``strategy 'long': 3 replicas use 20 ranks but the job has 16; remove a replica or start 20 ranks``.
"""

import contextlib
import errno
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that writes to a full disk, or beyond a quota, raise."""


def printable(text: str) -> str:
    """The text with escapes for what would control a terminal or cannot be encoded, such as
    control characters and lone surrogates in names of files; line ends stay."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text
    )


class HydraulisError(Exception):
    """Base of all errors of this package; its message is shown to the user."""

    is_shared = False
    """Whether every rank of the job raises it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigurationError(HydraulisError):
    """Flags or settings that contradict each other or the job."""


class StrategyError(ConfigurationError):
    """A strategy that cannot be read, cannot be placed on the ranks or does not fit the model."""


class PlanError(HydraulisError):
    """An invalid iteration plan, or a batch that no strategy of the pool can hold."""


class DataError(HydraulisError):
    """A corpus, index, tokenizer or vocabulary that is damaged or does not fit the job."""


class CheckpointError(HydraulisError):
    """A checkpoint that is damaged, incomplete or cannot be written."""


class NonFiniteLossError(HydraulisError):
    """The loss or the gradient norm became NaN or infinite."""


class OutOfMemoryError(HydraulisError):
    """Memory ran out, and the run cannot go on with smaller micro-batches."""


class NotInstalledError(ConfigurationError):
    """A package that training needs and the planning installation leaves out."""

    def __init__(self, module: str | None) -> None:
        super().__init__(
            f"this needs the package {module}, but only planning is installed; run"
            " pip install -e '.[train]' in the folder of the repository"
        )


class UpstreamVersionError(HydraulisError):
    """The installed megatron-core is not a version that ``hydraulis_patches`` knows."""


class SeveralProblems(ConfigurationError):
    """Several errors as one, with a line for each.

    Like every error of ours it can be made from its text alone, as other ranks do that get it.
    """

    def __init__(self, text: str, errors: Collection[ConfigurationError] = ()) -> None:
        super().__init__(text)
        self.errors = tuple(errors)


class Problems:
    """Collects what is wrong with a command line, so that the user sees all of it at once."""

    def __init__(self) -> None:
        self._errors: list[ConfigurationError] = []
        self.wrong: set[str] = set()
        """Names of settings that have a problem, so that checks that read them are skipped."""

    def __bool__(self) -> bool:
        return bool(self._errors)

    def add(self, collected: str) -> None:
        """Add one problem."""
        self._errors.append(ConfigurationError(collected))

    def check[Result](self, check: Callable[[], Result], reads: str = "") -> Result | None:
        """The result of a check; None if it fails or reads a setting that has a problem.

        So nobody gets two messages for one mistake.

        Args:
            check: raises ConfigurationError.
            reads: names of the settings that it reads, separated by blanks.
        """
        if self.wrong.isdisjoint(reads.split()):
            with self.collected():
                return check()
        return None

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Add the ConfigurationError that the block raises, if any, and go on after the block."""
        try:
            yield
        except SeveralProblems as several:
            self._errors += several.errors or [several]
        except ConfigurationError as error:
            self._errors.append(error)

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


def listed[Item](items: Sequence[Item], *, most: int = 4, text: Callable[[Item], str] = str) -> str:
    """The first few of many, as text, and how many more there are, for an error."""
    named = ", ".join(map(text, items[:most]))
    return f"{named} and {len(items) - most} more" if len(items) > most else named


def counted(number: int, noun: str) -> str:
    """'1 rank' or '2,000 ranks'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def why_not_written(error: OSError, path: str | Path) -> str:
    """The reason for a message about a file; if the disk is full, with the bytes that are free."""
    reason = error.strerror or str(error)
    if error.errno in FULL_DISK:
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(Path(path).parent).free
            reason += f" ({free_bytes:,} bytes are free in {Path(path).parent})"
    return reason


Failure = tuple[type[HydraulisError], str]
"""Class and message of an error, which other ranks raise too."""


def failure_of(error: Exception, what: str) -> Failure:
    """Class and message of an error, to be raised on other ranks too.

    One that is not ours becomes a CheckpointError that begins with ``what``.
    """
    if isinstance(error, HydraulisError):
        return type(error), str(error)
    if isinstance(error, OSError):
        name = f" {error.filename}" if error.filename else ""
        reason = why_not_written(error, error.filename) if error.filename else error.strerror
        return CheckpointError, f"{what}:{name} {reason or error}"
    return CheckpointError, f"{what}: {type(error).__name__}: {error}"


def raise_first(failures: Sequence[Failure | None], what: str) -> None:
    """Raise the failure of the first rank that has one, and name the rank."""
    for rank, found in enumerate(failures):
        if found is not None:
            kind, message = found
            is_named = " (rank " in message  # by rank 0, for another rank
            if kind is CheckpointError and message.startswith(what) and not is_named:
                message = f"{message} (rank {rank}); make room or correct it, then start again"
            error = kind(message)
            error.is_shared = True
            raise error
