"""``profile`` on two ranks: a file that `plan` uses, and a rerun that measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.profiler.measurements import measurements_path
from megatron.hydraulis.strategy import Scheme
from tests.support.forked_job import JobOutcome, run_job
from tests.support.huggingface_folders import make_folder
from tests.support.tiny_corpus import SEQ_LENGTH, tiny_command

pytestmark = pytest.mark.distributed

NUM_RANKS, MAX_TOKENS = 2, 64
SCHEMES = (Scheme(), Scheme(tp=2), Scheme(pp=2), Scheme(cp=2))
POOL = {
    "num_ranks": NUM_RANKS,
    "ranks_per_node": NUM_RANKS,
    "strategies": [
        {"name": "short", "replicas": "2*tp1"},
        {"name": "long", "replicas": "tp2"},
        {"name": "deep", "replicas": "pp2"},
        {"name": "waves", "replicas": "cp2~"},
    ],
}
QUICK = ("--max-tokens", str(MAX_TOKENS), "--num-sizes", "2", "--short-tokens", "16")
FEW = ("--num-warmup", "1", "--num-repeats", "2")


def program(argv: Sequence[str]) -> None:
    raise SystemExit(main(argv))


def model_flags(folder: Path) -> list[str]:
    # Flags that only training needs are allowed; no corpus is read.
    return tiny_command("nowhere/to/be/found", folder / "run")


def profile(
    folder: Path, out: Path, *flags: str, num_ranks: int = NUM_RANKS, model: Sequence[str] = ()
) -> JobOutcome:
    argv = ["profile", "--out", str(out), *QUICK, *FEW, *flags, "--", *model_flags(folder), *model]
    return run_job(argv, num_ranks, folder / "output", program=program)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "pool.json").write_text(json.dumps(POOL))
    return folder


@pytest.fixture(scope="module")
def profiled(folder: Path) -> Path:
    out = folder / "profile.json"
    profile(folder, out, "--pool", str(folder / "pool.json")).assert_succeeded()
    return out


def test_every_scheme_has_times_and_every_strategy_of_the_pool_its_overhead(
    profiled: Path,
) -> None:
    found = ProfileCostModel.read(profiled)
    for scheme in SCHEMES:
        times = found.coefficients(scheme)
        assert times.time_ms([MAX_TOKENS]) > 0.0
        assert found.max_tokens(scheme) == MAX_TOKENS
        note = found.measurement["schemes"][str(scheme)]
        assert note["num_points"] >= 4
        assert note["peak_bytes"] > 0
        assert 0.0 < note["forward_share"] < 1.0
        assert len(note["stage_ms"]) == scheme.pp
    assert len(found.schemes) == len(SCHEMES)  # of cp2~ the rows are cp2 and that of one rank
    assert {"short", "long", "deep", "waves"} <= {row.name for row in found.strategies}
    speeds = found.measurement["regroup"]
    # tp2 and pp2 receive the half of their half that the other rank owns.
    assert 0 < speeds["long"]["gather_bytes"] < speeds["short"]["gather_bytes"]
    assert speeds["short"]["gather_bytes_per_s"] > 0.0
    assert speeds["short"]["scatter_bytes_per_s"] > 0.0
    assert found.measurement["setup"]["versions"].keys() >= {"torch", "megatron-core", "python"}
    assert found.device.startswith("CPU ")
    assert found.model is not None
    settings = (found.model.dtype, found.model.recompute, found.model.core_attention)
    assert settings == ("fp32", "none", "sdpa")


def test_plan_uses_it(profiled: Path, folder: Path) -> None:
    (folder / "lengths.json").write_text(json.dumps([60, 50, 16, 16, 8, 4, 4]))
    argv = ["plan", "--lengths", str(folder / "lengths.json"), "--pool", str(folder / "pool.json")]
    argv += ["--cost-profile", str(profiled), "--out", str(folder / "plan.json")]
    assert main(argv) == 0
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["predicted_time_s"] > 0.0
    assert plan["strategy"] in {"short", "long", "deep", "waves"}


def test_a_rerun_measures_nothing_and_writes_the_same(profiled: Path, folder: Path) -> None:
    before, log = profiled.read_text(), measurements_path(profiled).read_text()
    again = profile(folder, profiled, "--pool", str(folder / "pool.json"), "--json")
    again.assert_succeeded()
    assert "resuming:" in again.ranks[0].stderr
    assert measurements_path(profiled).read_text() == log
    assert json.loads(again.ranks[0].stdout) == json.loads(before)
    assert json.loads(profiled.read_text()) == json.loads(before)
    assert again.ranks[1].stdout == ""


def test_what_does_not_fit_or_cannot_run_is_reported_and_the_rest_measured(folder: Path) -> None:
    out = folder / "little_memory.json"
    outcome = profile(
        folder, out, "--schemes", "tp1", "tp4", "--memory-limit-bytes", "1", "--num-sizes", "3"
    )
    outcome.assert_succeeded()
    assert "scheme tp4 needs 4 ranks but 2 were started" in outcome.ranks[0].stderr
    found = ProfileCostModel.read(out)
    # Two sizes show how memory grows; after that no larger one is tried.
    assert found.max_tokens(Scheme()) == MAX_TOKENS // 4
    assert found.measurement["schemes"]["tp1"]["num_points_that_do_not_fit"] > 0
    assert [row.scheme for row in found.schemes] == [Scheme()]


@pytest.mark.nightly
def test_groups_of_fewer_ranks_than_share_experts_are_measured_side_by_side(folder: Path) -> None:
    out = folder / "experts.json"
    experts = ("--num-experts", "2", "--moe-ffn-hidden-size", "16", "--moe-router-topk", "2")
    profile(folder, out, "--schemes", "cp2~ep2", "cp2~fsep2", model=experts).assert_succeeded()
    found = {str(row.scheme): row for row in ProfileCostModel.read(out).schemes}
    assert found.keys() == {"cp2ep2", "ep2", "cp2fsep2", "fs2ep2"}
    assert all(row.max_tokens == MAX_TOKENS for row in found.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schemes", "tp4"), "at least 1 scheme that can be run but has 0"),
        (("--schemes", "2*tp1"), "expected one scheme"),
        (("--num-repeats", "0"), "--num-repeats must be at least 1"),
        (("--short-tokens", str(SEQ_LENGTH + 1)), "lower --short-tokens"),
    ],
)
def test_refusals(folder: Path, flags: tuple[str, ...], message: str) -> None:
    outcome = profile(folder, folder / "refused.json", *flags, num_ranks=1)
    assert outcome.statuses == (2,)
    assert message in outcome.stderr


def test_a_folder_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    path = make_folder(tmp_path, "mistral")
    model = ("--hf", str(path))
    outcome = profile(folder, tmp_path / "refused.json", num_ranks=1, model=model)
    assert outcome.statuses == (2,)
    assert f"--hf {path} and " in outcome.stderr
    assert "contradict each other" in outcome.stderr
