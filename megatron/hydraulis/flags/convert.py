"""``hydraulis convert``: from a launch script of Megatron to the command to run here."""

import argparse
import contextlib
import copy
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from megatron.hydraulis.errors import ConfigurationError, listed
from megatron.hydraulis.flags import launch_stub
from megatron.hydraulis.strategy.megatron_layout import SIZES, MegatronLayout

_GIVEN_LATER = ("tokenizer_type", "data_path")
"""Attributes that a file of options may leave to the command line."""
_TIME_LIMIT_S = 120.0
_BACKGROUND_S = 10.0
"""Time limit for what a script leaves in the background."""
_MOST_MEMORY_BYTES = 4 << 30
"""Limit of each process of a script: one that doubles a variable forty times ends with an error."""
_SHOWN_BYTES = 1500
"""Size of the end of a script's output that an error shows."""
_WORD = re.compile(r"""#[^\n]*|((?:'[^']*'|"(?:[^"\\]|\\.)*+"|\\.|[^\s'"\\])++)|\s++""", re.DOTALL)
"""A comment, a word of a file of options, or blanks."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A call of the training program."""

    launcher: tuple[str, ...]
    """The words before the program; empty for a file of options."""
    program: str
    options: tuple[str, ...]
    num_ranks: int | None
    """Ranks on all nodes; None if the script does not say."""

    @classmethod
    def recorded(cls, words: Sequence[str], around: Sequence[Sequence[str]]) -> "LaunchCommand":
        """The call that a stub recorded.

        around: options of the job and of the launchers around it, outermost first.
        """
        launcher, program, options = launch_stub.split_call(words)
        outer = launch_stub.sizes(" ".join(word for words in around for word in words))
        return cls(tuple(launcher), program, tuple(options), _num_ranks(launcher, outer))

    @property
    def is_torchrun(self) -> bool:
        return _is_torchrun(self.launcher)

    @property
    def pretrains(self) -> bool:
        """True if the program is named pretrain….py."""
        return PurePath(self.program).name.startswith("pretrain")

    def command(self, options: Sequence[Sequence[str]]) -> str:
        """The command to run instead, an option a line."""
        lines = [("hydraulis", "train"), *options]
        launcher = ""
        if self.is_torchrun:
            launcher = f"{shlex.join(self.launcher)} --no-python "
        elif not self.launcher or PurePath(self.launcher[0]).name in ("deepspeed", "accelerate"):
            launcher = "torchrun [TORCHRUN OPTIONS] --no-python "
        return launcher + " \\\n    ".join(map(shlex.join, lines))


def _is_torchrun(launcher: Sequence[str]) -> bool:
    return any(
        PurePath(word).name == "torchrun" or word.startswith("torch.distributed.")
        for word in launcher
    )


def _num_ranks(launcher: Sequence[str], outer: dict[str, int | None]) -> int | None:
    """Processes that the launcher starts on all nodes; None if that is not clear.

    outer: sizes of the job and of the launchers around it.
    """
    sizes = {**outer, **launch_stub.sizes(" ".join(launcher))}
    num_gpus, num_nodes = sizes.get("gpus-per-node"), sizes.get("nodes")
    if _is_torchrun(launcher):
        num_nodes = sizes.get("nnodes", 1) or num_nodes
        num_of_node = sizes.get("nproc-per-node", 1) or num_gpus
    else:
        num_of_node = sizes.get("ntasks-per-node") or num_gpus
        if sizes.get("ntasks"):
            return sizes["ntasks"]
    return num_nodes * num_of_node if num_nodes and num_of_node else None


