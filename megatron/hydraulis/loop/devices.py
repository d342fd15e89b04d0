"""The devices of a job: enough of them, and what the analytic cost model takes them for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import torch

from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["check_devices", "common_constants", "constants_of_gpu", "constants_of_this_rank"]

_CONSTANTS_BY_WORD = {"a100": "a100-80", "a800": "a800-80", "h100": "h100", "h200": "h200"}
"""Word of the name that CUDA gives a device -> constants. A GH200 or an H20 is none of these."""

_MAJOR_OF_HOPPER = 9
"""Compute capability from which the constants of H100 are nearer than those of A100."""


def check_devices(num_ranks_of_node: int, num_devices: int) -> None:
    """Raise ConfigurationError unless every rank of this node has a GPU of its own."""
    if num_ranks_of_node > num_devices:
        raise ConfigurationError(
            f"every rank needs a GPU of its own but this node starts {num_ranks_of_node} ranks and "
            f"has {num_devices} GPUs; start {num_devices} ranks a node, or set "
            f"CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def constants_of_gpu(
    name: str, memory_bytes: int, compute_capability_major: int
) -> tuple[DeviceConstants, bool]:
    """Constants of a GPU, with the memory it really has, and whether they are its own.

    A GPU without documented constants is not refused: it gets those of the nearest generation,
    which rank strategies worse than measured ones would, but bound memory rightly.

    Args:
        name: as CUDA gives it, such as ``NVIDIA A100-SXM4-40GB``.
        memory_bytes: all of the device's memory.
        compute_capability_major: 8 for Ampere and Ada, 9 for Hopper, more for later ones.
    """
    known = [
        _CONSTANTS_BY_WORD[word]
        for word in re.findall(r"[a-z0-9]+", name.lower())
        if word in _CONSTANTS_BY_WORD
    ]
    nearest = "h100" if compute_capability_major >= _MAJOR_OF_HOPPER else "a100-80"
    constants = device_constants(known[0] if known else nearest)
    return dataclasses.replace(constants, memory_bytes=float(memory_bytes)), bool(known)


def constants_of_this_rank(*, has_cuda: bool, speaks: bool) -> DeviceConstants:
    """What the analytic cost model takes this rank's current device for.

    Args:
        has_cuda: whether the job runs on GPUs.
        speaks: whether this rank tells the user that predictions are not calibrated.
    """
    if not has_cuda:
        return device_constants("cpu")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    constants, is_own = constants_of_gpu(properties.name, properties.total_memory, properties.major)
    if speaks and not is_own:
        print(
            f"device '{properties.name}' has no constants of its own: times are predicted with "
            f"those of {constants.name} and are uncalibrated; memory, "
            f"{constants.memory_bytes / 1e9:.1f} GB, is the device's",
            flush=True,
        )
    return constants


def common_constants(devices: Sequence[DeviceConstants]) -> DeviceConstants:
    """One device for the whole job, equal on every rank: the smallest memory of all ranks'.

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
