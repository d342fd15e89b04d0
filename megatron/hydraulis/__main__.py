"""The program: ``hydraulis COMMAND …``, or ``python -m megatron.hydraulis COMMAND …``."""

import argparse
import importlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.hydraulis.command_line import (
    PLACEHOLDER,
    CommandParser,
    closest,
    quiet_without_reader,
)
from megatron.hydraulis.errors import HydraulisError, Problems, printable
from megatron.hydraulis.quiet_imports import (
    explained_if_only_planning_is_installed,
    silence_warnings_of_imports,
)

_MEANT_OTHERWISE = (
    *("--cost-profile", "--strategy", "--strategy-pool"),
    *("--device", "--num-ranks", "--ranks-per-node", "--seed"),
)
"""Options of training with another meaning in other commands, which the printed command of training
leaves out."""
_FOR_A_MODEL = ("estimate", "advise", "propose", "simulate", "recommend-layout", "plan")
"""Commands that a launch script's options may follow, as they say which model is trained."""
_FOLDER, _ADAPTERS = "--hf", ("--lora-rank", "--lora-alpha", "--lora-targets")
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


@dataclass(frozen=True)
class Command:
    """A subcommand. Its module has ``add_arguments(parser)`` and ``run(namespace) -> exit status``,
    and is imported only when the command is called, so that help is quick."""

    name: str
    help: str
    relative_module: str
    """Its module, within megatron.hydraulis."""
    takes_command: bool = False
    """Whether words after ``--`` are a command that it runs."""

    @property
    def module(self) -> str:
        return f"megatron.hydraulis.{self.relative_module}"

    @property
    def takes_launch_options(self) -> bool:
        """True if it takes all options of Megatron, of which most have no effect."""
        return self.name in _FOR_A_MODEL


TRAIN = Command("train", "train a GPT on the ranks that torchrun starts", "loop.entry")
"""Its module has ``main(argv)`` instead: the flags are read by Megatron's parser."""

