"""The store in which the ranks of one start of a job meet: a new one at every start.

torchrun's agent keeps one store through all its restarts, and what an earlier start left in it
is read by the next one: addresses of ranks that are gone, plans that were made for other ranks. The
agents' count of restarts is no way out, as it differs between nodes when one of them joins later or
only some saw their ranks fail. Therefore rank 0 opens a store of its own and tells in the agent's
where it is; who reads there where an earlier one was finds nobody there and reads again.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.hydraulis.errors import HydraulisError

__all__ = ["fresh_store", "meet"]

_PLACE = "hydraulis_store"
_NAME = "hydraulis_store_name"
_POLL_S = 0.05
_CONNECT_S = 5.0


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """A store that nobody has used before, this process's rank, and the number of ranks.

    Collective, as the environment says. Raises HydraulisError where rank 0 does not come.
    """
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store = fresh_store(store, os.environ["MASTER_ADDR"], rank, num_ranks, timeout)
    return store, rank, num_ranks


def fresh_store(
    shared: dist.Store, host: str, rank: int, num_ranks: int, timeout: timedelta
) -> dist.Store:
    """A store of rank 0, on this host, that the others find through one that may be old."""
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
    """The store there, if it is the one of that name."""
    try:
        # First without torch, which tries for long and warns of every try.
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
        store = dist.TCPStore(
            host,
            port,
            num_ranks,
            False,
            timeout=timedelta(seconds=_CONNECT_S),
            wait_for_workers=False,
        )
        is_it = store.check([_NAME]) and store.get(_NAME).decode() == name
    except (OSError, RuntimeError):  # torch's errors of connections are RuntimeErrors
        return None
    return store if is_it else None
