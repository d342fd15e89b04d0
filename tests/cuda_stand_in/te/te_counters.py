"""Waits of the host and launches with layers and core attention of Transformer Engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda_stand_in.counters import Case, Side, count
from tests.cuda_stand_in.test_counters import MOST_LAUNCHES, PACKED

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_the_host_waits_for_no_layer_and_no_micro_batch(tp: int, cp: int, tmp_path: Path) -> None:
    few = Case("ours", layers=2, tp=tp, cp=cp, lengths=PACKED, has_te=True)
    assert count(few, tmp_path).host_waits == 1
    assert count(replace(few, layers=4), tmp_path).host_waits == 1
    assert count(replace(few, micro_batches=3), tmp_path).host_waits == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_launches_no_more_than_a_local_one(tp: int, tmp_path: Path) -> None:
    def of_a_layer(has_te: bool) -> int:
        case = Case("ours", layers=2, tp=tp, micro_batches=8, has_te=has_te)
        more = count(replace(case, layers=4), tmp_path).num_launches
        return (more - count(case, tmp_path).num_launches) // 2

    ours, local = of_a_layer(True), of_a_layer(False)
    print(f"\ntp{tp}: {ours} launches against {local}")
    assert ours <= local


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["experts", "biases", "latents"])
def test_experts_and_latents_wait_and_launch_no_more_than_upstream(
    tp: int, kind: str, tmp_path: Path
) -> None:
    """Launches of a layer, and waits of an iteration: the dispatcher of experts waits in every
    layer, on both sides."""

    def of_layers(side: Side, *, has_te: bool = True) -> tuple[float, int]:
        case = Case(
            side,
            layers=2,
            tp=tp,
            micro_batches=8,
            fused_gradients=True,
            same_attention=True,
            has_te=has_te,
            has_experts=kind != "latents",
            has_biases=kind == "biases",
            has_latents=kind == "latents",
        )
        few, more = count(case, tmp_path), count(replace(case, layers=4), tmp_path)
        num_launches = (more.num_launches - few.num_launches) / (2 * case.micro_batches)
        return num_launches, more.host_waits

    ours, plain, local = of_layers("ours"), of_layers("plain"), of_layers("ours", has_te=False)
    print(f"\n{kind}, tp{tp}, launches and waits: {ours}, plain {plain}, local layers {local}")
    assert ours[0] <= MOST_LAUNCHES * plain[0]
    assert ours[1] <= plain[1]
    assert ours[0] < local[0]
