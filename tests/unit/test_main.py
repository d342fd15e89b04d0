import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import COMMANDS, main
from megatron.hydraulis.data.dataset import read_index

NULL_TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]


def preprocess(tmp_path: Path, *flags: str, source: str = "in.jsonl") -> int:
    (tmp_path / "in.jsonl").write_text('{"text": "1 2 3"}\n{"text": "4"}\n{"body": "5"}\n')
    (tmp_path / "in.txt").write_text("1 2 3 4")
    return main(
        [
            "preprocess",
            "--input",
            str(tmp_path / source),
            "--output-prefix",
            str(tmp_path / "out"),
            *NULL_TOKENIZER,
            *list(flags),
        ]
    )


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for command in COMMANDS:
        assert any(line.split() == [command.name, *command.help.split()] for line in lines)


def test_output_that_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    with pytest.raises(SystemExit):
        main(["--help"])
    print("runs/\udcff×", flush=True)
    assert written.getvalue().endswith(b"runs/\\udcff\\xd7\n")


def test_version_lists_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code in (0, None)
    text = r"hydraulis \S+ \(megatron-core \S+, torch \S+\)\n"
    assert re.fullmatch(text, capsys.readouterr().out)


@pytest.mark.parametrize("script", ["hydraulis", "__main__.py"])
def test_help_of_a_command_shows_how_it_was_called(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{script}", "plan", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    program = "hydraulis" if script == "hydraulis" else "python -m megatron.hydraulis"
    assert capsys.readouterr().out.startswith(f"usage: {program} plan ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("propse", "did you mean propose? commands are"), ("dance", "'dance'; commands are")],
)
def test_an_unknown_command_lists_the_existing_ones(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([name])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert hint in error
    assert all(command.name in error for command in COMMANDS)


def test_train_is_the_training_script(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("megatron.hydraulis.loop.entry.main", called.append)
    assert main(["train", "--lr", "1", "--help"]) == 0
    assert called == [["--lr", "1", "--help"]]


def test_help_of_train_shows_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["train", "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "torchrun [TORCHRUN OPTIONS] --no-python hydraulis train [FLAGS]" in text
    assert "torchrun [TORCHRUN OPTIONS] -m megatron.hydraulis train [FLAGS]" in text
    assert "--strategy-pool" in text


def test_help_imports_neither_torch_nor_megatron_core() -> None:
    script = (
        "import sys\n"
        "from megatron.hydraulis.__main__ import main\n"
        "try: main(['preprocess', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'megatron.core'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--output-prefix" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "inspect-checkpoint"), (["dance"], "'dance'"), (["preprocess"], "--output-prefix")],
)
def test_usage_errors(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m megatron.hydraulis" in error
    assert says in error


def test_preprocess_prints_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preprocess(tmp_path, "--workers", "2", source="in.txt") == 0
    assert read_index(str(tmp_path / "out")).document_lengths.tolist() == [5]
    printed = capsys.readouterr().out
    assert "training cannot compare its own with it" in printed
    assert "1 file, 1 document (0 empty skipped)" in printed
    assert "5 tokens" in printed
    assert "next: hydraulis lengths --lengths" in printed


def test_preprocess_honours_its_flags(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text('{"body": "5 6"}\n')
    (tmp_path / "folder" / "b.py").write_text("not numbers")
    flags = ["--json-key", "body", "--no-append-eod", "--pattern", "*.jsonl"]
    assert preprocess(tmp_path, *flags, source="folder") == 0
    assert read_index(str(tmp_path / "out")).document_lengths.tolist() == [2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [],
            "in.jsonl, line 3: the text is under key 'text' but the line has body; set --json-key",
        ),
        (["--workers", "0"], "--workers must be at least 1 but is 0"),
        (["--output-prefix", "x.bin"], "path without .bin or .idx"),
        (["--input", "/nowhere"], "input /nowhere does not exist"),
        (["--tokenizer-type", "HuggingFaceTokenizer"], "--tokenizer-model, which is missing"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preprocess(tmp_path, *flags) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.glob("out*"))


def test_program_ends_without_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron.hydraulis",
            "preprocess",
            "--input",
            str(tmp_path),
            "--output-prefix",
            str(tmp_path / "out"),
            *NULL_TOKENIZER,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: preprocessing needs at least one file")
    assert "Traceback" not in done.stderr
