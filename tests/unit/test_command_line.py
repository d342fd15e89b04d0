"""Usage, suggestions and the end of output, which all commands share."""

import importlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from rich.progress import MofNCompleteColumn

from megatron.hydraulis.__main__ import COMMANDS, TRAIN, main
from megatron.hydraulis.command_line import NEVER_ABBREVIATIONS, CommandParser, add_pool_argument
from megatron.hydraulis.errors import ConfigurationError, NotInstalledError
from megatron.hydraulis.ranges import RANGES_OF_COMMANDS
from megatron.hydraulis.terminal import (
    ProgressBars,
    StrategyText,
    TimeLeftColumn,
    figures_table,
    launch_command,
    print_next,
    profile_command,
    table_text,
)
from tests.unit.flags.argument_command import flag_parser

OTHERS = [command for command in COMMANDS if command is not TRAIN]
TERMINAL_COLUMNS = 80


def parser_of(module: str) -> CommandParser:
    parser = CommandParser(prog="hydraulis")
    importlib.import_module(module).add_arguments(parser)
    return parser


def misspelt(option: str) -> str:
    """The option with two neighbouring letters exchanged."""
    return option[:4] + option[5] + option[4] + option[6:]


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.name)
def test_a_misspelt_flag_of_any_command_is_corrected(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = parser_of(command.module)  # type: ignore[attr-defined]
    option = next(o for a in parser._actions[1:] for o in a.option_strings if len(o) > 6)
    with pytest.raises(SystemExit) as exit_:
        parser.parse_args([misspelt(option), "1"])
    assert exit_.value.code == 2
    assert f"did you mean {option} instead of {misspelt(option)}?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--stratgy", "tp2"], ["--stratgy=tp2"]])
def test_a_misspelt_flag_of_training_is_corrected(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"--stratgy .*did you mean --strategy\?"):
        flag_parser().parse(words)


def test_no_flag_is_suggested_for_what_another_program_reads() -> None:
    parser = CommandParser()
    parser.add_argument("--schemes", nargs="+")
    parser.add_argument("rest", nargs="*")
    parser.parse_known_args(["--schemes", "tp1", "--", "--scheme", "--num-layers"])
    assert parser.suggestions() == ""


def test_a_flag_that_was_shortened_is_no_mistake() -> None:
    parser = CommandParser()
    parser.add_argument("--lengths")
    assert parser.parse_args(["--len", "x"]).lengths == "x"
    assert parser.suggestions() == ""


def test_every_number_of_a_command_has_a_range() -> None:
    for command in COMMANDS:
        if command is not TRAIN:
            numbers = [
                action.option_strings[0]
                for action in parser_of(command.module)._actions
                if action.type in (int, float) and action.option_strings
            ]
            without = set(numbers) - RANGES_OF_COMMANDS.keys()
            assert not without, (command.name, without)


@pytest.mark.parametrize("value", ["nan", "-1", "1e30"])
def test_numbers_out_of_range_are_refused_together(value: str) -> None:
    parser = CommandParser()
    parser.add_argument("--num-ranks", type=int)
    parser.add_argument("--moe-aux-loss-coeff", type=float, nargs="+")
    parser.parse_args(["--moe-aux-loss-coeff", "0.1", "0", "--num-ranks", "131072"])
    with pytest.raises(ConfigurationError, match="--num-ranks must be at most 131,072") as raised:
        parser.parse_args(["--moe-aux-loss-coeff", "0.1", value, "--num-ranks", "131073"])
    assert "--moe-aux-loss-coeff must be" in str(raised.value)


def test_no_option_of_training_is_an_abbreviation_in_another_command() -> None:
    for command in COMMANDS:
        if command.takes_launch_options:
            known = parser_of(command.module)._option_string_actions
            short = {
                option
                for option in flag_parser()._actions
                if option not in known and any(each.startswith(option) for each in known)
            }
            assert short <= {*NEVER_ABBREVIATIONS}


def test_a_pool_has_the_name_of_training_and_a_short_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = CommandParser()
    schemes = parser.add_mutually_exclusive_group()
    add_pool_argument(schemes, required=False)
    schemes.add_argument("--schemes")
    for words in ("--strategy-pool b", "--strategy-pool=b", "--poo b", "--pool a --pool b"):
        assert parser.parse_args(words.split()).pool == "b"
    for words, message in (
        ("--strategy-pool auto", "training proposes itself"),
        ("--schemes tp1 --strategy-pool b", "not allowed with argument --schemes"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words.split())
        assert message in capsys.readouterr().err


def test_usage_names_what_is_required() -> None:
    parser = CommandParser(prog="hydraulis do")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--seed")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--pool", metavar="FILE")
    which.add_argument("--schemes", metavar="S")
    parser.add_mutually_exclusive_group().add_argument("--json")
    parser.add_argument("folder", metavar="DIR")
    expected = "usage: hydraulis do --out FILE (--pool FILE | --schemes S) [FLAGS] DIR\n"
    assert parser.format_usage() == expected


