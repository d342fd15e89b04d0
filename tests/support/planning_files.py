"""The planning files of a small job, and a plan for it, as JSON."""

import json
from pathlib import Path
from typing import Any

from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool

LENGTHS = [3000, 1500, 900, 800, 700, 600, 600, 500, 400, 300, 200, 100]

POOL: dict[str, Any] = {
    "num_ranks": 8,
    "ranks_per_node": 4,
    "strategies": [
        {"name": "mixed", "replicas": "tp4+2*tp1pp2", "max_tokens": {"tp1pp2": 900}},
        {"name": "long", "replicas": "2*tp4"},
    ],
}

PROFILE: dict[str, Any] = {
    "device": "imagined",
    "source": "made for tests",
    "date": "2026-01-01",
    "schemes": [
        {
            "tp": 4,
            "cp": 1,
            "pp": 1,
            "a_ms_per_token2": 2e-5,
            "b_ms_per_token": 0.1,
            "c_ms": 20.0,
            "max_tokens": 4000,
        },
        {
            "tp": 1,
            "cp": 1,
            "pp": 2,
            "a_ms_per_token2": 4e-5,
            "b_ms_per_token": 0.15,
            "c_ms": 10.0,
            "max_tokens": 1000,
        },
    ],
    "strategies": [
        {"name": "mixed", "regroup_ms": 12.0, "optimizer_ms": 3.0},
        {"name": "long", "regroup_ms": 500.0},
    ],
}


def make_plan() -> dict[str, Any]:
    """A valid plan for this job as JSON; it uses the strategy 'mixed'."""
    model = ProfileCostModel.from_json(PROFILE, what="profile")
    return GreedyPlanner(Pool.from_json(POOL), model).plan(LENGTHS, iteration=5).to_json()


def write_files(folder: Path, *, plan: Any = None, **others: Any) -> list[str]:
    """Write the files, lengths, cost_profile and pool as given; returns the flags that name them.

    Without a plan there is no flag for one.
    """
    contents = {"lengths": LENGTHS, "cost_profile": PROFILE, "pool": POOL} | others
    if plan is not None:
        contents["plan"] = plan
    flags = []
    for name, content in contents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content))
        flags += ["--" + name.replace("_", "-"), str(path)]
    return flags
