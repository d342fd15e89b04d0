"""Damaged files and senseless values end in one line and status 2, whichever command reads them."""

from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main

_FILES = {
    "good": b"[3, 4]",
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "huge": b"[99999999999999999999]",
    "binary": bytes(range(256)),
    "list/trace.json": b"[1]\n",
    "deep_line/trace.json": b"[\n" + b"[" * 10_000 + b"]" * 10_000 + b",\n]\n",
}
_HOSTILE = [
    ("lengths --lengths huge", "from 1 to 1000000000000000"),
    ("lengths --lengths deep", "JSON of usual size"),
    ("lengths --lengths binary", "must be text in UTF-8 but byte 128"),
    (f"lengths --lengths {'a' * 300}", "File name too long; correct it"),
    ("lengths --lengths EMPTY", "--lengths has an empty value"),
    ("lengths --lengths=", "--lengths has an empty value"),
    ("lengths --lengths CONTROL", r"no control characters but is 'a\x1b[2J'"),
    (
        "simulate --lengths good --cost-profile x --strategy-pool y --global-batch-size 2 "
        "--plan-time 1e18",
        "--plan-time must be at most 86400",
    ),
    (
        "preprocess --input good --output-prefix out --tokenizer-type NullTokenizer --vocab-size 9 "
        "--tokenizer-metadata x.json",
        "from --vocab-size alone but files are given: x.json",
    ),
    ("preflight --timeout 1e18", "--timeout must be at most 86400"),
    ("EMPTY", "an argument has an empty value"),
    ("trace EMPTY", "an argument has an empty value"),
    ("trace good --picture trace.json", "a picture is a .png but this is '.json'"),
    ("trace good --picture /dev/full", "a picture is a .png but this is 'none'"),
    ("trace list", "an event of a trace is a span or metadata of this program, but [1] is not"),
    ("trace deep_line", "line 2 of 4 is not"),
    ("trace zero", "no regular file"),
]


@pytest.mark.parametrize(("words", "says"), _HOSTILE)
def test_hostile_input_is_one_line(
    words: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in _FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    Path("zero").mkdir()
    Path("zero/trace.json").symlink_to("/dev/zero")
    special = {"EMPTY": "", "CONTROL": "a\x1b[2J"}
    assert main([special.get(word, word) for word in words.split()]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith("error: ")
    assert says in error
    assert ";" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seq-length", "1.5"], "invalid int value: '1.5'; write a whole number"),
        (["--seq-length", "x"], "invalid int value: 'x'; write a whole number"),
        (["--unknown", "\x1b[2J"], r"unrecognized arguments: --unknown \x1b[2J"),
    ],
)
def test_errors_of_argparse(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["lengths", "--lengths", "x", *words])
    error = capsys.readouterr().err
    assert says in error
    assert error.replace("\n", "").isprintable()
