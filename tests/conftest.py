"""What every test shares: one thread a process, hypothesis profiles, quiet logs, pools closed."""

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read when torch is first imported, by the tests below and by the workers forked from here: more
# threads than cores would only make gloo ranks wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
# As --disable-jit-fuser, the program's default without CUDA: each worker would compile for seconds.
os.environ["TORCH_COMPILE_DISABLE"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from tests.support.distributions import build_distributions

# No deadline and no complaint of slowness: both are statements about the machine's load.
common = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", common, max_examples=60)
settings.register_profile("nightly", common, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Upstream announces HybridModel at every GPTModel built, in every worker.
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)


@pytest.fixture(scope="session", autouse=True)
def _no_worker_left_behind() -> Iterator[None]:
    """Ends the gloo workers; asks `sys.modules`, as most tests never import torch."""
    yield
    gloo_pool = sys.modules.get("tests.support.gloo_pool")
    if gloo_pool is not None:
        gloo_pool.close_pools()


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The project's wheel and source distribution."""
    return build_distributions(tmp_path_factory.mktemp("distributions"))