def read_options(path: Path) -> tuple[str, ...]:
    """The words of a file of options as text: options alone, or ``NAME=( … )`` and ``NAME="…"``.

    Raises ConfigurationError for another file, such as a script, and for a value that only a shell
    can compute.
    """
    try:
        if not path.is_file() and path.exists():
            raise OSError(0, "it is no regular file")
        with path.open(encoding="utf-8") as file:
            text = file.read(launch_stub.MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigurationError(
            f"{path}: a file of options is a text file but reading it fails: {reason}; correct the "
            "path"
        ) from error
    if len(text) > launch_stub.MOST_BYTES:
        raise ConfigurationError(
            f"{path}: a file of options has at most {launch_stub.MOST_BYTES:,} characters but this "
            "one has more; give the options alone"
        )
    words: list[str] = []
    # A backslash at the end of a line separates words, whatever follows.
    found = _words(path, re.sub(r"\\[ \t\r]*(\n|\Z)", r"\1", text))
    is_plain, is_in_array = bool(found) and found[0].startswith("--"), False
    for word in found:
        begins = not (is_plain or is_in_array) and re.match(r"\w+\+?=\(", word)
        string = not (is_plain or is_in_array) and re.match(r"""\w+\+?=(["']\s*--.*)""", word, re.S)
        if begins:
            is_in_array, word = True, word[begins.end() :]
        elif string:
            words += [each for part in _words(path, string[1][1:-1]) for each in _value(path, part)]
            continue
        elif not (is_plain or is_in_array):
            raise _needs_bash(path, word)
        if is_in_array and word.endswith(")") and word.count(")") > word.count("("):
            is_in_array, word = False, word[:-1]
        if not re.fullmatch(r'"?\$\{\w+\[@\]\}"?', word):  # of an array, which is in the file
            words += _value(path, word)
    return tuple(words)


def _words(path: Path, text: str) -> list[str]:
    """The words of a text, still in quotes, without comments."""
    words, end = [], 0
    for match in _WORD.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        words += [match[1]] if match[1] else []
    if end != len(text):
        raise ConfigurationError(
            f"{path}: a quote ends where another begins but that in line "
            f"{text[:end].count(chr(10)) + 1} has no end; correct it"
        )
    return words


def _value(path: Path, word: str) -> list[str]:
    """A word without quotes; none if it is empty without them."""
    word = re.sub(r"\$\{\w+:?-([^${}]*)\}", r"\1", word)
    if re.search(r"[$`]", re.sub(r"'[^']*'|\\.", "", word)):
        raise _needs_bash(path, word)
    return shlex.split(word)


def _needs_bash(path: Path, word: str) -> ConfigurationError:
    return ConfigurationError(
        f'{path}: a file of options holds options, NAME=( … ) or NAME="…" but has {word[:60]!r}, '
        f"which takes a shell; run your script with its arguments, where training is not started: "
        f"hydraulis convert -- bash {shlex.quote(str(path))} ARGUMENTS (or for variables alone: "
        "-- bash -c 'source FILE; torchrun pretrain_gpt.py \"${MODEL_ARGS[@]}\"')"
    )


def recorded_calls(
    command: Sequence[str], time_limit_s: float = _TIME_LIMIT_S
) -> list[LaunchCommand]:
    """Run a launch script with stubs instead of launchers; return its calls of training programs
    that have different options, those of pretrain….py first.

    Raises ConfigurationError if the command cannot be run or calls none.
    """
    print(
        f"convert runs {shlex.join(command)} now, for at most {time_limit_s:g} s. Stubs record "
        "calls of torchrun, deepspeed, accelerate and of Python with a training program, and do "
        "not start them; what srun, mpirun, sbatch, ssh, docker and the like would start runs "
        "here once, with these stubs. All other commands of the script do run: mkdir, rm, "
        "downloads. A program called by its path, but for Python's, cannot be replaced.",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="hydraulis-convert-") as name:
        folder, environment = Path(name), dict(os.environ)
        launch_stub.install(folder, environment, command)
        ending, output = _run(command, environment, time_limit_s)
        records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    calls = [LaunchCommand.recorded(**record) for record in records]
    found: dict[tuple[str, ...], LaunchCommand] = {}
    for call in sorted(calls, key=lambda call: not call.pretrains):
        if call.pretrains or launch_stub.has_model_options(call.options):
            found.setdefault(call.options, call)
    if not found:
        others = sorted({shlex.join((*call.launcher, call.program)) for call in calls})
        called = listed(others) if others else "no launcher"
        raise ConfigurationError(
            "a launch script calls Megatron's training through torchrun, python or another "
            f"launcher, but {shlex.join(command)} {ending} and called {called}; give its arguments "
            "and the variables that it needs (NAME=VALUE hydraulis convert -- …), and no launcher "
            f"by its path. Its last output:\n{output.strip() or '(none)'}"
        )
    if ending != "ended":
        print(f"warning: {shlex.join(command)} {ending} after this call", file=sys.stderr)
    return [*found.values()]


def _run(command: Sequence[str], environment: dict[str, str], limit_s: float) -> tuple[str, str]:
    """Returns how a command ended within a time, and the end of its output."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigurationError(
            f"convert runs what follows -- but {command[0]} cannot be run: {error.strerror}; "
            f"give for example -- bash {shlex.quote(command[0])}"
        ) from error
    output = bytearray()

    def read() -> None:
        while chunk := os.read(stream.fileno(), 1 << 16):
            output.extend(chunk)
            del output[:-_SHOWN_BYTES]

    assert process.stdout is not None
    with process.stdout as stream:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            if hard == resource.RLIM_INFINITY or hard > _MOST_MEMORY_BYTES:
                limits = (_MOST_MEMORY_BYTES, hard)
                resource.prlimit(process.pid, resource.RLIMIT_DATA, limits)
            status = process.wait(limit_s)
            ending = f"exited with status {status}" if status else "ended"
            with contextlib.suppress(ProcessLookupError):
                until = time.monotonic() + _BACKGROUND_S
                while time.monotonic() < until:
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
        except subprocess.TimeoutExpired:
            ending = f"was ended after {limit_s:g} s (--time-limit)"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(1)
    return ending, output.decode(errors="replace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="options of pretrain_gpt.py as text, also as NAME=( … ); it is not run. Or, instead: "
        "-- bash train.sh ARGUMENTS, a launch script, which is run, with stubs for launchers that "
        "record what they would train",
    )
    parser.add_argument(
        "--call",
        type=int,
        default=1,
        metavar="N",
        help="which of a script's calls with different options to convert, from 1 (default)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=_TIME_LIMIT_S,
        metavar="SECONDS",
        help="of the script. Default: %(default)g",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        metavar="N",
        help="ranks of the job (ranks). Default: those of the script's launcher or headers",
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
    from megatron.hydraulis.cost_model.model_arguments import (
        drop_kept_modules,
        usual_ffn_hidden_size,
    )
    from megatron.hydraulis.errors import Problems
    from megatron.hydraulis.flags import checks
    from megatron.hydraulis.flags.arguments import check_fit, run_as_others
    from megatron.hydraulis.flags.config import default_run_dir
    from megatron.hydraulis.flags.defaults import (
        differences,
        modules_kept_by,
        padded_vocabulary_size,
        set_defaults,
    )
    from megatron.hydraulis.flags.describe import block_lines, option_lines, option_texts
    from megatron.hydraulis.flags.parser import FlagParser
    from megatron.hydraulis.flags.samples import read_for_sizes, training_sizes
    from megatron.hydraulis.strategy import Pool

    calls = _calls(namespace)
    if not 1 <= namespace.call <= len(calls):
        raise ConfigurationError(
            f"--call is 1 to the number of calls with different options, {len(calls)}, but is "
            f"{namespace.call}; correct it"
        )
    launch = calls[namespace.call - 1]
    options = [*launch.options]
    if namespace.ignore_unknown_options:
        options.append("--ignore-unknown-options")
    problems = Problems()
    parser = FlagParser()
    flags = parser.parse(options, problems)
    attempted = {*flags.attempted, *_GIVEN_LATER}
    missing = checks.missing_flags(flags.args, attempted=attempted)
    with problems.collected():
        checks.check_required(missing)
    given = {given.dest for given in flags.given}
    checks.check_combinations(flags.args, given=given, problems=problems)
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
        *drop_kept_modules(
            flags.args, modules_kept_by(flags, flags.args.transformer_impl, has_cuda=True)
        ),
        *run_as_others(flags),
    )
    set_defaults(flags, before, default_run_dir(), has_cuda=True)
    completed = copy.copy(flags.args)
    problems.wrong |= {*flags.wrong, *missing}
    checks.check_settings(completed, problems)
    problems.check(
        partial(training_sizes, completed, completed.global_batch_tokens),
        read_for_sizes(completed),
    )
    if any(getattr(completed, dest) for dest in checks.DATA_PATHS):
        problems.check(partial(checks.check_data, completed, needs_files=False))
    if pool is not None and parser.knows_shape(problems):
        if completed.ffn_hidden_size is None:
            completed.ffn_hidden_size = usual_ffn_hidden_size(completed)
        if completed.padded_vocab_size is None:
            size, multiple = completed.vocab_size, completed.make_vocab_size_divisible_by
            # Without --vocab-size that of a tokenizer, which is not read here, may fit.
            completed.padded_vocab_size = (
                padded_vocabulary_size(size, multiple) if size else pool.tp_lcm
            )
        check_fit(completed, pool, problems)

    texts = option_texts(
        taken,
        flags.unknown,
        differences(parser, flags, before, uses_tp=layout.tp > 1, has_cuda=True),
    )
    for line in (
        *block_lines("refused", "change or remove these first", problems.lines),
        *block_lines("calls", "of the script; --call N converts another", _differences(calls)),
        *option_lines(texts),
        *strategy,
    ):
        print(line)
    if problems:
        print("command      printed once nothing is refused")
        return 1
    print(
        f"command      to check its flags: hydraulis train FLAGS --num-ranks {num_ranks or 'N'} "
        "--dry-run, without a GPU also --device NAME"
    )
    if launch.launcher:
        theirs = (
            launch.program if launch.is_torchrun else f"{launch.launcher[0]} … {launch.program}"
        )
        ours = f"{'--no-python ' if launch.is_torchrun else ''}hydraulis train"
        print(f"  in the script, {ours} takes the place of {theirs}, and these options that of its")
        print("  options; values such as ranks, addresses, dates and folders are those of this run")
        if not launch.is_torchrun:
            variables = "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            print(f"  without torchrun, the launcher has to set {variables} for each rank")
    print(f"\n{launch.command(honoured)}")
    return 0


def _calls(namespace: argparse.Namespace) -> list[LaunchCommand]:
    """Calls of the command that is given, or the options of the file as one call."""
    if bool(namespace.command_words) == bool(namespace.file):
        raise ConfigurationError(
            "convert takes a file of options, FILE, or what runs a launch script, "
            "-- bash train.sh ARGUMENTS; give one of them"
        )
    if namespace.command_words:
        return recorded_calls(namespace.command_words, namespace.time_limit)
    return [LaunchCommand((), "", read_options(namespace.file), None)]


def _differences(calls: Sequence[LaunchCommand]) -> list[str]:
    """A line for each of several calls, with the words that not all of them have."""
    if len(calls) < 2:
        return []
    common = set.intersection(*(set(call.options) for call in calls))
    lines = []
    for number, call in enumerate(calls, 1):
        words = " ".join(word for word in call.options if word not in common)
        shown = textwrap.shorten(words, 80, placeholder=" …")
        lines.append(f"{number}: {call.program} with {shown or 'fewer options'}")
    return lines


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
