"""``hydraulis convert``: from a launch script of Megatron to the command to run here."""

import argparse
import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.shell_script import Script
from megatron.hydraulis.flags.shell_words import Call, Unknown, endings
from megatron.hydraulis.strategy.megatron_layout import SIZES, MegatronLayout

_GIVEN_LATER = ("tokenizer_type", "data_path")
"""Attributes that a file of options may leave to the command line."""
_SIZE = re.compile(
    r"(?<!\S)--?(nodes|ntasks|ntasks-per-node|gpus-per-node|gres|cpus-per-task|nnodes|"
    r"nproc-per-node|np|[Nnc])(?:[=\s]+|(?=\d))(\S+)"
)
_SAME_SIZE = {
    "N": "nodes",
    "n": "ntasks",
    "np": "ntasks",
    "c": "cpus-per-task",
    "gres": "gpus-per-node",
}
_SLURM_VARIABLES = {
    "nodes": "SLURM_NNODES SLURM_JOB_NUM_NODES",
    "ntasks": "SLURM_NTASKS SLURM_NPROCS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "gpus-per-node": "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
}


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What a script runs."""

    call: Call
    """Without launcher and place for a file of options."""
    num_ranks: int | None
    """Ranks on all nodes; None if the script does not say."""
    script: Script

    @property
    def is_torchrun(self) -> bool:
        return _is_torchrun(self.call.launcher)

    def command(self, options: Iterable[Sequence[str]]) -> str:
        """The command to run instead, an option a line, within the shells that the script calls."""
        launcher, typed = self.call.launcher, self.script.unknowns.typed
        words = [("hydraulis", "train"), *options]
        names = [PurePath(word).name for word in launcher]
        placeholder = ""
        if not self.call.place or not {"deepspeed", "accelerate"}.isdisjoint(names):
            placeholder = "torchrun [TORCHRUN OPTIONS] --no-python "
        elif self.is_torchrun:
            words[0] = (*launcher, "--no-python", *words[0])
        else:
            python = [at for at, name in enumerate(names) if re.fullmatch(r"python[\d.]*", name)]
            words[0] = (*launcher[: python[-1] if python else None], *words[0])
        depth = len(self.call.shells)
        lines = (" ".join(typed(word, depth) for word in line) for line in words)
        text = placeholder + " \\\n    ".join(lines)
        for shell in reversed(self.call.shells):
            depth -= 1
            outer = (*shell.before, text.join(shell.around), *shell.after)
            text = " ".join(typed(word, depth) for word in outer)
        return text


def _sizes(text: str) -> dict[str, int | None]:
    """Options of sbatch, srun, mpirun and torchrun; None for a value that is no number."""
    sizes: dict[str, int | None] = {}
    for name, value in _SIZE.findall(text.replace("_", "-")):
        number = value.rpartition(":")[2]  # of gpu:a100:8
        sizes[_SAME_SIZE.get(name, name)] = int(number) if number.isdecimal() else None
    return sizes


def _is_torchrun(launcher: Sequence[str]) -> bool:
    return any(
        PurePath(word).name == "torchrun" or word.startswith("torch.distributed.")
        for word in launcher
    )


def _num_ranks(words: Sequence[str], of_job: Mapping[str, int | None]) -> int | None:
    """Processes that the words before the program start on all nodes; None if that is not clear.

    of_job: `_sizes` of the script.
    """
    sizes = {**of_job, **_sizes(" ".join(words))}
    num_gpus, num_nodes = sizes.get("gpus-per-node"), sizes.get("nodes")
    if _is_torchrun(words):
        num_nodes = sizes.get("nnodes", 1) or num_nodes
        num_of_node = sizes.get("nproc-per-node", 1) or num_gpus
    else:
        num_of_node = sizes.get("ntasks-per-node") or num_gpus
        if sizes.get("ntasks"):
            return sizes["ntasks"]
    return num_nodes * num_of_node if num_nodes and num_of_node else None


def read_launch_command(
    text: str, variables: Mapping[str, str] | None = None, folder: Path = Path()
) -> LaunchCommand:
    """The command of a launch script, or of a file of options alone.

    Args:
        variables: values that the script expects from its environment or its arguments.
        folder: of the script, for files that it reads.

    Raises:
        ConfigurationError: the script calls no program named pretrain….py, or calls it several
            times with other options, or bash could not read it.
    """
    lines = (line.strip() for line in text.splitlines())
    is_script = not next((line for line in lines if line and line[0] != "#"), "").startswith("--")
    of_job = _sizes("\n".join(re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE)))
    values = {
        name: str(number)
        for size, number in of_job.items()
        for name in _SLURM_VARIABLES.get(size, "").split()
        if number is not None
    }
    script = Script(variables or {}, values, folder)
    if not is_script:
        # Such a file may be one that no shell reads: --moe-layer-freq ([0]*3+[1]*58).
        text = re.sub(r"(?<=\s)\(\S*\)(?=\s)", r"'\g<0>'", text)
        text = f'O=({text}\n)\ntorchrun pretrain_gpt.py "${{O[@]}}"'
    script.read_all(text)
    calls = list({call.options: call for call in script.calls}.values())
    if not calls:
        raise ConfigurationError(
            "a launch script calls pretrain_gpt.py, or another pretrain….py, but this one calls "
            "none; give the file that does, or a file with the options alone"
        )
    if len(calls) > 1:
        options = endings(script.unknowns.shown(" ".join(call.options)) for call in calls)
        places = (call.place for call in calls)
        listed = "; ".join(map(" with ".join, zip(places, options, strict=True)))
        raise ConfigurationError(
            "a launch script has one command to convert but this one calls pretrain….py with "
            f"{len(calls)} different lists of options: {listed}; leave one of them in the file, or "
            "give the variable that makes the difference by --set NAME=VALUE"
        )
    call = calls[0] if is_script else replace(calls[0], launcher=(), place="")
    return LaunchCommand(call, _num_ranks(call.words_around, of_job), script)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    from megatron.hydraulis.cost_model.recompute import drop_kept_modules
    from megatron.hydraulis.cost_model.shape_arguments import usual_ffn_hidden_size
    from megatron.hydraulis.errors import Problems
    from megatron.hydraulis.flags import checks
    from megatron.hydraulis.flags.arguments import check_fit, run_as_others
    from megatron.hydraulis.flags.config import default_run_dir
    from megatron.hydraulis.flags.defaults import (
        differences,
        padded_vocabulary_size,
        set_defaults,
    )
    from megatron.hydraulis.flags.describe import block_lines, option_lines, option_texts
    from megatron.hydraulis.flags.parser import FlagParser
    from megatron.hydraulis.flags.samples import training_sizes
    from megatron.hydraulis.strategy import Pool

    path: Path = namespace.script
    launch = read_launch_command(_read(path), _variables(namespace.set), path.parent)
    call, script = launch.call, launch.script
    of, shown = script.unknowns.of, script.unknowns.shown
    options = [*call.options]
    if namespace.ignore_unknown_options:
        options.append("--ignore-unknown-options")
    problems = Problems()
    parser = FlagParser()
    flags = parser.parse(options, problems)
    attempted = {*flags.attempted, *_GIVEN_LATER}
    missing = checks.missing_flags(flags.args, attempted=attempted)
    with problems.collected():
        checks.check_required(missing)
    layout = MegatronLayout.of(flags.args)
    num_ranks = namespace.num_ranks or launch.num_ranks
    strategy: list[str] = []
    pool: Pool | None = None
    if not flags.wrong & {*SIZES.values(), "num_experts"}:
        with problems.collected():
            strategy = _strategy_lines(layout, num_ranks)
            pool = Pool.of(layout.strategy(num_ranks)) if num_ranks else None
    honoured = [
        (given.option, *given.values)
        for given in flags.given
        if given.dest != "ignore_unknown_options"
    ]
    before = dict(vars(flags.args))
    taken = (
        *flags.taken,
        *drop_kept_modules(flags.args, has_experts=bool(flags.args.num_experts)),
        *run_as_others(flags),
    )
    set_defaults(flags, before, default_run_dir(), has_cuda=True)
    completed = copy.copy(flags.args)
    problems.hide(completed, {*flags.wrong, *missing})
    checks.check_settings(completed, problems)
    with problems.collected():
        training_sizes(completed, completed.global_batch_tokens)
    if any(getattr(completed, dest, None) for dest in checks.DATA_PATHS):
        with problems.collected():
            checks.check_data(completed, needs_files=False)
    if pool is not None:
        with problems.collected():
            if completed.ffn_hidden_size is None:
                completed.ffn_hidden_size = usual_ffn_hidden_size(completed)
            if completed.padded_vocab_size is None:
                size, multiple = completed.vocab_size, completed.make_vocab_size_divisible_by
                # Without --vocab-size that of a tokenizer, which is not read here, may fit.
                completed.padded_vocab_size = (
                    padded_vocabulary_size(size, multiple) if size else pool.tp_lcm
                )
            check_fit(completed, pool, problems)

    refused = [
        *(line for line in problems.lines if not of(line)),
        *(
            f"{cut_off}: it belongs to no command, as the line above ends without a backslash, "
            "with a blank after it or with a comment; join the lines"
            for cut_off in script.cut_off
        ),
    ]
    used = of(" ".join((*call.words_around, *(word for words in honoured for word in words))))
    # No check accepts the character that stands for an unknown.
    needed = {*(each for each in used if not each.is_set_by_job), *of("".join(problems.lines))}
    unset = [each for each in of(" ".join((*call.words_around, *options))) if each in needed]
    texts = option_texts(
        taken,
        flags.unknown,
        differences(parser, flags, before, uses_tp=layout.tp > 1, has_cuda=True),
    )
    for line in (
        *block_lines("refused", "change or remove these first", refused),
        *block_lines(
            "unset",
            "variables without a value: give each by --set NAME=VALUE",
            (*_unknown_lines(unset), *(script.not_found if unset else ())),
        ),
        *block_lines("changed", "variables with several values; the last is used", script.changed),
        *block_lines(
            "kept",
            "what only the job knows: lines of the script that set it stay above the command",
            _unknown_lines(each for each in used if each.is_set_by_job),
        ),
        *map(shown, option_lines(texts)),
    ):
        print(line)
    for line in strategy:
        print(line)
    if refused or unset:
        print("command      printed once nothing is refused or unset")
        return 1
    replaced = f"in place of the call in {call.place}; " if call.place else ""
    print(
        f"command      {replaced}to check its flags: hydraulis train FLAGS --num-ranks "
        f"{num_ranks or 'N'} --dry-run, without a GPU also --device NAME"
    )
    if call.place and not launch.is_torchrun:
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
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigurationError(
            f"{path}: a launch script is a text file but reading it fails: {reason}; correct the "
            "path"
        ) from error


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    for each in assignments:
        if "=" not in each:
            raise ConfigurationError(
                f"--set takes NAME=VALUE but is {each!r}; write for example --set NNODES=2"
            )
    return dict(each.split("=", 1) for each in assignments)


def _strategy_lines(layout: MegatronLayout, num_ranks: int | None) -> list[str]:
    """The strategy that equals the layout, and how it differs; raises StrategyError if there is
    none."""
    scheme = layout.scheme(num_ranks)
    if num_ranks is None:
        text = (
            f"replicas of {scheme}; how many ranks the script starts is not clear: give "
            "--num-ranks N"
        )
    else:
        layout.check_ranks(num_ranks)
        text = (
            f"--strategy '{layout.strategy(num_ranks)}' on {num_ranks} ranks equals its sizes, "
            "with equal stages"
        )
    note = layout.note(scheme)
    return [f"strategy     {text}", *([f"warning      {note}"] if note else [])]
