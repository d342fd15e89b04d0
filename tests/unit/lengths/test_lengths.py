"""Lengths of a corpus: files, statistics with a closed form, cuts, the command."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.lengths.command import LengthStatistics
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts, read_lengths
from tests.support.index_file import write_idx


def test_four_kinds_of_files_give_the_same_lengths(tmp_path: Path) -> None:
    contents = {
        "list.json": "[5, 3, 5]",
        "lines.txt": "3\n5\n\n5\n",
        "histogram.csv": "length_tokens,count\n5,2\n3,1\n9,0\n",
    }
    paths = []
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
        paths.append(tmp_path / name)
    # A document of D tokens trains D-1; those of fewer than 2 train none.
    paths.append(write_idx(tmp_path / "corpus.idx", [[6], [1], [4], [6]]))
    paths.append(tmp_path / "corpus")
    for path in paths:
        counts = read_length_counts(path)
        assert counts.lengths.tolist() == [3, 5]
        assert counts.counts.tolist() == [1, 2]
        assert (counts.num_sequences, counts.num_tokens, counts.longest) == (3, 13, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("length,count\n1,2\n", "its first line is 'length_tokens,count' but is 'length,count'"),
        ("length_tokens,count\n1;2\n", "two integers, but line 2 is '1;2'"),
        ("length_tokens,count\n0,2\n", "lengths are at least 1"),
        ("length_tokens,count\n7,0\n", "counts at least 1 sequence but has 0"),
        ("", "its first line is 'length_tokens,count' but is ''"),
    ],
)
def test_a_wrong_histogram_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "histogram.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_length_counts(path)


def test_equal_lengths() -> None:
    statistics = LengthStatistics.of(LengthCounts.of([100], [7]))
    assert {length for _, length in statistics.percentiles} == {100}
    assert {length for _, length in statistics.token_percentiles} == {100}
    assert statistics.mean == statistics.token_mean == 100.0
    (row,) = statistics.ranges
    assert (row.first, row.last, row.num_sequences) == (64, 127, 7)
    assert row.sequence_share == row.token_share == row.square_share == 1.0


def test_one_to_n_has_closed_forms() -> None:
    # Lengths 1 … n once each: Σs = n(n+1)/2, Σs² = n(n+1)(2n+1)/6, so the mean over tokens of
    # the length is (2n+1)/3; up to x lie x/n of the sequences and x(x+1)/(n(n+1)) of the tokens.
    n = 1000
    statistics = LengthStatistics.of(LengthCounts.of(np.arange(1, n + 1)))
    assert statistics.num_tokens == n * (n + 1) // 2
    assert statistics.token_mean == pytest.approx((2 * n + 1) / 3)
    assert dict(statistics.percentiles)[50.0] == n // 2
    below = dict(statistics.token_percentiles)[50.0]
    assert (below - 1) * below < n * (n + 1) / 2 <= below * (below + 1)
    for row in statistics.ranges:
        last = min(row.last, n)
        num = last - row.first + 1
        assert row.num_sequences == num
        assert row.token_share == pytest.approx((row.first + last) * num / (n * (n + 1)))
    for name in ("sequence_share", "token_share", "square_share"):
        assert sum(getattr(row, name) for row in statistics.ranges) == pytest.approx(1.0)


def test_cuts() -> None:
    counts = LengthCounts.of([4, 10, 25], [3, 1, 2])
    assert counts.cut(25, "error") is counts
    split = counts.cut(10, "split")
    # Two of 25 make 10, 10 and 5 each.
    assert split.lengths.tolist() == [4, 5, 10]
    assert split.counts.tolist() == [3, 2, 5]
    assert split.num_tokens == counts.num_tokens
    assert counts.cut(10, "truncate").counts.tolist() == [3, 3]
    assert counts.cut(10, "drop").counts.tolist() == [3, 1]
    assert counts.cut(5, "split").lengths.tolist() == [4, 5]
    with pytest.raises(DataError, match=r"at most --seq-length 10 tokens but 2 have more"):
        counts.cut(10, "error")
    with pytest.raises(DataError, match="all 6 sequences have more"):
        counts.cut(3, "drop")
    effect = LengthStatistics.of(counts, seq_length=10, how="truncate").cut
    assert effect is not None
    assert (effect.num_longer, effect.num_longer_tokens) == (2, 50)
    assert (effect.num_sequences, effect.num_tokens) == (6, 42)
    assert effect.square_ratio == pytest.approx((3 * 16 + 3 * 100) / (3 * 16 + 100 + 2 * 625))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, picture = tmp_path / "lengths.csv", tmp_path / "lengths.png"
    lengths.write_text("length_tokens,count\n100,10\n1000,5\n50000,1\n")
    flags = ["lengths", "--lengths", str(lengths), "--seq-length", "32768"]
    assert main([*flags, "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "16 sequences, 56,000 tokens" in text
    *lines, following = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert following.startswith(f"next: hydraulis advise --lengths {lengths} ")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*flags, "--json", "--long-sequences", "drop"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["percentiles"]["50"] == 100
    assert figures["token_percentiles"]["50"] == 50000
    assert figures["cut"]["num_tokens"] == 6000
    assert main([*flags, "--picture", str(tmp_path / "picture")]) == 2
    assert main(["lengths", "--lengths", str(lengths), "--seq-length", "0"]) == 2
    assert "--seq-length must be at least 1 but is 0" in capsys.readouterr().err


def test_equal_lengths_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[7, 7]")
    assert main(["lengths", "--lengths", str(path), "--picture", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize(
    "text", ["[900, 20, 7]", "900\n20\n7", "\ufeff 900\r\n\r\n20 \n7\n", "\n[900,\n20,7]\n"]
)
def test_list_and_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths"
    path.write_bytes(text.encode())
    assert read_lengths(path) == (900, 20, 7)


def test_documents_of_an_index_train_all_but_their_last_token(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "corpus.idx", [[5], [1], [0], [2, 3], [2]])
    assert read_lengths(path) == (4, 4, 1)
    assert read_lengths(str(path)) == (4, 4, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at least 1 sequence of 1 token but the file has 0"),
        (b"[]", "at least 1 sequence of 1 token but the file has 0"),
        (b"[3, 0]", "from 1 to 1000000000000000 but number 1 of the list is 0"),
        (b"[3, true]", "number 1 of the list is True"),
        (b"[3, 2.5]", "number 1 of the list is 2.5"),
        (b"[3, 2", "must be JSON but line 1, column 6 is not"),
        (b'{"lengths": [3]}', "must be a list of lengths but is an object"),
        (b"3\n-4", "line 2 is '-4'"),
        (b"3\n\n4 5", "line 3 is '4 5'"),
        ("3\n٣".encode(), "line 2 is '٣'"),
        (b"9" * 30, "line 1 is '9999"),
        (b"\xff\xfe3", "must be text in UTF-8 but byte 0 is none"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read_lengths(path)
    assert str(path) in str(raised.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file or directory; correct the path"):
        read_lengths(tmp_path / "lengths.json")
    with pytest.raises(DataError, match=r"corpus\.idx does not exist"):
        read_lengths(tmp_path / "corpus.idx")
    with pytest.raises(DataError, match="Is a directory"):
        read_lengths(tmp_path)
    write_idx(tmp_path / "empty.idx", [[1], [1]])
    with pytest.raises(DataError, match="at least 1 sequence of 1 token"):
        read_lengths(tmp_path / "empty.idx")
