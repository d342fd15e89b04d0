import sysconfig
from pathlib import Path

import pytest

from megatron.hydraulis.data.corpus import Corpus, DocumentRange
from megatron.hydraulis.data.dataset import read_index
from megatron.hydraulis.data.tokenizer import TokenizerSettings, build_tokenizer
from megatron.hydraulis.errors import DataError
from scripts import stdlib_corpus


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with everything that must be excluded."""
    root = tmp_path / "lib"
    for name in ("os.py", "json/decoder.py", "test/test_os.py", "json/tests/test_json.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\nimport sys\nprint('héllo')\n")
    (root / "site-packages").mkdir()
    (root / "site-packages" / "torch.py").write_text("import sys")
    (root / "empty.py").write_text("")
    (root / "notes.txt").write_text("no source")
    return root


def test_the_standard_library_is_hundreds_of_files_of_all_lengths() -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_corpus.source_files(root)
    names = {file.relative_to(root).as_posix() for file in files}
    assert len(files) > 400
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) > 1000 * min(sizes)


def test_order_depends_only_on_names(library: Path) -> None:
    names = [file.relative_to(library).as_posix() for file in stdlib_corpus.source_files(library)]
    assert sorted(names) == ["json/decoder.py", "os.py"]
    moved = library.rename(library.with_name("elsewhere"))
    assert [
        file.relative_to(moved).as_posix() for file in stdlib_corpus.source_files(moved)
    ] == names


def test_corpus_is_made_once_and_holds_the_sources(library: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stdlib_corpus.build(out, library, vocab_size=280)
    stamp = (out / "stdlib.idx").stat().st_mtime_ns
    assert not stdlib_corpus.build(out, library, vocab_size=280)
    assert (out / "stdlib.idx").stat().st_mtime_ns == stamp

    tokenizer = build_tokenizer(
        TokenizerSettings(
            tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(out / "tokenizer")
        )
    )
    assert tokenizer.vocab_size == 280
    corpus = Corpus(
        [DocumentRange.whole(read_index(str(out / "stdlib")))],
        seq_length=1000,
        long_sequences="error",
    )
    corpus.check_vocabulary(tokenizer.vocab_size)
    for i, file in enumerate(stdlib_corpus.source_files(library)):
        tokens = corpus.tokens(i).tolist()
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:-1]) == file.read_text()


def test_corpus_is_made_again_if_necessary(library: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    stdlib_corpus.build(out, library, vocab_size=280)
    assert stdlib_corpus.build(out, library, vocab_size=281)
    (out / "stdlib.bin").unlink()
    assert stdlib_corpus.build(out, library, vocab_size=281)
    (out / "complete.json").write_text("{")
    assert stdlib_corpus.build(out, library, vocab_size=281)
    (library / "os.py").write_text("import sys\n")
    assert stdlib_corpus.build(out, library, vocab_size=281)
    assert not stdlib_corpus.build(out, library, vocab_size=281)


def test_python_without_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has none; install a Python that comes with its source"):
        stdlib_corpus.build(tmp_path / "out", tmp_path)


def test_output_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file.*; choose another --output-dir"):
        stdlib_corpus.build(tmp_path / "file", library)