@pytest.mark.parametrize("command", ["", *(command.name for command in COMMANDS)])
def test_help_fits_a_terminal_and_says_something_about_every_flag(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(TERMINAL_COLUMNS))
    monkeypatch.setattr(sys, "argv", ["hydraulis"])
    with pytest.raises(SystemExit) as exit_:
        main([*command.split(), "--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    # argparse breaks no line between a flag and the name of its value.
    texts = [line for line in lines if not line.startswith("  --")]
    assert [text for text in texts if len(text) > TERMINAL_COLUMNS] == []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        # The text of a flag stands on its line or, indented, on the next one.
        if line.startswith("  --") and "  " not in line.strip():
            assert following.startswith(" " * 8), line


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["lengths", "--help"],
        ["lengths", "--lengths", "examples/lengths_instance_b.json"],
        ["lengths", "--lengths", "examples/lengths_instance_b.json", "--json"],
        ["train", "--help"],
        ["convert", "tests/data/launch_arguments/llmjp_v3_1.8b.txt"],
    ],
    ids=" ".join,
)
def test_output_without_a_reader_ends_quietly(words: list[str]) -> None:
    done = subprocess.Popen(
        [sys.executable, "-m", "megatron.hydraulis", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.stdout is not None
    done.stdout.close()
    assert done.stderr is not None
    assert done.stderr.read() == b""
    # 0 if argparse itself ignored that the help could not be written.
    assert done.wait(timeout=60) in (0, 1, 141)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_output_without_room_is_one_line(words: list[str]) -> None:
    command = ["lengths", "--lengths", "examples/lengths_instance_b.json", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "megatron.hydraulis", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device; make room.*\n", done.stderr)


def test_a_closed_output_is_no_error() -> None:
    command = f"{sys.executable} -m megatron.hydraulis --help >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_misspelt_flag_is_corrected_where_only_planning_is_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def accept(words: Sequence[str], rest: Sequence[str]) -> NoReturn:
        raise NotInstalledError("torch")

    parser = CommandParser(prog="hydraulis")
    parser.accept = accept
    parser.add_argument("--lengths")
    with pytest.raises(SystemExit):
        parser.parse_args(["--lenghts", "x"])
    error = capsys.readouterr().err
    assert "unrecognized arguments: --lenghts x" in error
    assert "[train]" in error
    assert "did you mean --lengths" in error


def test_the_launch_of_a_job_names_its_nodes() -> None:
    tail = "--no-python hydraulis train"
    assert launch_command(4, 8) == f"torchrun --standalone --nproc-per-node 4 {tail}"
    script = "scripts/slurm/pretrain_gpt.sbatch"
    assert launch_command(24, 8) == f"sbatch --nodes 3 --gpus-per-node 8 {script}"


def test_schemes_are_measured_on_as_few_nodes_as_hold_them() -> None:
    tail = "--no-python hydraulis profile"
    on_node = f"torchrun --standalone --nproc-per-node 8 {tail}"
    assert profile_command(8, 8, largest=4) == on_node
    assert profile_command(24, 8, largest=8).startswith("srun --nodes 1 --ntasks 1 ")
    assert profile_command(24, 8, largest=8).endswith(f" {on_node}")
    nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert profile_command(24, 8, largest=16) == f"torchrun {nodes} --nproc-per-node 8 {tail}"


def test_another_broken_pipe_is_an_error() -> None:
    script = (
        "from megatron.hydraulis.command_line import quiet_without_reader\n"
        "with quiet_without_reader(): raise BrokenPipeError('to a worker')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "BrokenPipeError: to a worker" in done.stderr


def test_progress_is_shown_while_one_step_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars(line_interval_s=0.01) as bars:
        bars.add_task("waits", total=1)
        while not (lines := capsys.readouterr().err):
            time.sleep(0.01)
    assert lines.startswith("waits (")


def test_progress_is_shown_in_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for interval_s, is_shown in ((0.0, True), (9.0, True), (0.0, False)):
        columns = (MofNCompleteColumn(), TimeLeftColumn())
        bars = ProgressBars(*columns, is_shown=is_shown, line_interval_s=interval_s)
        with bars:
            task = bars.add_task("first", total=3)
            bars.advance(task)
            bars.update(task, advance=1, description="second")
    output, lines = capsys.readouterr()
    left = r"[-\d]:[-\d]{2}:[-\d]{2} left"
    assert re.fullmatch(rf"first \(1/3, {left}\)\nsecond \(2/3, {left}\)\n", lines)
    assert not output


def test_errors_and_printed_commands_do_not_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / "a\x1b[31m\udcff b")
    assert main(["lengths", "--lengths", name]) == 2
    assert r"a\x1b[31m\udcff b" in capsys.readouterr().err
    print_next("hydraulis train", "--load", name)
    printed = capsys.readouterr().out
    assert r"a\x1b[31m\udcff b'" in printed
    assert printed.strip().isprintable()


@pytest.mark.parametrize("width", [34, 40, 60])
def test_a_strategy_breaks_between_its_terms(width: int) -> None:
    text = "tp4cp2+12*tp2cp2~+4*tp2 16*tp4cp2, every layer recomputed"
    table = figures_table("", ("strategy",), ("gain", "time, s"))
    table.add_row(StrategyText(text), "1.000", "12.345")
    lines = [line for line in table_text(table, width).splitlines() if line.startswith("│")]
    assert len(lines) > 1
    cells = [line.split("│")[1].strip() for line in lines]
    assert "".join(cells).replace(" ", "") == text.replace(" ", "")
    pieces = [piece for cell in cells for piece in re.findall(r"[^ +]+", cell)]
    assert pieces == re.findall(r"[^ +]+", text)
