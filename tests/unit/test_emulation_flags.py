"""--emulate-device and --emulate-scale: what makes no sense is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.loop.emulated_run import Emulation

PROFILE = Path(__file__).parents[2] / "examples" / "cost_profile_llama32b_a800.json"


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_without_sense_is_refused(scale: float) -> None:
    with pytest.raises(ConfigurationError, match=r"--emulate-scale must be positive and finite"):
        HydraulisConfig(emulate_device=PROFILE, emulate_scale=scale)


def test_a_scale_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--emulate-scale 0\.5 .* no --emulate-device"):
        HydraulisConfig(emulate_scale=0.5)


def test_two_cost_profiles_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"--emulate-device .* and --cost-profile "):
        HydraulisConfig(emulate_device=PROFILE, cost_profile=PROFILE)


def test_a_rank_with_a_device_of_its_own_does_not_emulate_one() -> None:
    profile = ProfileCostModel.read(PROFILE)
    hydraulis = HydraulisConfig(emulate_device=PROFILE)
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        Emulation.of(hydraulis, profile, has_cuda=True)
    assert Emulation.of(hydraulis, profile, has_cuda=False) is not None


def test_without_the_flag_nothing_is_emulated() -> None:
    assert Emulation.of(HydraulisConfig(), None, has_cuda=True) is None
