"""The constants of the devices of a job, for the analytic cost model.

It imports no Megatron, so that preflight and planning on a node stay quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megatron.hydraulis.cost_model.device import (
    DeviceConstants,
    Precision,
    described_device,
    device_constants,
)
from megatron.hydraulis.errors import ConfigurationError

_NEAREST = {9: "h100", 10: "b200"}
"""By major compute capability, the device whose constants are nearest; of others the A100's."""


def constants_of_this_rank(
    *, has_cuda: bool, speaks: bool, named: str | None = None
) -> DeviceConstants:
    """Constants of this rank's current device for the analytic cost model.

    A GPU without documented constants gets those of the nearest generation: they rank strategies
    worse than measured ones would, but the memory limit is right.

    Args:
        has_cuda: whether the job runs on GPUs.
        speaks: whether this rank tells the user that predictions are not calibrated.
        named: the device to take instead, of a dry run.

    Raises ConfigurationError for an unknown name.
    """
    if named is not None:
        return device_constants(named)
    if not has_cuda:
        return device_constants("cpu")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    known = described_device(properties.name)
    nearest = _NEAREST.get(properties.major, "a100-80g")
    constants = dataclasses.replace(
        known or device_constants(nearest),
        memory_bytes=float(properties.total_memory),
    )
    if speaks and known is None:
        print(
            f"device '{properties.name}' has no constants of its own: times are predicted with "
            f"those of {constants.name} and are uncalibrated; memory, "
            f"{constants.memory_bytes / 1e9:.1f} GB, is the device's",
            flush=True,
        )
    return constants


def known_peak_flops_per_s(*, has_cuda: bool, precision: Precision) -> float | None:
    """FLOP/s of this rank's device by its data sheet; None of a CPU and an unknown GPU."""
    known = described_device(torch.cuda.get_device_name()) if has_cuda else None
    return None if known is None else known.peak(precision)


def common_constants(devices: Sequence[DeviceConstants]) -> DeviceConstants:
    """Constants for all ranks, with the smallest memory of any rank.

    Raises ConfigurationError for devices of several kinds, whose times one model cannot predict.
    """
    names = sorted({device.name for device in devices})
    if len(names) > 1:
        raise ConfigurationError(
            f"all ranks need one kind of device but {len(devices)} ranks have "
            f"{len(names)}: {', '.join(names)}; start the job on nodes of one kind"
        )
    return dataclasses.replace(
        devices[0], memory_bytes=min(device.memory_bytes for device in devices)
    )
