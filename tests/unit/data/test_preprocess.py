import errno
import gzip
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.hydraulis.data import preprocess as preprocess_module
from megatron.hydraulis.data.documents import find_files
from megatron.hydraulis.data.preprocess import (
    DatasetWriter,
    PreprocessReport,
    map_in_order,
    preprocess,
)
from megatron.hydraulis.data.tokenizer import (
    DocumentEncoder,
    TokenizerFingerprint,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import DataError
from tests.support.full_disk import largest_file


@pytest.fixture
def encoder() -> DocumentEncoder:
    settings = TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=1000)
    return DocumentEncoder(build_tokenizer(settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of input: 1 2, then 3, then 4 4, and so on."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("1 2")
    (folder / "b.jsonl").write_text('{"text": "3"}\n{"text": "4 4"}\n')
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "5"}\n{"text": ""}\n'))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["6 6 6", "7"]}), folder / "d.parquet")
    (folder / "e.txt").write_text("")
    return folder


def run(folder: Path, prefix: Path, encoder: DocumentEncoder, **options: int) -> PreprocessReport:
    return preprocess(find_files([folder]), prefix, encoder, **options)  # type: ignore[arg-type]


def written(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_every_kind_of_input(tmp_path: Path, folder: Path, encoder: DocumentEncoder) -> None:
    prefix = tmp_path / "new" / "folder" / "out"
    report = run(folder, prefix, encoder)
    dataset = IndexedDataset(str(prefix))
    expected = [[1, 2, 999], [3, 999], [4, 4, 999], [5, 999], [6, 6, 6, 999], [7, 999]]
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    assert dataset.document_indices.tolist() == list(range(7))
    assert dataset.index.dtype == np.uint16
    assert report.document_lengths.tolist() == [3, 2, 3, 2, 4, 2]
    assert (report.num_files, report.num_empty) == (5, 2)
    assert written(prefix.parent) == ["out.bin", "out.idx"]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_output_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, encoder: DocumentEncoder, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    monkeypatch.setattr(preprocess_module, "_CHUNK_BYTES", 64)
    source = tmp_path / "a.jsonl"
    generator = np.random.default_rng(0)
    lines = [
        json.dumps({"text": " ".join(map(str, generator.integers(0, 999, size)))})
        for size in generator.integers(1, 60, 300)
    ]
    source.write_text("\n".join(lines))
    for workers in (1, num_workers):
        preprocess([source], tmp_path / f"out{workers}", encoder, num_workers=workers)
    for suffix in ("bin", "idx"):
        one, several = (tmp_path / f"out{n}.{suffix}" for n in (1, num_workers))
        assert one.read_bytes() == several.read_bytes()


def test_progress_counts_the_bytes_of_the_files(
    tmp_path: Path, folder: Path, encoder: DocumentEncoder
) -> None:
    steps: list[int] = []
    for name in ("c.jsonl.gz", "d.parquet"):  # measured only roughly
        (folder / name).unlink()
    files = find_files([folder])
    preprocess(files, tmp_path / "out", encoder, on_progress=steps.append)
    assert sum(steps) == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_line_leaves_nothing_behind(
    tmp_path: Path, folder: Path, encoder: DocumentEncoder, num_workers: int
) -> None:
    (folder / "b.jsonl").write_text('{"text": "3"}\n{"text": "4 4"\n')
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: .*JSON"):
        run(folder, tmp_path / "out" / "x", encoder, num_workers=num_workers)
    assert written(tmp_path / "out") == []


def test_failure_keeps_an_earlier_dataset(
    tmp_path: Path, folder: Path, encoder: DocumentEncoder
) -> None:
    prefix = tmp_path / "out" / "x"
    run(folder, prefix, encoder)
    before = [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")]
    (folder / "z.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"z\.txt: .*byte 0 is 0xff"):
        run(folder, prefix, encoder)
    assert [Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx")] == before
    assert written(prefix.parent) == ["x.bin", "x.idx"]


def test_the_tokenizer_of_the_data_is_recorded_and_replaced_with_them(
    tmp_path: Path, folder: Path, encoder: DocumentEncoder, tokenizer_folder: Path
) -> None:
    prefix = tmp_path / "out" / "x"
    settings = TokenizerSettings(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_folder)
    )
    tokenizer = build_tokenizer(settings)
    run(folder, prefix, DocumentEncoder(tokenizer))
    recorded = TokenizerFingerprint.read(str(prefix))
    assert recorded == TokenizerFingerprint.of(tokenizer)
    assert recorded is not None
    assert recorded.num_tokens == tokenizer.vocab_size
    run(folder, prefix, encoder)  # NullTokenizer, whose ids mean no tokens
    assert written(prefix.parent) == ["x.bin", "x.idx"]


def test_success_replaces_an_earlier_dataset(
    tmp_path: Path, folder: Path, encoder: DocumentEncoder
) -> None:
    run(folder, tmp_path / "x", encoder)
    (folder / "a.txt").write_text("8 8 8 8")
    run(folder, tmp_path / "x", encoder)
    dataset = IndexedDataset(str(tmp_path / "x"))
    assert dataset[0].tolist() == [8, 8, 8, 8, 999]


def test_input_without_text(tmp_path: Path, encoder: DocumentEncoder) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"one document .* 1 documents in 1 files"):
        run(tmp_path / "in", tmp_path / "x", encoder)
    assert written(tmp_path) == ["in"]


def test_prefix_must_be_a_file_name(tmp_path: Path, folder: Path, encoder: DocumentEncoder) -> None:
    for prefix in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(DataError, match="is a folder; add a name"):
            preprocess(find_files([folder]), prefix, encoder)


def test_unwritable_output(tmp_path: Path, folder: Path, encoder: DocumentEncoder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/x\.bin and \.idx"):
        run(folder, tmp_path / "file" / "x", encoder)


def write_one_document(prefix: Path, num_tokens: int) -> None:
    with DatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.zeros(num_tokens, dtype=np.uint16), [num_tokens])
        writer.commit()


@pytest.mark.parametrize("num_tokens", [20_000, 4_000_000])
def test_full_disk(tmp_path: Path, num_tokens: int) -> None:
    with largest_file(8192), pytest.raises(DataError, match="File too large"):
        write_one_document(tmp_path / "out" / "x", num_tokens)
    assert written(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DataError),
        (KeyboardInterrupt("No space left on device"), KeyboardInterrupt),
    ],
)
def test_an_index_that_is_not_written_leaves_nothing_behind(
    error: BaseException, raised: type[BaseException], tmp_path: Path, monkeypatch: Any
) -> None:
    def end(path: str) -> None:
        raise error

    monkeypatch.setattr(preprocess_module, "_flush_to_disk", end)
    with pytest.raises(raised, match="No space left on device"):
        write_one_document(tmp_path / "out" / "x", 3)
    assert written(tmp_path / "out") == []


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_inputs", [0, 1, 2, 5, 50])
def test_results_come_in_the_order_of_the_inputs(num_workers: int, num_inputs: int) -> None:
    def slow_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0.0)
        return square(number)

    results = list(map_in_order(slow_first, range(num_inputs), num_workers))
    assert results == [n * n for n in range(num_inputs)]


