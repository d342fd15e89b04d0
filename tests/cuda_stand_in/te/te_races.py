"""Races between streams with layers and core attention of Transformer Engine, whose ring computes
on a second stream: the jobs of `race_jobs`, and one of them without waits of ours."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.orders import IN_SUITE, WITH_EXPERTS, OrderCase
from tests.cuda_stand_in.race_jobs import (
    CASES,
    WAITS,
    WHOLE_EXPERTS,
    races_of,
    races_with_peers,
)
from tests.cuda_stand_in.races import Race

pytestmark = pytest.mark.timeout(900)


def with_te(case: OrderCase, way: str | None = None) -> OrderCase:
    """The job with layers and core attention of Transformer Engine.

    Args:
        case: the job.
        way: how cp ranks exchange keys and values; None: the cheapest that the heads allow.
    """
    model = replace(case.model, core_attention="te", has_te_layers=True, cp_comm_type=way)
    return replace(case, model=model)


CUT_EXPERTS = OrderCase(("tp2cp2", "pp2+tp2", "tp2cp2ep4"), 4, model=WITH_EXPERTS)
"""By tp in some strategies."""
SHARED_ROWS = [case for case in CASES if any("cp" in text for text in case.strategies)]
MORE = (OrderCase(("tp2+2*tp1",), 4), OrderCase(("pp2+tp2",), 4))


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(with_te(case), id=case.name) for case in (*MORE, *CASES)),
        *(
            pytest.param(with_te(case, way), id=f"{case.name}, {way}")
            for case in SHARED_ROWS
            for way in ("p2p", "all_gather")
        ),
    ],
)
def test_jobs_have_no_races(case: OrderCase, tmp_path: Path) -> None:
    found = [race for of_rank in races_of(case, tmp_path) for race in of_rank]
    assert not [race for race in found if not _is_of_two_halves(race)], "\n".join(map(str, found))


@pytest.mark.parametrize(
    "case",
    [with_te(case) for case in (*WHOLE_EXPERTS, CUT_EXPERTS)],
    ids=lambda case: case.name,
)
def test_experts_have_no_races(case: OrderCase, tmp_path: Path) -> None:
    found = [race for of_rank in races_with_peers(case, tmp_path) for race in of_rank]
    assert not found, "\n".join(map(str, found))
    for rank in range(4):
        assert {"grouped_gemm", "grouped_gemm_accumulating"} <= marked_kernels(tmp_path, rank)


def marked_kernels(folder: Path, rank: int) -> set[str]:
    """Names of the kernels whose accesses are in the log of a rank."""
    return set(re.findall(r"MARK ACCESS \d+ (\w+)@", log_of(folder, rank).read_text()))


def _is_of_two_halves(race: Race) -> bool:
    """True for two copies of an all-gather's halves of segments into one tensor: each is marked as
    writing all of it, since a rank without peers has no borders that say which tokens it writes."""
    return all(
        access.what.startswith("thd_copy_valid_tokens@") for access in (race.earlier, race.later)
    )


@pytest.mark.parametrize("removed", WAITS)
def test_without_a_wait_of_ours_there_is_a_race(removed: str, tmp_path: Path) -> None:
    found = races_of(with_te(IN_SUITE[0]), tmp_path, removed)
    assert all(found), f"ranks without a race: {[i for i, races in enumerate(found) if not races]}"


@pytest.mark.parametrize("removed", WAITS)
def test_without_a_wait_of_ours_experts_race(removed: str, tmp_path: Path) -> None:
    found = races_with_peers(with_te(CUT_EXPERTS), tmp_path, removed)
    assert all(found), f"ranks without a race: {[i for i, races in enumerate(found) if not races]}"
