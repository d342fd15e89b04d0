"""A small valid command line, and its parsing, for the tests of the arguments."""

import functools
from pathlib import Path

from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.parser import FlagParser


@functools.cache
def flag_parser() -> FlagParser:
    """One parser for all tests: building it takes a quarter of a second."""
    return FlagParser()


def write_corpus(folder: Path, name: str = "corpus") -> str:
    """Create the files of a prefix; returns the prefix."""
    prefix = folder / name
    for suffix in (".idx", ".bin"):
        Path(f"{prefix}{suffix}").touch()
    return str(prefix)


# If a flag is repeated, the last value wins, so that a test can override it.
_FLAGS: dict[str, str] = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "128",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--global-batch-size": "8",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "200",
}


def base_command(folder: Path, *, without: tuple[str, ...] = ()) -> list[str]:
    """A command line that is valid on any number of ranks, without the excluded flags."""
    flags = _FLAGS | {"--data-path": write_corpus(folder)}
    return [word for flag, value in flags.items() if flag not in without for word in (flag, value)]


def parse(
    folder: Path,
    *extra: str,
    num_ranks: int = 8,
    rank: int = 0,
    without: tuple[str, ...] = (),
) -> Resolved:
    """Parse the base command line with further flags."""
    argv = [*base_command(folder, without=without), *extra]
    return parse_arguments(argv, num_ranks=num_ranks, rank=rank, flag_parser=flag_parser())
