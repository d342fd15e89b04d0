"""``hydraulis convert``: from a launch script of Megatron to the command to run here."""

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.launch_script import Unknown, read_launch_command

_GIVEN_LATER = ("tokenizer_type", "data_path")
"""Attributes that a file of options may leave to the command line."""
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "script",
        type=Path,
        metavar="SCRIPT",
        help="launch script that calls pretrain_gpt.py, or a file of its options",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable that the script takes from its environment, or from its arguments (1=…), "
        "or sets differently in branches; may be repeated",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        metavar="N",
        help="ranks of the job (ranks). Default: those of the script's launcher or #SBATCH lines",
    )
    parser.add_argument(
        "--ignore-unknown-options",
        action="store_true",
        help="convert without options that Megatron does not know",
    )


def run(namespace: argparse.Namespace) -> int:
    """Print what becomes of each option, the strategy and the command to run.

    Returns 1, and prints no command, if options are refused or variables have no value.
    """
    # These import Megatron, which the help of the command does not need.
    from megatron.hydraulis.flags import checks
    from megatron.hydraulis.flags.config import default_run_dir
    from megatron.hydraulis.flags.defaults import differences, set_defaults
    from megatron.hydraulis.flags.describe import block_lines, option_lines, option_texts
    from megatron.hydraulis.flags.parser import FlagParser
    from megatron.hydraulis.flags.problems import Problems

    path: Path = namespace.script
    launch = read_launch_command(_read(path), _variables(namespace.set), path.parent)
    of, shown = launch.unknowns.of, launch.unknowns.shown
    options = [*launch.options]
    if namespace.ignore_unknown_options:
        options.append("--ignore-unknown-options")
    problems = Problems()
    parser = FlagParser()
    flags = parser.parse(options, problems)
    attempted = {*flags.attempted, *_GIVEN_LATER}
    with problems.collected():
        checks.check_required(checks.missing_flags(flags.args, attempted=attempted))
    sizes = {name: getattr(flags.args, dest) for name, dest in _SIZES.items()}
    num_ranks, strategy = namespace.num_ranks or launch.num_ranks, ""
    if not flags.wrong & set(_SIZES.values()):
        with problems.collected():
            strategy = _strategy_text(sizes, num_ranks)
    honoured = [
        (given.option, *given.values)
        for given in flags.given
        if given.dest != "ignore_unknown_options"
    ]
    before = dict(vars(flags.args))
    set_defaults(flags, before, default_run_dir(), has_cuda=True)

    refused = [
        *(line for line in problems.lines if not of(line)),
        *(
            f"{cut_off}: it belongs to no command, as the line above ends without a backslash, "
            "with a blank after it or with a comment; join the lines"
            for cut_off in launch.cut_off
        ),
    ]
    used = of(" ".join((*launch.words_around, *(word for words in honoured for word in words))))
    # No check accepts the character that stands for an unknown.
    needed = {*(each for each in used if not each.is_set_by_job), *of("".join(problems.lines))}
    unset = [each for each in of(" ".join((*launch.words_around, *options))) if each in needed]
    uses_tp = sizes["tp"] > 1
    texts = option_texts(
        flags.taken, flags.unknown, differences(parser, flags, before, uses_tp=uses_tp)
    )
    for line in (
        *block_lines("refused", "change or remove these first", refused),
        *block_lines(
            "unset",
            "variables without a value: give each by --set NAME=VALUE",
            (*_unknown_lines(unset), *(launch.not_found if unset else ())),
        ),
        *block_lines("changed", "variables with several values; the last is used", launch.changed),
        *block_lines(
            "kept",
            "what only the job knows: lines of the script that set it stay above the command",
            _unknown_lines(each for each in used if each.is_set_by_job),
        ),
        *map(shown, option_lines(texts)),
    ):
        print(line)
    if strategy:
        print(f"strategy     {strategy}")
    if refused or unset:
        print("command      printed once nothing is refused or unset")
        return 1
    replaced = f"in place of the call in {launch.place}; " if launch.place else ""
    print(
        f"command      {replaced}to check its flags: hydraulis train FLAGS --num-ranks "
        f"{num_ranks or 'N'} --dry-run, without a GPU also --cost-profile FILE"
    )
    if launch.place and not launch.is_torchrun:
        variables = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        print(f"  without torchrun, the launcher has to set {variables} for each rank")
    print(f"\n{launch.command(honoured)}")
    return 0


def _unknown_lines(unknowns: Iterable[Unknown]) -> tuple[str, ...]:
    """A line for each name, with where it is used or set."""
    places: dict[str, dict[str, None]] = {}
    for unknown in unknowns:
        places.setdefault(unknown.name or unknown.source, {})[unknown.where] = None
    return tuple(f"{name}: {', '.join(where)}" for name, where in places.items())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: a launch script is a text file but reading it fails: {error}; correct the "
            "path"
        ) from error


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    for each in assignments:
        if "=" not in each:
            raise ConfigurationError(
                f"--set takes NAME=VALUE but is {each!r}; write for example --set NNODES=2"
            )
    return dict(each.split("=", 1) for each in assignments)


def _strategy_text(sizes: Mapping[str, int], num_ranks: int | None) -> str:
    """The strategy that equals the layout; raises ConfigurationError if there is none."""
    scheme = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "tp1"
    num_of_replica = math.prod(sizes.values())
    if num_ranks is None:
        return (
            f"replicas of {scheme}, {num_of_replica} ranks each; how many ranks the script starts "
            "is not clear: give --num-ranks N"
        )
    if num_ranks % num_of_replica:
        raise ConfigurationError(
            f"equal replicas share all {num_ranks} ranks but one of {scheme} takes "
            f"{num_of_replica}; change the sizes or give --num-ranks"
        )
    num_replicas = num_ranks // num_of_replica
    same = f"{num_replicas}*{scheme}" if num_replicas > 1 else scheme
    return (
        f"--strategy '{same}' on {num_ranks} ranks equals its sizes of tp, cp and pp, with equal "
        "stages"
    )
