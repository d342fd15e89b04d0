"""Memory of real roles with layers and core attention of Transformer Engine, compared with the
memory model by the same bounds as with local layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model.context import te_all_to_all_refusal
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.trained_model import Recompute
from tests.cuda_stand_in.role_memory import Role
from tests.cuda_stand_in.test_memory import FEW, MANY_EXPERTS, MORE, SHARED_EXPERTS, check

pytestmark = pytest.mark.timeout(900)


def with_te(role: Role) -> Role:
    """The role with Transformer Engine, as a ring if its all-to-all cannot divide the heads."""
    shape, tp = role.shape, role.scheme.tp
    size = role.context_size or role.scheme.cp
    heads, groups = shape.num_attention_heads // tp, shape.num_query_groups // tp
    can_exchange = te_all_to_all_refusal(heads, groups, size) is None
    return replace(role, has_te=True, cp_comm_type=role.cp_comm_type if can_exchange else "p2p")


def runs_on(role: Role) -> bool:
    """True if its core attention takes the role, and the reference computations its norms."""
    can_attend = role.precision is Precision.BF16 and role.softmax_type == "vanilla"
    has_window_over_ring = role.shape.num_windowed_layers > 0 and role.scheme.cp > 1
    return can_attend and not has_window_over_ring and not role.has_wide_norms


AGAIN = Recompute(granularity="selective", modules=("layernorm", "moe_act"))
RECOMPUTED = [
    Role(shape=MANY_EXPERTS, strategy="4*tp2cp4ep8pp2", recompute=AGAIN),
    Role(shape=SHARED_EXPERTS, strategy="16*tp4", recompute=AGAIN),
]
"""What layers of megatron-core do not recompute."""


@pytest.mark.parametrize(
    "role", [with_te(role) for role in (*RECOMPUTED, *FEW, *MORE) if runs_on(role)], ids=str
)
def test_a_run_at_its_limit_takes_what_is_predicted(role: Role) -> None:
    print(check(role))
