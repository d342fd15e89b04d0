"""The survey with a simulated rig: which points are measured, and resuming."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel
from megatron.hydraulis.cost_model.profile import ProfiledModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.profiler.measurements import (
    MAX_ATTEMPTS,
    GridPoint,
    MeasuredPoint,
    MeasuredStrategy,
    Measurements,
    RegroupSpeed,
    expected_peak_bytes,
    grid,
    profile_of,
    profile_tables,
    survey,
)
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B

TRUTH = Coefficients(a_ms_per_token2=1e-5, b_ms_per_token=0.01, c_ms=2.0)
POINTS = grid(1024, longest=1024, short=64, num_sizes=4)
SETUP = {"model_flags": ["--num-layers", "2"], "num_ranks": 1}
MODEL = ProfiledModel(shape=LLAMA_7B)
STATE_BYTES, BYTES_PER_TOKEN = 1000, 10


class Interrupted(Exception):
    """The process was killed."""


@dataclass
class SimulatedRig:
    """Times by TRUTH, on two stages of which the first is faster."""

    num_fitting_tokens: int = 10**9
    dies_at: int = -1
    """Number of the call during which the process dies."""
    calls: list[GridPoint] = field(default_factory=list)

    def run_point(self, scheme: str, point: GridPoint) -> MeasuredPoint:
        self.calls.append(point)
        if len(self.calls) - 1 == self.dies_at:
            raise Interrupted
        if point.num_tokens > self.num_fitting_tokens:
            return MeasuredPoint(scheme=scheme, point=point, why_not="out of memory")
        time_ms = TRUTH.time_ms(point.lengths)
        return MeasuredPoint(
            scheme=scheme,
            point=point,
            stage_ms=(0.5 * time_ms, time_ms),
            forward_ms=time_ms / 4,
            peak_bytes=STATE_BYTES + BYTES_PER_TOKEN * point.num_tokens,
        )


def surveyed(path: Path, rig: SimulatedRig, limit_bytes: int | None = None) -> list[MeasuredPoint]:
    measurements = Measurements(path, SETUP)
    return survey("tp1", POINTS, rig.run_point, measurements, limit_bytes=limit_bytes)


def profile(points: list[MeasuredPoint]) -> ProfileCostModel:
    names = {"device": "pretended", "source": "test", "date": "2026-01-02"}
    return profile_of(
        {Scheme(): points}, [], model=MODEL, num_ranks=1, setup=SETUP, has_host=False, **names
    )


def test_all_points_are_measured_and_the_slowest_stage_counts(tmp_path: Path) -> None:
    rig = SimulatedRig()
    points = surveyed(tmp_path / "m.jsonl", rig)
    assert rig.calls == list(POINTS)
    found = profile(points)
    times = found.coefficients(Scheme())
    assert times.time_ms([1024]) == pytest.approx(TRUTH.time_ms([1024]))
    assert found.max_tokens(Scheme()) == 1024
    note = found.measurement["schemes"]["tp1"]
    assert times.forward_share == note["forward_share"] == pytest.approx(0.25)
    assert note["peak_bytes"] == STATE_BYTES + BYTES_PER_TOKEN * 1024
    assert ProfileCostModel.from_json(json.loads(json.dumps(found.to_json())), what="p") == found


def test_few_tokens_take_the_time_of_the_host_if_it_has_a_device() -> None:
    host_ms, gap_ms = 8.0, 0.5
    points = [
        MeasuredPoint(
            scheme="tp1",
            point=point,
            stage_ms=(max(host_ms, TRUTH.time_ms(point.lengths)),),
            forward_ms=1.0,
            period_ms=gap_ms + max(host_ms, TRUTH.time_ms(point.lengths)),
        )
        for point in POINTS
    ]
    names = {"device": "d", "source": "s", "date": "x", "num_ranks": 1, "setup": {}}
    schemes = {Scheme(): points}
    found = profile_of(schemes, [], model=MODEL, has_host=True, **names)  # type: ignore[arg-type]
    times = found.coefficients(Scheme())
    assert times.host_ms == host_ms + gap_ms
    assert times.others == ()
    assert times.time_ms([1024]) == pytest.approx(TRUTH.time_ms([1024]))
    assert times.c_ms == pytest.approx(TRUTH.c_ms)
    num_bound = sum(TRUTH.time_ms(point.lengths) < host_ms for point in POINTS)
    note = found.measurement["schemes"]["tp1"]
    assert [form["num_points"] for form in note["forms"]] == [len(POINTS) - num_bound, num_bound]
    text = profile_tables(found)
    assert "host 8.5" in text
    on_cpu = profile_of(schemes, [], model=MODEL, has_host=False, **names)  # type: ignore[arg-type]
    assert on_cpu.coefficients(Scheme()).host_ms == 0.0


def test_a_rerun_continues_where_the_first_run_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = SimulatedRig(dies_at=5)
    with pytest.raises(Interrupted):
        surveyed(path, first)
    with path.open("a") as file:
        file.write('{"kind": "point", "sch')  # a line that was being written
    second = SimulatedRig()
    points = surveyed(path, second)
    assert second.calls == list(POINTS[5:])
    assert [point.point for point in points] == list(POINTS)
    assert points == surveyed(tmp_path / "other.jsonl", SimulatedRig())
    third = SimulatedRig()
    assert surveyed(path, third) == points
    assert third.calls == []


def test_a_point_that_repeatedly_ends_the_process_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    num_before = 7
    for _ in range(MAX_ATTEMPTS):
        # Killed at the same point: the first call after those that are on record.
        rig = SimulatedRig(dies_at=0 if path.exists() else num_before)
        with pytest.raises(Interrupted):
            surveyed(path, rig)
    points = surveyed(path, SimulatedRig())
    assert [point.fits for point in points] == [index < num_before for index in range(len(POINTS))]
    assert "attempts" in points[num_before].why_not
    # Another packing of the same size did fit: a limit has to hold for all of them.
    assert POINTS[num_before - 1].num_tokens == POINTS[num_before].num_tokens
    assert profile(points).max_tokens(Scheme()) == POINTS[num_before].num_tokens // 2


def test_a_point_that_does_not_fit_is_recorded_and_larger_ones_are_not_tried(
    tmp_path: Path,
) -> None:
    rig = SimulatedRig(num_fitting_tokens=300)
    points = surveyed(tmp_path / "m.jsonl", rig)
    tried = [point for point in POINTS if point.num_tokens <= 256]
    assert rig.calls[: len(tried)] == tried
    assert len(rig.calls) == len(tried) + 1
    assert {point.point.num_tokens for point in points if not point.fits} == {512, 1024}
    assert "out of memory" in points[len(tried)].why_not
    found = profile(points)
    assert found.max_tokens(Scheme()) == 256
    assert found.measurement["schemes"]["tp1"]["num_points_that_do_not_fit"] == len(points) - len(
        tried
    )


def test_what_is_expected_not_to_fit_is_not_tried(tmp_path: Path) -> None:
    rig = SimulatedRig()
    points = surveyed(tmp_path / "m.jsonl", rig, limit_bytes=STATE_BYTES + BYTES_PER_TOKEN * 600)
    assert max(point.num_tokens for point in rig.calls) == 512
    refused = [point for point in points if not point.fits]
    assert {point.point.num_tokens for point in refused} == {1024}
    assert "expected to take" in refused[0].why_not


def test_memory_is_extrapolated_from_the_two_largest_sizes() -> None:
    def at(num_tokens: int, peak_bytes: int) -> MeasuredPoint:
        point = GridPoint("any", (num_tokens,))
        return MeasuredPoint(scheme="tp1", point=point, stage_ms=(1.0,), peak_bytes=peak_bytes)

    assert expected_peak_bytes([at(1, 7)], 10) is None
    assert expected_peak_bytes([at(10, 900), at(20, 300), at(40, 700)], 60) == 1100
    assert expected_peak_bytes([at(20, 700), at(40, 300)], 60) == 300


def test_a_scheme_of_which_nothing_fits_is_skipped(tmp_path: Path) -> None:
    nothing = surveyed(tmp_path / "m.jsonl", SimulatedRig(num_fitting_tokens=0))
    with pytest.raises(ConfigurationError, match="at least 1 scheme"):
        profile(nothing)
    some = surveyed(tmp_path / "n.jsonl", SimulatedRig())
    both = profile_of(
        {Scheme(): some, Scheme(tp=2): nothing},
        [],
        model=MODEL,
        device="d",
        source="s",
        date="x",
        num_ranks=4,
        has_host=False,
        setup={},
    )
    assert both.num_ranks == 4
    assert [row.scheme for row in both.schemes] == [Scheme()]
    assert both.measurement["schemes"]["tp2"] == {"fits": False, "why_not": "out of memory"}


def test_another_setup_is_refused_unless_measurements_are_discarded(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    surveyed(path, SimulatedRig())
    with pytest.raises(ConfigurationError, match=r"num_ranks differs; give --restart"):
        Measurements(path, SETUP | {"num_ranks": 2})
    assert Measurements(path, SETUP | {"num_ranks": 2}, restart=True).num_found == 0
    path.write_text(path.read_text() + '{"kind": "point"}\n')
    with pytest.raises(ConfigurationError, match="not what this version writes"):
        Measurements(path, SETUP | {"num_ranks": 2})


def test_strategies_are_kept_and_regrouping_times_are_never_negative(tmp_path: Path) -> None:
    speed = RegroupSpeed(gather_bytes=8_000, gather_ms=2.0, scatter_bytes=0, scatter_ms=0.0)
    strategy = MeasuredStrategy(
        name="S", iteration_ms=10.0, makespan_ms=6.0, optimizer_ms=1.0, regroup=speed
    )
    file = Measurements(tmp_path / "m.jsonl", SETUP)
    file.add_strategy(strategy)
    assert Measurements(tmp_path / "m.jsonl", SETUP).strategies == {"S": strategy}
    assert strategy.regroup_ms == 3.0
    assert speed.to_json()["gather_bytes_per_s"] == pytest.approx(4e6)
    assert speed.to_json()["scatter_bytes_per_s"] is None
    quick = MeasuredStrategy(
        name="S", iteration_ms=6.5, makespan_ms=6.0, optimizer_ms=1.0, regroup=speed
    )
    assert quick.regroup_ms == 0.0
