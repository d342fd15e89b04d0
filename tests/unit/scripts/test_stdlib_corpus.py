import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from megatron.hydraulis.data.corpus import Corpus, DocumentRange
from megatron.hydraulis.data.index import read_index
from megatron.hydraulis.data.tokenizer import TokenizerSettings, build_tokenizer
from megatron.hydraulis.errors import DataError


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "stdlib_corpus.py"
    spec = importlib.util.spec_from_file_location("stdlib_corpus", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_standard_library_is_hundreds_of_files_of_all_lengths(script: ModuleType) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = script.source_files(root)
    names = {file.relative_to(root).as_posix() for file in files}
    assert len(files) > 400
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages"}
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) > 1000 * min(sizes)


def test_order_depends_only_on_names(script: ModuleType, library: Path) -> None:
    names = [file.relative_to(library).as_posix() for file in script.source_files(library)]
    assert sorted(names) == ["json/decoder.py", "os.py"]
    moved = library.rename(library.with_name("elsewhere"))
    assert [file.relative_to(moved).as_posix() for file in script.source_files(moved)] == names


def test_corpus_is_made_once_and_holds_the_sources(
    script: ModuleType, library: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert script.build(out, library, vocab_size=280)
    stamp = (out / "stdlib.idx").stat().st_mtime_ns
    assert not script.build(out, library, vocab_size=280)
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
    for i, file in enumerate(script.source_files(library)):
        tokens = corpus.tokens(i).tolist()
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:-1]) == file.read_text()


def test_corpus_is_made_again_if_necessary(
    script: ModuleType, library: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    script.build(out, library, vocab_size=280)
    assert script.build(out, library, vocab_size=281)
    (out / "stdlib.bin").unlink()
    assert script.build(out, library, vocab_size=281)
    (out / "complete.json").write_text("{")
    assert script.build(out, library, vocab_size=281)
    (library / "os.py").write_text("import sys\n")
    assert script.build(out, library, vocab_size=281)
    assert not script.build(out, library, vocab_size=281)


def test_python_without_source(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has none; install a Python that comes with its source"):
        script.build(tmp_path / "out", tmp_path)


def test_output_that_cannot_be_written(script: ModuleType, library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file.*; choose another --output-dir"):
        script.build(tmp_path / "file", library)