def test_work_is_done_in_other_processes_no_more_than_inputs_and_none_is_left() -> None:
    for num_inputs, num_workers, expected in ((8, 2, 2), (1, 50, 1), (3, 50, 3)):
        with closing(map_in_order(lambda _: os.getpid(), range(num_inputs), num_workers)) as pids:
            assert next(pids) != os.getpid()
            assert len(multiprocessing.active_children()) == expected
            assert os.getpid() not in pids
        assert multiprocessing.active_children() == []


def test_inputs_are_not_taken_far_ahead() -> None:
    taken = []

    def inputs() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    with closing(map_in_order(square, inputs(), 2)) as results:
        assert next(results) == 0
        assert len(taken) <= 5


def test_large_inputs_and_results_do_not_block_each_other() -> None:
    size = 4_000_000
    results = map_in_order(lambda content: content + b"!", (bytes(size) for _ in range(8)), 2)
    assert [len(result) for result in results] == [size + 1] * 8


@pytest.mark.parametrize("num_workers", [1, 2])
def test_first_error_in_order_is_raised(num_workers: int) -> None:
    def refuse_from_three(number: int) -> int:
        if number >= 3:
            raise DataError(f"refused {number}")
        return number

    results: list[int] = []
    with pytest.raises(DataError, match="refused 3"):
        results.extend(map_in_order(refuse_from_three, range(20), num_workers))
    assert results == [0, 1, 2]
    assert multiprocessing.active_children() == []


def test_death_of_a_worker_is_an_error_not_a_hang() -> None:
    def die_at_five(number: int) -> int:
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(DataError, match=r"one of 2 workers ended .*; use fewer --workers"):
        list(map_in_order(die_at_five, range(1000), 2))


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    def note_pid(_: int) -> None:
        (tmp_path / str(os.getpid())).touch()

    parent = os.fork()
    if parent == 0:
        with closing(map_in_order(note_pid, range(100), 2)) as results:
            next(results)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline_s = time.monotonic() + 10
    while any(is_running(pid) for pid in written(tmp_path)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False
