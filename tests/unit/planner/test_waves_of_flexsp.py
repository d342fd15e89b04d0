"""Waves in FlexSP's setting: a 7B model on 64 ranks, sequences of up to 192K tokens."""

import json
from typing import Any

from benchmarks.inputs import DATA
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

NUM_RANKS, RANKS_PER_NODE = 64, 8
USABLE_MB, MB_PER_GB, BYTES_PER_MB = 30 * 1024, 1024, 2**20
STATE_BYTES, ACTIVATION_BYTES = 16, 2
NUM_ALL_TO_ALLS = 8
"""Of a layer's hidden states, forward and backward: 4·2 in the published formula."""


def published_profile(reference: dict[str, Any], model: str) -> ProfileCostModel:
    """The published time and memory model; a group of d ranks is a scheme cp d.

    ``(a1·Σs² + a2·Σs) / d + b1 + all-to-all`` ms; a rank has room for what 30 GB leave after
    ZeRO-3's states.
    """
    constants = reference["models"][model]
    states_mb = constants["P_192K"] * STATE_BYTES * MB_PER_GB / NUM_RANKS
    tokens_per_rank = (USABLE_MB - states_mb) / constants["act_MB_per_token"]
    hidden_mb = constants["layers"] * constants["hidden"] * ACTIVATION_BYTES / BYTES_PER_MB
    rows = []
    for width in (1, 2, 4, 8, 16, 32, 64):
        exchange_ms = 0.0
        if width > 1:
            rate = reference["alltoall_MB_per_ms"][str(width)]
            exchange_ms = NUM_ALL_TO_ALLS * hidden_mb / width / rate
        times = Coefficients(
            constants["a1"] / width, constants["a2"] / width + exchange_ms, constants["b1"]
        )
        rows.append(
            ProfiledScheme(
                scheme=Scheme(cp=width), coefficients=times, max_tokens=int(tokens_per_rank * width)
            )
        )
    return ProfileCostModel(
        device="A100-40GB", source=reference["source"], date="2024", schemes=tuple(rows)
    )


def test_a_batch_takes_at_most_6_percent_more_than_its_bound() -> None:
    reference = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))
    batch = json.loads((DATA / "flexsp_batches.json").read_text("utf-8"))["batches"][0]
    strategy = Strategy.parse(f"cp{NUM_RANKS}~", NUM_RANKS, ranks_per_node=RANKS_PER_NODE)
    profile = published_profile(reference, "gpt-7b")
    plan = CertifiedPlanner(Pool.of(strategy), profile).plan(batch)
    assert plan.dispatch is not None
    assert plan.dispatch.bound_s <= plan.predicted_time_s <= 1.06 * plan.dispatch.bound_s
