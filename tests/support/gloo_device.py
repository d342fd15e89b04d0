"""One gloo device per process instead of one per process group."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

_Gloo: Any = ProcessGroupGloo


@cache
def share_gloo_device() -> None:
    """Let all groups of gloo in a process, and in its forks, use one device.

    Each device has a thread that wakes up every 10 ms. Those of the groups of idle pools would use
    a sixth of a core.
    """
    module: Any = distributed_c10d
    module._create_gloo_process_group = _create_group
    module._register_builtin_gloo_backend()


def _create_group(given: Any, _: object) -> Any:
    """Creates a group as torch does, with options."""
    options = _Gloo._Options()
    options._devices = [_device(os.getpid())]
    options._timeout = given.timeout
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = given.group_id
    return _Gloo(given.store, given.group_rank, given.group_size, options)


@cache
def _device(process: int) -> Any:
    """The device of this process: the thread of its parent's device does not survive a fork."""
    return _Gloo.create_default_device()
