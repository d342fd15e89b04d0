"""--strategy-pool auto: proposed once, kept in the run folder, the same after a restart."""

import json
from pathlib import Path

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.loop.auto_pool import FILE_NAME, wants_proposal, with_pool
from megatron.hydraulis.strategy import Pool
from tests.support.tiny_corpus import tiny_command, write_corpus


@pytest.mark.parametrize(
    ("words", "is_wanted"),
    [
        ("--strategy-pool auto", True),
        ("--strategy-pool=auto --lr 1", True),
        ("--strategy-pool auto --strategy-pool pool.json", False),
        ("--strategy-pool pool.json", False),
        ("--strategy auto", False),
        ("--strategy-pool", False),
    ],
)
def test_the_last_value_counts(words: str, is_wanted: bool) -> None:
    assert wants_proposal(words.split()) is is_wanted


def command(folder: Path) -> list[str]:
    corpus = write_corpus(folder / "corpus")
    return [*tiny_command(corpus, folder / "run"), "--strategy-pool", "auto"]


def proposed(folder: Path, num_ranks: int) -> tuple[list[str], Pool]:
    argv = with_pool(command(folder), num_ranks=num_ranks, rank=0, has_cuda=False, store=None)
    return argv, Pool.read(folder / "run" / FILE_NAME)


def test_a_pool_is_kept_and_proposed_again_for_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, pool = proposed(tmp_path, 4)
    assert argv[-2:] == ["--strategy-pool", str(tmp_path / "run" / FILE_NAME)]
    assert "auto" not in argv
    assert pool.num_ranks == 4
    assert f"kept in {tmp_path / 'run' / FILE_NAME}" in capsys.readouterr().out
    # What is in the file counts, not what would be proposed now.
    path = tmp_path / "run" / FILE_NAME
    content = json.loads(path.read_text())
    content["strategies"] = [{"name": "mine", "replicas": "2*tp2"}]
    path.write_text(json.dumps(content))
    _, kept = proposed(tmp_path, 4)
    assert [strategy.name for strategy in kept.strategies] == ["mine"]
    assert "proposed at an earlier start" in capsys.readouterr().out
    _, other = proposed(tmp_path, 2)
    assert other.num_ranks == 2
    error = capsys.readouterr().err
    assert "is for 4 ranks, 4 a node, and the job has 2, 2 a node: a pool is proposed" in error


def test_a_run_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigurationError, match="keeps its pool in the run folder but"):
        proposed(tmp_path, 1)
