from pathlib import Path

import pytest

from megatron.hydraulis.errors import DataError
from megatron.hydraulis.lengths.counts import read_lengths
from tests.support.index_file import write_idx


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
