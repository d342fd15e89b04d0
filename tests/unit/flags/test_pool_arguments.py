"""--strategy-pool and related flags: what fits the job, what is skipped, what is refused."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.planning import Planning, profiled_model, read_cost_profile
from megatron.hydraulis.strategy import Scheme
from tests.unit.flags.argument_command import parse

POOL = {"short": "8*tp1", "long": "2*tp4", "mixed": "tp4+pp2+2*idle"}


pytestmark = pytest.mark.usefixtures("plain_environment")


def write_pool(
    folder: Path,
    strategies: Mapping[str, str] = POOL,
    *,
    num_ranks: int = 8,
    ranks_per_node: int = 8,
    max_tokens: Mapping[str, Any] | None = None,
) -> str:
    entries: list[dict[str, Any]] = [
        {"name": name, "replicas": text} for name, text in strategies.items()
    ]
    if max_tokens is not None:
        entries[0]["max_tokens"] = max_tokens
    path = folder / "pool.json"
    content = {"num_ranks": num_ranks, "ranks_per_node": ranks_per_node, "strategies": entries}
    path.write_text(json.dumps(content))
    return str(path)


def write_profile(folder: Path, **max_tokens: int) -> str:
    """A profile of schemes of tp alone: limits by degree."""
    times = {"cp": 1, "pp": 1, "a_ms_per_token2": 1e-6, "b_ms_per_token": 1e-3, "c_ms": 1.0}
    rows = [{"tp": int(tp[2:]), "max_tokens": most, **times} for tp, most in max_tokens.items()]
    path = folder / "profile.json"
    head = {"device": "d", "source": "s", "date": "2026-01-01", "schemes": rows}
    path.write_text(json.dumps(head))
    return str(path)


def names(planning_or_resolved: Any) -> list[str]:
    return [strategy.name for strategy in planning_or_resolved.pool.strategies]


def test_a_pool_is_placed_on_the_ranks_of_the_job(tmp_path: Path) -> None:
    resolved = parse(tmp_path, "--strategy-pool", write_pool(tmp_path))
    assert names(resolved) == list(POOL)
    assert resolved.pool.tp_lcm == 4


@pytest.mark.parametrize("typed", [(), ("--ranks-per-node", "4")])
def test_without_a_launcher_the_pool_determines_the_nodes(
    typed: tuple[str, ...], tmp_path: Path
) -> None:
    pool = write_pool(tmp_path, ranks_per_node=4)
    resolved = parse(tmp_path, "--strategy-pool", pool, *typed)
    assert resolved.pool.ranks_per_node == 4


def test_strategies_may_have_context_parallelism(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, POOL | {"ring": "2*tp2cp2", "waves": "cp4~pp2"})
    assert names(parse(tmp_path, "--strategy-pool", pool)) == [*POOL, "ring", "waves"]


_REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("--strategy 8*tp1", {}, ["--strategy '8*tp1'", "pool.json", "give one of them"]),
    ("", {"num_ranks": 16, "strategies": {"a": "4*tp4"}}, ["for 16 ranks", "has 8", "start 16"]),
    ("--ranks-per-node 4", {}, ["8 ranks a node", "the job 4", "--ranks-per-node 8"]),
    ("", {"strategies": {"a": "9*tp1"}}, ["pool.json", "9 ranks but the job has 8"]),
    (
        "--padded-vocab-size 202",
        {"strategies": {"a": "8*tp1", "b": "2*tp4"}},
        ["padded vocabulary size", "tp 1, 4", "is 202", "multiple of 4", "--padded-vocab-size 204"],
    ),
    ("", {"strategies": {"a": "8*tp1", "b": "tp8"}}, ["'b'", "attention heads", "tp 8"]),
    (
        "--max-tokens-per-micro-batch 256",
        {"max_tokens": {"tp1": 512}},
        ["--max-tokens-per-micro-batch 256", "'short'", "also has max_tokens", "remove one"],
    ),
    ("--strategy-schedule short,wide", {}, ["'wide'", "its 3", "'short', 'long', 'mixed'"]),
    ("--strategy-schedule short,,long", {}, ["by commas", "'short,,long'", "for example"]),
    ("--regroup-owners-for wide", {}, ["--regroup-owners-for", "'wide'", "its 3", "'short'"]),
    (
        "--strategy-schedule short --replay-plans plans",
        {},
        ["--strategy-schedule short", "--replay-plans plans", "give one of them"],
    ),
]


@pytest.mark.parametrize(("typed", "pool", "says"), _REFUSED)
def test_what_contradicts_the_pool_is_refused(
    typed: str, pool: dict[str, Any], says: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(tmp_path, "--strategy-pool", write_pool(tmp_path, **pool), *typed.split())
    message = str(caught.value)
    for part in says:
        assert part in message
    assert "\n" not in message
    assert "; " in message


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--strategy-schedule short", "only with --strategy-pool, which is missing"),
        ("--regroup-owners-for short", "only with --strategy-pool, which is missing"),
        ("--plan-time-limit 0", "must be above 0 but is 0.0"),
        ("--plan-time-limit nan", "must be a number but is nan"),
        ("--strategy-pool nowhere.json", "pool file nowhere.json"),
    ],
)
def test_flags_that_need_a_pool(typed: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse(tmp_path, *typed.split())


def test_a_dry_run_needs_the_ranks_of_the_pool(tmp_path: Path) -> None:
    pool = write_pool(tmp_path)
    with pytest.raises(ConfigurationError, match="give --num-ranks 8, write a pool for 1, or"):
        parse(tmp_path, "--strategy-pool", pool, "--dry-run", num_ranks=1)
    typed = ("--strategy-pool", pool, "--dry-run", "--num-ranks", "8")
    assert names(parse(tmp_path, *typed, num_ranks=1)) == list(POOL)


# Cost profile and memory


def planning(
    folder: Path, *typed: str, pool: str | None = None, device: DeviceConstants | None = None
) -> Planning:
    resolved = parse(folder, "--strategy-pool", pool or write_pool(folder), *typed)
    return Planning.of(resolved, device or device_constants("cpu"), read_cost_profile(resolved))


def test_gradients_in_bf16_are_advised_where_batches_are_small(tmp_path: Path) -> None:
    device = device_constants("a100-80g")
    in_fp32 = planning(tmp_path, "--bf16", "--no-regroup-overlap", device=device)
    advice = in_fp32.bf16_advice(1.0)
    assert advice is not None
    assert advice.startswith("--grad-reduce-in-bf16 would save ")
    assert in_fp32.bf16_advice(1e12) is None
    in_bf16 = planning(
        tmp_path, "--bf16", "--no-regroup-overlap", "--grad-reduce-in-bf16", device=device
    )
    assert in_bf16.bf16_advice(1.0) is None
    for name in POOL:
        strategy = in_bf16.pool.strategy(name)
        before_ms, after_ms = (p.cost_model.overhead_ms(strategy) for p in (in_fp32, in_bf16))
        assert after_ms < before_ms


def test_a_profile_must_have_every_scheme(tmp_path: Path) -> None:
    profile = write_profile(tmp_path, tp1=512)
    with pytest.raises(ConfigurationError) as caught:
        planning(tmp_path, "--cost-profile", profile)
    for part in (profile, "tp4 of 'long', 'mixed'", "pp2 of 'mixed'", "has tp1", "; measure"):
        assert part in str(caught.value)


def test_a_profile_gives_times_and_limits(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, {"short": "8*tp1", "long": "2*tp4"}, max_tokens={"tp1": 99})
    profile = write_profile(tmp_path, tp1=512, tp4=2048)
    plan_with = planning(tmp_path, "--cost-profile", profile, pool=pool)
    assert plan_with.source == f"cost profile {profile}, d"
    limits = [plan_with.limits.max_tokens(s, s.schemes[0]) for s in plan_with.pool.strategies]
    assert limits == [99, 2048]


def test_every_strategy_has_an_overhead_measured_or_not(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, {"short": "8*tp1", "long": "2*tp4"})
    path = write_profile(tmp_path, tp1=512, tp4=2048)
    rows = [{"name": "S0", "replicas": "8*tp1", "regroup_ms": 40.0}]
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | {"strategies": rows}))

    def overheads_ms(*typed: str) -> list[float]:
        found = planning(tmp_path, *typed, pool=pool)
        return [found.cost_model.overhead_ms(strategy) for strategy in found.pool.strategies]

    of_short, of_long = overheads_ms()
    assert 0.0 < of_long < of_short
    assert overheads_ms("--no-regroup-overlap")[0] > of_short
    measured, computed = overheads_ms("--cost-profile", path)
    assert measured == 40.0
    # What was measured also scales what was not.
    assert computed > 0.0
    assert (computed < of_long) == (measured < of_short)


def test_a_profile_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path, tp1=512)
    typed = ("--strategy", "8*tp1", "--cost-profile", path)
    resolved = parse(tmp_path, *typed)
    old = read_cost_profile(resolved)
    assert old is not None
    assert "does not name the model" in capsys.readouterr().err
    assert read_cost_profile(parse(tmp_path, *typed, rank=1)) is not None
    # A profile of a model that is trained whole does not say so.
    new = replace(old, model=replace(profiled_model(resolved, "sdpa"), frozen=None))
    Path(path).write_text(json.dumps(new.to_json()))
    assert read_cost_profile(resolved) == new
    assert capsys.readouterr().err == "", "only rank 0 warns, and only of an old profile"
    for flags, difference in (
        (("--num-layers", "8"), "num_layers 4 instead of 8"),
        (("--vocab-size", "300"), "vocab_size 256 instead of 384"),
        (("--bf16",), "dtype fp32 instead of bf16"),
        (("--recompute-granularity", "selective"), "none instead of selective core_attn"),
    ):
        with pytest.raises(ConfigurationError, match=f"another one, with .*{difference};"):
            read_cost_profile(parse(tmp_path, *typed, *flags))
    with pytest.raises(ConfigurationError, match="core_attention sdpa instead of te;"):
        new.check_model(profiled_model(resolved, "te"), path, speaks=False)


def test_a_profile_of_more_ranks_is_only_for_elastic_jobs_and_given_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(tmp_path, tp1=512)
    typed = ("--cost-profile", path, "--strategy", "8*tp1")
    of_more_ranks = replace(
        ProfileCostModel.read(path), num_ranks=16, model=profiled_model(parse(tmp_path, *typed))
    )
    Path(path).write_text(json.dumps(of_more_ranks.to_json()))
    with pytest.raises(ConfigurationError, match="made for 16 ranks and this job has 8;"):
        read_cost_profile(parse(tmp_path, *typed, rank=1))
    assert read_cost_profile(parse(tmp_path, *typed, "--max-tokens-per-micro-batch", "255"))
    assert read_cost_profile(parse(tmp_path, *typed, "--elastic", rank=1))
    assert capsys.readouterr().err == ""
    assert read_cost_profile(parse(tmp_path, *typed, "--elastic"))
    assert "warning: cost profile" in capsys.readouterr().err


def test_a_given_limit_takes_precedence_over_the_profile(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, {"short": "8*tp1", "long": "2*tp4"})
    profile = write_profile(tmp_path, tp1=512, tp4=0)
    typed = ("--cost-profile", profile, "--max-tokens-per-micro-batch", "255")
    plan_with = planning(tmp_path, *typed, pool=pool)
    limits = [plan_with.limits.max_tokens(s, s.schemes[0]) for s in plan_with.pool.strategies]
    assert limits == [255, 252]


def test_a_given_limit_is_that_of_a_whole_wave(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, {"waves": "cp8~"})
    plan_with = planning(tmp_path, "--max-tokens-per-micro-batch", "1000", pool=pool)
    (strategy,) = plan_with.pool.strategies
    limit = partial(plan_with.limits.max_tokens, strategy)
    limits = {str(of): limit(of) for of in strategy.schemes[0].group_schemes}
    # Of a group's share, what is a multiple of twice its ranks.
    assert limits == {"cp8": 992, "cp4": 496, "cp2": 248, "tp1": 124}
    assert limit(strategy.schemes[0]) == 992


def small_device(memory_bytes: float) -> DeviceConstants:
    cpu = device_constants("cpu")
    return DeviceConstants(
        **{name: getattr(cpu, name) for name in cpu.__slots__}
        | {"memory_bytes": memory_bytes, "reserve_bytes": 0.0}
    )


def test_a_strategy_that_does_not_hold_the_model_is_skipped_with_numbers(tmp_path: Path) -> None:
    model = planning(tmp_path).cost_model
    assert isinstance(model, AnalyticCostModel)
    device = small_device(model.memory.state_bytes(Scheme(), 0))
    plan_with = planning(tmp_path, device=device)
    assert names(plan_with) == ["long", "mixed"]
    (line,) = plan_with.left_out
    assert "'short' is skipped" in line
    gigabytes = f"{device.memory_bytes / 1e9:.3g} GB"
    assert f"on tp1 it holds 0 in the {gigabytes} of a CPU rank (for GPUs, give --device" in line
    assert "of which 0 GB are kept free" in line
    assert f"take {gigabytes}" in line
    with pytest.raises(ConfigurationError, match=r"'short' is none of its 2 \(.*is skipped"):
        planning(tmp_path, "--strategy-schedule", "long,short", device=device)


def test_a_pool_without_a_strategy_that_holds_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'short' \(and in none of 2 others\): a micro"):
        planning(tmp_path, device=small_device(1e4))
    # The machine of a dry run need not be that of the job.
    in_dry_run = planning(tmp_path, "--dry-run", device=small_device(1e4))
    assert names(in_dry_run) == list(POOL)
    (line,) = in_dry_run.left_out
    assert line.startswith("training on CPUs would be refused: strategy 'short' (and in none of 2")
    too_small = write_profile(tmp_path, tp1=0, tp4=0)
    pool = write_pool(tmp_path, {"short": "8*tp1", "long": "2*tp4"})
    with pytest.raises(ConfigurationError, match="on tp1 it holds 0 by the cost profile"):
        planning(tmp_path, "--dry-run", "--cost-profile", too_small, pool=pool)


def test_the_longest_sequence_needs_one_strategy_that_holds_it(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, {"short": "8*tp1", "long": "2*tp4"})
    profile = write_profile(tmp_path, tp1=50, tp4=100)
    plan_with = planning(tmp_path, "--cost-profile", profile, pool=pool)
    plan_with.check_longest({"train": 100, "valid": 60})
    with pytest.raises(ConfigurationError) as caught:
        plan_with.check_longest({"train": 100, "valid": 101})
    for part in ("valid data trains 101", "the 2 strategies", "'long'", "more than 100"):
        assert part in str(caught.value)
    for typed, fix in (
        (("--cost-profile", profile), "--seq-length or give"),
        (("--max-tokens-per-micro-batch", "128"), "--seq-length, raise --max-tokens-per-micro"),
        ((), "--seq-length, train with --bf16 or give"),
        (("--bf16",), "--seq-length or give"),
    ):
        with pytest.raises(ConfigurationError, match=f"; lower {fix}"):
            planning(tmp_path, *typed, pool=pool).check_longest({"train": 10**15})
