import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron.hydraulis.data.documents import find_files, read_documents
from megatron.hydraulis.errors import DataError


def texts(path: Path, json_key: str = "text") -> list[str]:
    return [document.text() for document in read_documents(path, json_key=json_key)]


def test_folder_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.py", "c.txt", ".hidden", ".git/config", "a/.env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [file.relative_to(tmp_path).as_posix() for file in find_files([tmp_path])]
    assert found == ["b.txt", "c.txt", "a/z.md", "a/b/c.py"]
    assert [f.name for f in find_files([tmp_path], pattern="*.txt")] == ["b.txt", "c.txt"]


def test_files_as_given(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(name)
    assert [file.name for file in find_files([tmp_path / "b", tmp_path / "a"])] == ["b", "a"]


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="at least one file but"):
        find_files([tmp_path])


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_bytes("\ufeffone\n\ntwo – three\n".encode())
    (document,) = read_documents(path, json_key="text")
    assert document.text() == "one\n\ntwo – three\n"
    assert document.origin == str(path)
    assert document.read_bytes == path.stat().st_size


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lines = [json.dumps({"id": i, "text": f"text {i}", "body": f"body {i}"}) for i in range(40)]
    content = ("\n".join(lines[:20]) + "\n\n  \n" + "\n".join(lines[20:])).encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert texts(path) == [f"text {i}" for i in range(40)]
    assert texts(path, "body")[39] == "body 39"
    documents = list(read_documents(path, json_key="text"))
    assert (documents[19].line, documents[20].line) == (20, 23)
    assert sum(document.read_bytes for document in documents) <= path.stat().st_size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', r"a\.jsonl, line 2: a line is one JSON object but this one is not"),
        ("[" * 100_000, r"line 2: a line is one JSON object"),
        ('["text"]', r"line 2: the text is under key 'text' but the line has list"),
        ('{"body": "x", "id": 1}', r"line 2: .* the line has body, id; set --json-key"),
        ("{}", r"line 2: .* the line has no key"),
        ('{"text": 3}', r"line 2: key 'text' holds a text but here is int"),
        ('{"text": null}', r"here is NoneType"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        texts(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_is_not_utf_8(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes('{"text": "café"}'.encode("latin-1"))
    with pytest.raises(DataError, match="byte 13 is 0xe9"):
        texts(path)


def test_gzip_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(b'{"text": "x"}\n' * 50)
    for content in (whole[:-9], whole[:12], b"not gzip at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a whole gzip file"):
            texts(path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [f"row {i}" for i in range(3000)]
    table = pyarrow.table({"id": list(range(3000)), "text": [*rows[:-1], None]})
    pyarrow.parquet.write_table(table, path, row_group_size=700)
    assert texts(path) == [*rows[:-1], ""]
    assert next(iter(read_documents(path, json_key="text"))).origin == f"{path}, line 1"


def test_bad_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(DataError, match=r"'text' .* id, body"):
        texts(path)
    with pytest.raises(DataError, match=r"'id' .* int64"):
        texts(path, "id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="not a whole Parquet file"):
        texts(path)


def test_file_that_vanished(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*gone\.txt: No such file"):
        texts(tmp_path / "gone.txt")
