"""--strategy-pool auto: proposed once, kept in the run folder, the same after a restart."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.flags.arguments import parse_without_pool, wants_proposal
from megatron.hydraulis.loop.auto_pool import FILE_NAME, pool_of_job
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


def proposed(folder: Path, num_ranks: int, *flags: str, corpus: str | None = None) -> Pool:
    argv = tiny_command(corpus or write_corpus(folder / "corpus"), folder / "run", *flags)
    words = [*argv, "--strategy-pool", "auto"]
    resolved = parse_without_pool(words, num_ranks=num_ranks, rank=0)
    return pool_of_job(resolved, has_cuda=False, store=None)


def test_a_pool_is_kept_and_proposed_again_for_other_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool, path = proposed(tmp_path, 4), tmp_path / "run" / FILE_NAME
    assert Pool.read(path) == pool
    assert pool.num_ranks == 4
    assert f"kept in {path}" in capsys.readouterr().out
    # What is in the file counts, not what would be proposed now.
    content = json.loads(path.read_text())
    content["strategies"] = [{"name": "mine", "replicas": "2*tp2"}]
    path.write_text(json.dumps(content))
    kept = proposed(tmp_path, 4)
    assert [strategy.name for strategy in kept.strategies] == ["mine"]
    assert "proposed at an earlier start" in capsys.readouterr().out
    assert proposed(tmp_path, 2).num_ranks == 2
    error = capsys.readouterr().err
    assert "is for 4 ranks, 4 a node, and the job has 2, 2 a node: a pool is proposed" in error


def test_a_pool_of_another_model_or_data_is_proposed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proposed(tmp_path, 2)
    proposed(tmp_path, 2, "--num-layers", "6")
    assert "was proposed for other values of model: a pool is" in capsys.readouterr().err
    other = write_corpus(tmp_path / "other", [20, 30, 40] * 20)
    proposed(tmp_path, 2, "--num-layers", "6", corpus=other)
    assert "was proposed for other values of lengths: a pool is" in capsys.readouterr().err
    proposed(tmp_path, 2, "--num-layers", "6", corpus=other)
    assert "proposed at an earlier start" in capsys.readouterr().out


def test_no_pool_is_proposed_for_layers_without_costs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="are not estimated yet; name strategies"):
        proposed(tmp_path, 2, "--hybrid-layer-pattern", "G-", "--swiglu")


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-layer-freq"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (f"{EXPERTS} [1,0]", f"{EXPERTS} [0,1]", "first layers without experts"),
        ("", "--global-batch-size 16", "batch size"),
        ("", "--fs-prefetch 2", "layers gathered ahead"),
    ],
)
def test_what_a_pool_is_for_counts_unless_the_file_of_an_earlier_version_does_not_name_it(
    before: str, after: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (before, after):
        proposed(tmp_path, 2, *flags.split())
    assert f"was proposed for other values of {what}: a pool is" in capsys.readouterr().err
    path = tmp_path / "run" / FILE_NAME
    content = json.loads(path.read_text())
    del content["made_for"][what]
    path.write_text(json.dumps(content))
    proposed(tmp_path, 2, *before.split())
    assert "proposed at an earlier start" in capsys.readouterr().out


def test_widths_of_cp_that_the_cost_profile_lacks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"tp": tp, "cp": cp, "pp": 1, "a_ms_per_token2": 1e-4 / (tp * cp), "c_ms": 1.0,
         "b_ms_per_token": 0.1 / (tp * cp), "max_tokens": 400 * tp * cp}
        for tp, cp in ((1, 1), (1, 2), (2, 1))
    ]  # fmt: skip
    path = tmp_path / "profile.json"
    about = {"device": "cpu", "source": "tests", "date": "2026-01-01"}
    path.write_text(json.dumps(about | {"schemes": rows}))
    pool = proposed(tmp_path, 4, "--cost-profile", str(path))
    out = capsys.readouterr().out
    expected = f"strategy pool: without cp4, tp2cp2, which {path} lacks; to offer them, measure"
    assert expected in out
    measured = {(row["tp"], row["cp"]) for row in rows}
    assert {(s.tp, s.cp) for strategy in pool.strategies for s in strategy.schemes} <= measured


def test_a_cost_profile_of_more_ranks_is_refused_before_anything_is_proposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    about = {"device": "h100", "source": "tests", "date": "2026-01-01", "num_ranks": 8}
    row = {"tp": 1, "cp": 1, "pp": 1, "a_ms_per_token2": 0.0, "b_ms_per_token": 0.1, "c_ms": 1.0}
    path.write_text(json.dumps(about | {"schemes": [row | {"max_tokens": 400}]}))
    argv = tiny_command(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    place = argv.index("--max-tokens-per-micro-batch")  # takes the place of the profile's limits
    words = [*argv[:place], *argv[place + 2 :], "--strategy-pool", "auto"]
    resolved = parse_without_pool([*words, "--cost-profile", str(path)], num_ranks=2, rank=0)
    with pytest.raises(ConfigurationError, match=r"for 8 ranks .* --device h100 --num-ranks 2"):
        pool_of_job(resolved, has_cuda=False, store=None)
    assert "strategy pool" not in "".join(capsys.readouterr())


def test_experts_may_be_shared_by_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """cp4~ep4: each rank has sequences of its own, and four share the experts. Groups of one rank
    exchange nothing, so that they are faster."""
    rows = [
        {"tp": 1, "cp": cp, "pp": 1, "ep": 4, "a_ms_per_token2": 1e-4 / cp, "c_ms": 1.0,
         "b_ms_per_token": (0.1 if cp == 1 else 0.2) / cp, "max_tokens": 400 * cp}
        for cp in (4, 1, 2)
    ]  # fmt: skip
    path = tmp_path / "profile.json"
    about = {"device": "cpu", "source": "tests", "date": "2026-01-01"}
    experts = ("--num-experts", "8", "--moe-ffn-hidden-size", "64", "--moe-router-topk", "2")
    for measured in (rows[:1], rows):
        path.write_text(json.dumps(about | {"schemes": measured}))
        pool = proposed(tmp_path / str(len(measured)), 4, "--cost-profile", str(path), *experts)
        names_it = "strategy pool: without cp4~ep4, which" in capsys.readouterr().out
        is_offered = "cp4~ep4" in map(str, pool.strategies)
        assert (is_offered, names_it) == ((False, True) if measured == rows[:1] else (True, False))


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proposed(tmp_path, 2, "--dry-run")
    assert "not kept by a dry run" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_only_rank_0_writes_and_the_others_get_its_pool_or_an_error(tmp_path: Path) -> None:
    words = tiny_command(write_corpus(tmp_path / "corpus"), tmp_path / "run")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    first, second = (parse_without_pool(words, num_ranks=2, rank=rank) for rank in (0, 1))
    with pytest.raises(HydraulisError, match=r"rank 1 waited 0 s for the pool of rank 0"):
        pool_of_job(second, has_cuda=False, store=store)
    pool = pool_of_job(first, has_cuda=False, store=store)
    (tmp_path / "run" / FILE_NAME).unlink()
    assert pool_of_job(second, has_cuda=False, store=store) == pool
    assert not (tmp_path / "run" / FILE_NAME).exists()


def test_a_run_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigurationError, match="keeps its pool in the run folder but"):
        proposed(tmp_path, 1)
