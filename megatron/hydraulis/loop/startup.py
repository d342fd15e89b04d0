"""How the ranks of a job start: their devices, and the store in which they meet."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.errors import ConfigurationError, HydraulisError

__all__ = [
    "check_devices",
    "common_constants",
    "constants_of_this_rank",
    "fresh_store",
    "meet",
]

_CONSTANTS_BY_WORD = {"a100": "a100-80g", "a800": "a800-80g", "h100": "h100", "h200": "h200"}
"""Word of the name that CUDA gives a device -> constants. A GH200 or an H20 is none of these."""

_MAJOR_OF_HOPPER = 9
"""Compute capability from which the constants of H100 are nearer than those of A100."""

_PLACE = "hydraulis_store"
_NAME = "hydraulis_store_name"
_POLL_S = 0.05
_CONNECT_S = 5.0


def check_devices(num_ranks_of_node: int, num_devices: int) -> None:
    """Raise ConfigurationError unless every rank of this node has a GPU of its own."""
    if num_ranks_of_node > num_devices:
        raise ConfigurationError(
            f"every rank needs a GPU of its own but this node starts {num_ranks_of_node} ranks and "
            f"has {num_devices} GPUs; start {num_devices} ranks a node, or set "
            f"CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


def constants_of_this_rank(*, has_cuda: bool, speaks: bool) -> DeviceConstants:
    """Constants of this rank's current device for the analytic cost model.

    A GPU without documented constants gets those of the nearest generation: they rank strategies
    worse than measured ones would, but the memory limit is right.

    Args:
        has_cuda: whether the job runs on GPUs.
        speaks: whether this rank tells the user that predictions are not calibrated.
    """
    if not has_cuda:
        return device_constants("cpu")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    words = re.findall(r"[a-z0-9]+", properties.name.lower())
    known = [_CONSTANTS_BY_WORD[word] for word in words if word in _CONSTANTS_BY_WORD]
    nearest = "h100" if properties.major >= _MAJOR_OF_HOPPER else "a100-80g"
    constants = dataclasses.replace(
        device_constants(known[0] if known else nearest),
        memory_bytes=float(properties.total_memory),
    )
    if speaks and not known:
        print(
            f"device '{properties.name}' has no constants of its own: times are predicted with "
            f"those of {constants.name} and are uncalibrated; memory, "
            f"{constants.memory_bytes / 1e9:.1f} GB, is the device's",
            flush=True,
        )
    return constants


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


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """An unused store, this process's rank, and the number of ranks.

    Collective; reads torchrun's variables. Raises HydraulisError if rank 0 does not come.
    """
    raise_file_limit()
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store = fresh_store(store, os.environ["MASTER_ADDR"], rank, num_ranks, timeout)
    return store, rank, num_ranks


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows.

    The store of rank 0 has two connections to every rank, and the usual limit of 1,024 would end a
    job of 512 ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fresh_store(
    shared: dist.Store, host: str, rank: int, num_ranks: int, timeout: timedelta
) -> dist.Store:
    """A new store of rank 0, on this host, which the others find through the shared one.

    torchrun's agent keeps one store through all restarts, so a restarted rank could read what an
    earlier start has left in it: addresses of ranks that are gone, plans made for other ranks. The
    agents' restart counts cannot tell starts apart, because they differ between nodes when one of
    them joins later or only some saw their ranks fail. Therefore rank 0 opens its own store and
    publishes its address in the agent's; a rank that finds nothing at an old address reads again.
    """
    if rank == 0:
        own = dist.TCPStore(host, 0, num_ranks, True, timeout=timeout, wait_for_workers=False)
        name = uuid.uuid4().hex
        own.set(_NAME, name)
        shared.set(_PLACE, f"{own.port} {name}")
        return own
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        port, name = shared.get(_PLACE).decode().split()
        found = _open(host, int(port), name, num_ranks)
        if found is not None:
            found.set_timeout(timeout)
            return found
        time.sleep(_POLL_S)
    raise HydraulisError(
        f"rank {rank} waited {timeout.total_seconds():.0f} s for rank 0 on {host}, which did not "
        "come; see its log, or raise --distributed-timeout-minutes"
    )


def _open(host: str, port: int, name: str, num_ranks: int) -> dist.TCPStore | None:
    """The store at this address, if it has that name."""
    try:
        # First without torch, which retries for long and warns of every attempt.
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        store = dist.TCPStore(
            host,
            port,
            num_ranks,
            False,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        is_right = store.check([_NAME]) and store.get(_NAME).decode() == name
    except (OSError, RuntimeError):  # torch's errors of connections are RuntimeErrors
        return None
    return store if is_right else None
