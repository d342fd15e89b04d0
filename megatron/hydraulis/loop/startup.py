"""Start of a job's ranks: their devices, and the store in which they meet."""

from __future__ import annotations

import os
import pickle
import resource
import socket
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.hydraulis.errors import (
    ConfigurationError,
    HydraulisError,
    failure_of,
    listed,
    raise_first,
)

_PLACE = "hydraulis_store"
_NAME = "hydraulis_store_name"
_HERE, _ALL_HERE = "hydraulis_here", "hydraulis_all_here"
_POLL_S = 0.05
_CONNECT_S = 5.0
SECONDS_UNTIL_NOTICE = 10.0
"""Ranks wait for each other for this long before one says so."""
MAX_NAMED = 16
"""Ranks that an error names before it only counts the rest."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def check_devices(num_ranks_of_node: int, num_devices: int) -> None:
    """Raise ConfigurationError unless every rank of this node has a GPU of its own."""
    if num_ranks_of_node > num_devices:
        raise ConfigurationError(
            f"every rank needs a GPU of its own but this node starts {num_ranks_of_node} ranks and "
            f"has {num_devices} GPUs; start {num_devices} ranks a node, or set "
            f"CUDA_VISIBLE_DEVICES= to train on the CPU"
        )


# --- the launcher ---


def check_launched(command: str, *, otherwise: str = "") -> None:
    """Raise ConfigurationError unless a launcher has started this process.

    Args:
        command: that ranks run, for the message.
        otherwise: what else the user can do.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        num_ranks = os.environ.get("WORLD_SIZE") or max(1, torch.cuda.device_count())
        raise ConfigurationError(
            f"ranks are started by torchrun, which sets {len(LAUNCHER_VARIABLES)} variables, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; run torchrun "
            f"--standalone --nproc-per-node {num_ranks} --no-python hydraulis {command}{otherwise}"
        )


def check_launcher_numbers() -> None:
    """Raise ConfigurationError for a variable of the launcher that is not the number it has to be.

    Variables that are not set are not checked.
    """
    least = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name, str(least.get(name, 0)))
        if not text.isdecimal() or int(text) < least.get(name, 0):
            raise ConfigurationError(
                f"{name} is a whole number of at least {least.get(name, 0)} that the launcher sets "
                f"but is {text!r}; start ranks with torchrun, or correct it"
            )
    rank, num_ranks = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE"))
    if rank >= num_ranks > 0:
        raise ConfigurationError(
            f"ranks are numbered from 0 to {num_ranks - 1} as WORLD_SIZE is {num_ranks} but RANK "
            f"is {rank}; start ranks with torchrun, or correct one of them"
        )


# --- the store ---


