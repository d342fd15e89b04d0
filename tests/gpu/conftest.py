"""Every test of this folder needs a CUDA device and is skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
REASON = "needs a CUDA device, and there is none; run scripts/gpu_checks.sh where there is"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them, also those that a later file adds."""
    mine = [item for item in items if FOLDER in item.path.parents]
    if not mine:
        return
    import torch

    has_cuda = torch.cuda.is_available()
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if not has_cuda:
            item.add_marker(pytest.mark.skip(reason=REASON))