_COMMANDS_BY_TOPIC = {
    "data": (
        Command(
            "preprocess", "convert text, JSON lines or Parquet to .bin and .idx", "data.preprocess"
        ),
        Command(
            "lengths", "show the lengths of a corpus as tables and a picture", "lengths.command"
        ),
    ),
    "training": (
        TRAIN,
        Command(
            "convert",
            "turn a launch script of Megatron into the command here",
            "flags.convert",
            takes_command=True,
        ),
        Command("preflight", "check under torchrun that ranks can communicate", "loop.preflight"),
    ),
    "costs and strategies": (
        Command("profile", "measure a cost profile of schemes under torchrun", "profiler.command"),
        Command(
            "estimate",
            "estimate a cost profile without measurements",
            "cost_model.estimate_command",
        ),
        Command("advise", "say what a pool would gain, and what to run", "advise.command"),
        Command("propose", "propose a pool of strategies for a corpus", "proposal.command"),
        Command(
            "simulate", "estimate iteration times of a pool without a GPU", "simulator.command"
        ),
        Command(
            "recommend-layout", "rank the layouts of fixed-length training", "cost_model.layouts"
        ),
    ),
    "plans": (Command("plan", "find the best plan for one batch of lengths", "planner.command"),),
    "runs": (
        Command("report", "write a page about a run, with advice", "observability.report_page"),
        Command(
            "trace",
            "show when ranks worked and waited; draw an iteration",
            "observability.trace_picture",
        ),
    ),
    "checkpoints": (
        Command(
            "inspect-checkpoint",
            "show what a checkpoint holds and verify its checksums",
            "checkpoint.inspect",
        ),
        Command(
            "export-hf",
            "write a checkpoint as Hugging Face Llama, Qwen3, …",
            "checkpoint.hugging_face.export_hf",
        ),
        Command(
            "import-hf",
            "make a checkpoint from Hugging Face Llama, Qwen3, …",
            "checkpoint.hugging_face.import_hf",
        ),
    ),
}
COMMANDS = tuple(command for commands in _COMMANDS_BY_TOPIC.values() for command in commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 2 for bad input."""
    if sys.stdout is None:  # the shell has closed it (>&-)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may have bytes that are no text, or characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="backslashreplace")
    with quiet_without_reader():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_script = Path(sys.argv[0]).stem == "hydraulis"
    program = "hydraulis" if is_script else "python -m megatron.hydraulis"
    try:
        command = _read_command(program, arguments[:1])
        with explained_if_only_planning_is_installed():
            return _run_command(program, command, arguments[1:])
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except OSError as error:
        if error.filename is None:
            raise
        # What a command does not foresee of a path, such as a name that is too long.
        shown = printable(f"{error.filename!s:.200}: {error.strerror}")
        print(f"error: a path cannot be used: {shown}; correct it", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _run_command(program: str, command: Command, arguments: Sequence[str]) -> int:
    """Import the command's module and run it; returns the exit status."""
    silence_warnings_of_imports()
    module = importlib.import_module(command.module)
    if command is TRAIN:
        module.main(arguments)
        return 0
    parser = CommandParser(
        prog=f"{program} {command.name}",
        description=f"{command.help[0].upper()}{command.help[1:]}.",
    )
    parser.set_defaults(training_words=(PLACEHOLDER,), training_seq_length=None, command_words=())
    module.add_arguments(parser)
    if command.takes_launch_options:
        of_folder = _flags_of_folder(parser, arguments)
        parser.accept = partial(_without_launch_options, num_of_folder=len(of_folder))
        arguments = [*of_folder, *arguments]
    if command.takes_command and "--" in arguments:
        at = [*arguments].index("--")
        parser.set_defaults(command_words=arguments[at + 1 :])
        arguments = arguments[:at]
    status: int = module.run(parser.parse_args(arguments))
    return status


def _flags_of_folder(parser: CommandParser, arguments: Sequence[str]) -> list[str]:
    """Flags of the command for the model of the folder that ``--hf`` names, if any.

    Raises ConfigurationError for a folder without a model that Megatron has.
    """
    help_text = "Hugging Face folder whose model it is; of it only config.json is read"
    parser.add_argument(_FOLDER, metavar="DIR", help=help_text)
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument(_FOLDER, nargs="?", dest=_FOLDER)
    for option in _ADAPTERS:
        reader.add_argument(option, nargs="*", dest=option)
    given = vars(reader.parse_known_args(arguments)[0])
    folder = given.pop(_FOLDER)
    if not folder:
        return []
    adapters = [word for option, values in given.items() if values for word in (option, *values)]
    from megatron.hydraulis.checkpoint.hugging_face.config import read_model
    from megatron.hydraulis.checkpoint.hugging_face.model import model_flags

    model, dtype_name = read_model(Path(folder))
    flags = [flag for flag in model_flags(model) if parser.declares(flag.split()[0])]
    precisions = {"bfloat16": "--bf16", "float32": "--fp32"}
    if dtype_name in precisions and not {*precisions.values()} & {*arguments}:
        flags.append(precisions[dtype_name])
    parser.set_defaults(
        training_words=(_FOLDER, folder, *adapters, PLACEHOLDER), flags_of_folder=flags
    )
    return shlex.split(" ".join(flags))


def _without_launch_options(
    arguments: Sequence[str], rest: Sequence[str], num_of_folder: int = 0
) -> tuple[list[str], dict[str, object]]:
    """Read the options of training; a line on stderr says which have no effect.

    Raises ConfigurationError for options that training refuses, if costs depend on them, and
    NotInstalledError where only planning is installed, which does not know them.

    Args:
        arguments: the whole command line.
        rest: words that the command does not know.
        num_of_folder: words at the beginning that ``--hf`` stands for.

    Returns:
        Words of rest that are no options of training. Attributes of the namespace:
        ``training_words``, those for the command that trains; ``training_seq_length``, its longest
        sequence, None if not given; ``launch_options``, whether rest has options that do not
        describe the model.
    """
    with explained_if_only_planning_is_installed():
        from megatron.hydraulis.flags.checks import missing_flags  # imports torch, as the next
        from megatron.hydraulis.flags.parser import OF_MODEL_AND_LAYERS, FlagParser

    parser = FlagParser()
    flags, refused, others = parser.parse_launch_options(arguments, rest)
    found = parser.words_of_training(arguments, _MEANT_OTHERWISE)
    training = parser.parse(found, Problems())
    has_data = training.args.data_path or training.args.train_data_path
    is_complete = has_data and not missing_flags(training.args, attempted=training.attempted)
    found = parser.words_of_training(arguments[num_of_folder:], _MEANT_OTHERWISE)
    typed = [*flags.as_typed, *(typed for typed, _ in (*flags.taken, *flags.unknown))]
    unread = {word.split("=")[0] for word in rest if word.startswith("--")}
    ignored = [each for each in typed if each.split()[0] in unread]
    if refused:
        ignored.append(f"{' '.join(refused)} (training refuses it)")
    if ignored:
        print(f"options without effect here: {', '.join(ignored)}", file=sys.stderr, flush=True)
    return others, {
        "training_words": found if is_complete else [*found, PLACEHOLDER],
        "training_seq_length": training.args.seq_length,
        "launch_options": not unread <= OF_MODEL_AND_LAYERS,
    }


def _read_command(program: str, first: Sequence[str]) -> Command:
    """The command named by the first argument, or exit with help, the version or an error."""
    parser = CommandParser(
        prog=program,
        usage="%(prog)s COMMAND [ARGUMENTS]",
        description="Balanced training of GPT models over variable-length sequences, on Megatron.",
        epilog=_command_table(program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="show versions and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    namespace = parser.parse_args(first)
    if namespace.version:
        print(_version())
        sys.exit()
    if namespace.command is None:
        parser.print_help(sys.stderr)
        sys.exit(_EXIT_BAD_INPUT)
    by_name = {command.name: command for command in COMMANDS}
    if namespace.command not in by_name:
        close = closest(namespace.command, by_name)
        hint = "" if close is None else f"did you mean {close}? "
        parser.error(
            f"there is no command '{namespace.command}'; {hint}commands are {', '.join(by_name)}"
        )
    return by_name[namespace.command]


def _command_table(program: str) -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = []
    for topic, commands in _COMMANDS_BY_TOPIC.items():
        lines += [f"{topic}:", *(f"  {each.name:<{width}}  {each.help}" for each in commands), ""]
    lines += [
        "Usual order: preprocess, lengths, advise, profile, propose, train, report.",
        f"{program} COMMAND --help describes the arguments of a command.",
    ]
    return "\n".join(lines)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    ours = f"hydraulis {version('hydraulis-megatron')}"
    try:
        return f"{ours} (megatron-core {version('megatron-core')}, torch {version('torch')})"
    except PackageNotFoundError:
        return f"{ours} (planning only, without megatron-core and torch)"


if __name__ == "__main__":
    sys.exit(main())
