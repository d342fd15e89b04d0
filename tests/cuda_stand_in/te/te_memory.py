"""Memory of real roles with layers and core attention of Transformer Engine, compared with the
memory model, which does not know its layers.

Kernels are replaced by functions that allocate what they return, without workspaces.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cuda_stand_in.lone_ranks import run_alone
from tests.cuda_stand_in.role_memory import Role, measure
from tests.cuda_stand_in.test_memory import (
    DEVICE,
    DEVICE_SETTINGS,
    FEW,
    GIB,
    MOST_OVERESTIMATED,
    model_of,
)

pytestmark = pytest.mark.timeout(900)

MOST_UNDERESTIMATED = 0.025
"""Of the predicted peak: a product's workspace, a gradient that nobody reads for each shape of
weight, and what a recomputed layer keeps longer than a local one."""


# Its all-to-all needs as many query groups as ranks.
@pytest.mark.parametrize(
    "role", [replace(role, has_te=True, cp_comm_type="p2p") for role in FEW], ids=str
)
def test_a_run_at_its_limit(role: Role) -> None:
    model = model_of(role)
    num_tokens = model.max_tokens(role.scheme)
    assert num_tokens
    predicted = model.peak_bytes(role.scheme, role.stage, num_tokens)
    (found,) = run_alone(
        measure,
        role,
        num_tokens,
        num_ranks=role.num_ranks,
        ranks=[role.rank],
        **DEVICE_SETTINGS,
    )
    row = (
        f"{role!s:<48} {num_tokens:>8,} {predicted / GIB:6.2f} {found.peak_bytes / GIB:6.2f} "
        f"{found.device_bytes / GIB:6.2f}"
    )
    print(row)
    assert found.peak_bytes <= (1 + MOST_UNDERESTIMATED) * predicted, row
    assert predicted <= (1 + MOST_OVERESTIMATED) * found.peak_bytes, row
    assert found.device_bytes <= DEVICE.memory_bytes, row