def made_by_rank_0(
    make: Callable[[], str], option: str, what: str, *, rank: int, store: dist.Store | None
) -> str:
    """A text that rank 0 makes, on every rank.

    Args:
        make: called on rank 0 alone.
        option: which needs the text, and ``what`` it is, for messages.
        store: None if there are no other ranks.

    Raises:
        HydraulisError: rank 0's, on every rank; or rank 0 takes longer than the store waits.
        ConfigurationError: rank 0 raised an error that is not ours.
    """
    key = f"hydraulis_made_for_{option}"
    if rank == 0:
        text, failure = "", None
        try:
            text = make()
        except HydraulisError as error:
            failure = failure_of(error, option)
            raise
        finally:
            if store is not None:
                store.set(key, pickle.dumps((text, failure)))  # type: ignore[arg-type]  # bytes, too
        return text
    assert store is not None  # only rank 0 runs alone
    begin_s = time.monotonic()
    try:
        text, failure = pickle.loads(store.get(key))
    except RuntimeError as error:  # torch's errors of connections are RuntimeErrors
        raise HydraulisError(
            f"{option}: rank {rank} waited {time.monotonic() - begin_s:.0f} s for {what} of rank "
            f"0, which did not come; see its log, or raise the timeout"
        ) from error
    raise_first([failure], option)
    if not text:
        raise ConfigurationError(
            f"{option}: rank 0 makes {what} but rank {rank} got none; see the error of rank 0"
        )
    return text


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """An unused store, this process's rank, and the number of ranks; all ranks have come.

    Collective; reads torchrun's variables. If it takes long, rank 0 reports which ranks are
    missing, and the first rank of every other node that it waits for rank 0.

    Raises:
        ConfigurationError: rank 0 cannot use MASTER_PORT, or waits in vain for a rank.
        HydraulisError: another rank waits in vain.
    """
    raise_file_limit()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store: dist.Store
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        shared, _, _ = next(rendezvous("env://", timeout=timeout))
        store = fresh_store(shared, host, rank, num_ranks, timeout)
    elif rank == 0:
        try:
            store = dist.TCPStore(
                host, port, num_ranks, True, timeout=timeout, wait_for_workers=False
            )
        except RuntimeError as error:  # torch's errors of connections are RuntimeErrors
            reason = "in use" if "EADDRINUSE" in str(error) else str(error).splitlines()[0]
            raise ConfigurationError(
                f"rank 0 needs MASTER_PORT {port} of {host} but it cannot be used: {reason}; set "
                "MASTER_PORT to a free port, or let torchrun choose one by --standalone"
            ) from error
    else:
        store = _store_of_rank_0(
            lambda: _open(host, port, num_ranks), f"{host}:{port}", rank, timeout
        )
    _wait_for_all(store, f"{host}:{port}", rank, num_ranks, timeout)
    return store, rank, num_ranks


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows.

    The store of rank 0 has two connections to every rank, and the usual limit of 1,024 would end a
    job of 512 ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _wait_for_all(
    store: dist.Store, place: str, rank: int, num_ranks: int, timeout: timedelta
) -> None:
    """Collective: return once every rank is here. Only rank 0 asks for all ranks."""
    store.set(f"{_HERE}/{rank}", "")
    if rank != 0:
        try:
            store.wait([_ALL_HERE], timeout)
        except RuntimeError as error:
            raise HydraulisError(
                f"rank {rank} waited for all {num_ranks} ranks at {place}, which did not come "
                f"within {timeout.total_seconds():g} s, or rank 0 has ended; see the log of rank 0"
            ) from error
        return
    missing = list(range(num_ranks))
    wait = _Wait(timeout)
    while missing := [other for other in missing if not store.check([f"{_HERE}/{other}"])]:
        named = listed(missing, most=MAX_NAMED)
        if not wait.goes_on(
            f"rank 0 waits at {place} for {len(missing)} of {num_ranks} ranks: {named}; "
            "start them, or start fewer (WORLD_SIZE)"
        ):
            raise ConfigurationError(
                f"{num_ranks} ranks meet at {place} within {wait.limit_s:g} s but {len(missing)} "
                f"did not come: {named}; see the log of the nodes that they are on"
            )
    store.set(_ALL_HERE, "")


class _Wait:
    """A wait with a time limit; says once for what it waits."""

    def __init__(self, timeout: timedelta) -> None:
        self.limit_s = timeout.total_seconds()
        self._start_s = time.monotonic()
        self._speaks = int(os.environ.get("LOCAL_RANK", "0")) == 0

    def goes_on(self, message: str) -> bool:
        """Pause a moment; False once time is up."""
        waited_s = time.monotonic() - self._start_s
        if self._speaks and waited_s > SECONDS_UNTIL_NOTICE:
            self._speaks = False
            print(message, file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
        return waited_s < self.limit_s


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

    def find() -> dist.TCPStore | None:
        try:
            shared.wait([_PLACE], timedelta(seconds=1.0))  # fewer requests than to poll
        except RuntimeError:
            return None
        port, name = shared.get(_PLACE).decode().split()
        return _open(host, int(port), num_ranks, name)

    return _store_of_rank_0(find, host, rank, timeout)


def _store_of_rank_0(
    find: Callable[[], dist.TCPStore | None], place: str, rank: int, timeout: timedelta
) -> dist.TCPStore:
    """Calls find until it returns a store, and returns that."""
    wait = _Wait(timeout)
    while (found := find()) is None:
        if not wait.goes_on(f"rank {rank} waits for rank 0 at {place}"):
            raise HydraulisError(
                f"rank {rank} waited {wait.limit_s:.0f} s for rank 0 at {place}, which did not "
                "come; see its log, or raise --distributed-timeout-minutes"
            )
    found.set_timeout(timeout)
    return found


def _open(host: str, port: int, num_ranks: int, name: str | None = None) -> dist.TCPStore | None:
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
        is_right = name is None or (store.check([_NAME]) and store.get(_NAME).decode() == name)
    except (OSError, RuntimeError):  # torch's errors of connections are RuntimeErrors
        return None
    return store if is_right else None
