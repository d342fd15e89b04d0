"""A run on an emulated device: what the flags mean, and how well the times were kept."""

from __future__ import annotations

import sys

import torch.distributed as dist

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.runtime.emulation import (
    EmulatedBatch,
    EmulatedDevice,
    EmulatedForwardStep,
    EmulationCount,
)
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.strategy import Scheme


class Emulation:
    """The emulated device of a run and, once training begins, its forward step."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._forward_step: EmulatedForwardStep | None = None

    @classmethod
    def of(
        cls, hydraulis: HydraulisConfig, profile: ProfileCostModel | None, *, has_cuda: bool
    ) -> Emulation | None:
        """What --emulate-device asks for; None without it.

        profile: its cost profile, scaled.

        Raises ConfigurationError where ranks have CUDA devices.
        """
        if hydraulis.emulate_device is None:
            return None
        assert profile is not None
        if has_cuda:
            raise ConfigurationError(
                f"--emulate-device {hydraulis.emulate_device}: a rank that sleeps for a device has "
                f"none of its own but CUDA devices are visible; set CUDA_VISIBLE_DEVICES='' or "
                f"remove --emulate-device"
            )
        return cls(EmulatedDevice(profile, hydraulis.emulate_scale))

    @property
    def notice(self) -> str:
        """What whoever reads the log has to know."""
        return self._device.notice

    def shorten(self, batch: PackedBatch, scheme: Scheme) -> EmulatedBatch:
        """What a replica of a scheme really runs for a micro-batch."""
        return self._device.shorten(batch, scheme)

    def around(self, forward_step: ForwardStep) -> ForwardStep:
        """The forward step, taking the modelled time."""
        self._forward_step = EmulatedForwardStep(forward_step)
        return self._forward_step

    def report_overruns(self) -> None:
        """Collective: rank 0 says how often modelled times were too short for the tiny tensors."""
        assert self._forward_step is not None
        counts: list[EmulationCount] = [EmulationCount()] * dist.get_world_size()
        dist.all_gather_object(counts, self._forward_step.count)
        num_overruns = sum(count.num_overruns for count in counts)
        if num_overruns and dist.get_rank() == 0:
            num_operations = sum(count.num_operations for count in counts)
            overrun_s = sum(count.overrun_s for count in counts)
            print(
                f"warning: emulated device: {num_overruns} of {num_operations} forwards and "
                f"backwards took longer than their modelled time, by {overrun_s:.3g} s over all "
                f"ranks; raise --emulate-scale or take fewer layers",
                file=sys.stderr,
                flush=True,
            )
