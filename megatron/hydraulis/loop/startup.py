"""How the ranks of a job start: their devices, the store in which they meet, and ``preflight``.

``preflight`` checks whether ranks can communicate before they load anything. Every rank publishes
what it runs on; then all ranks add up numbers and exchange blocks, the two kinds of collective that
training consists of, and each checks its result. A step that some ranks do not finish ends the
process with an error that names them, where training would wait for its timeout and say less.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.errors import ConfigurationError, HydraulisError

__all__ = [
    "add_arguments",
    "check_devices",
    "common_constants",
    "constants_of_this_rank",
    "fresh_store",
    "meet",
    "run",
]

_CONSTANTS_BY_WORD = {"a100": "a100-80", "a800": "a800-80", "h100": "h100", "h200": "h200"}
"""Word of the name that CUDA gives a device -> constants. A GH200 or an H20 is none of these."""

_MAJOR_OF_HOPPER = 9
"""Compute capability from which the constants of H100 are nearer than those of A100."""

_PLACE = "hydraulis_store"
_NAME = "hydraulis_store_name"
_POLL_S = 0.05
_CONNECT_S = 5.0

NUM_BYTES_PER_RANK = 16 * 2**20
"""Sent by each rank in a collective: enough for its time to say something about the network."""
MAX_NAMED = 16
"""Ranks that an error names before it only counts the rest."""
EXIT_STATUS_OF_TIMEOUT = 3
_KEY = "hydraulis/preflight"
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


# --- devices ---


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
    nearest = "h100" if properties.major >= _MAJOR_OF_HOPPER else "a100-80"
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


# --- the store ---


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """An unused store, this process's rank, and the number of ranks.

    Collective; reads torchrun's variables. Raises HydraulisError if rank 0 does not come.
    """
    store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store = fresh_store(store, os.environ["MASTER_ADDR"], rank, num_ranks, timeout)
    return store, rank, num_ranks


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


# --- preflight ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``torchrun … -m megatron.hydraulis preflight``."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that each step may take (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run on every rank; raises ConfigurationError."""
    limit_s: float = namespace.timeout
    if not limit_s > 0:
        raise ConfigurationError(
            f"--timeout is a number of seconds above 0 but is {limit_s:g}; give a larger one"
        )
    missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"preflight runs on ranks that torchrun started but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; run torchrun --nproc-per-node N "
            "-m megatron.hydraulis preflight"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    ranks = _connect(device, limit_s)
    times_s = _check_collectives(device, limit_s)
    if dist.get_rank() == 0:
        hosts = Counter(facts.host for facts in ranks)
        print(
            f"preflight: {len(ranks)} ranks on {len(hosts)} hosts "
            f"({', '.join(f'{host}: {count}' for host, count in hosts.items())}), "
            f"{ranks[0].device}, torch {ranks[0].torch}, megatron-core {ranks[0].megatron_core}"
        )
        for name, time_s in times_s.items():
            rate = NUM_BYTES_PER_RANK / time_s / 1e9
            print(
                f"preflight: {name} of {NUM_BYTES_PER_RANK / 2**20:g} MiB a rank in "
                f"{time_s * 1e3:.1f} ms, {rate:.2f} GB/s a rank",
                flush=True,
            )
    dist.destroy_process_group()
    return 0


@dataclass(frozen=True, slots=True)
class _RankFacts:
    """What one rank runs on."""

    rank: int
    host: str
    python: str
    torch: str
    megatron_core: str
    device: str
    """Name of the GPU, or ``cpu``."""


def _connect(device: torch.device, limit_s: float) -> list[_RankFacts]:
    """Collective: the ranks meet, are compared, and make one process group."""
    has_cuda = device.type == "cuda"
    timeout = timedelta(seconds=limit_s)
    with _limited("the rendezvous", 2 * limit_s):
        store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
        own = _RankFacts(
            rank=rank,
            host=socket.gethostname(),
            python=platform.python_version(),
            torch=torch.__version__,
            megatron_core=importlib.metadata.version("megatron-core"),
            device=torch.cuda.get_device_name() if has_cuda else "cpu",
        )
        ranks = _exchange_facts(own, store, num_ranks, limit_s)
        _check_equal(ranks)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )
    return ranks


def _exchange_facts(
    facts: _RankFacts, store: dist.Store, num_ranks: int, limit_s: float
) -> list[_RankFacts]:
    """The facts of all ranks, exchanged through the store; every rank gets them.

    Raises ConfigurationError that names the ranks that did not come within the limit.
    """
    store.set(f"{_KEY}/{facts.rank}", json.dumps(dataclasses.asdict(facts)))
    deadline_s = time.monotonic() + limit_s
    missing = list(range(num_ranks))
    while missing := [rank for rank in missing if not store.check([f"{_KEY}/{rank}"])]:
        if time.monotonic() > deadline_s:
            named = ", ".join(map(str, missing[:MAX_NAMED]))
            more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
            raise ConfigurationError(
                f"{num_ranks} ranks meet within {limit_s:g} s but {len(missing)} did not come: "
                f"{named}{more}; see the log of the nodes that they are on"
            )
        time.sleep(0.05)
    return [
        _RankFacts(**json.loads(store.get(f"{_KEY}/{rank}").decode())) for rank in range(num_ranks)
    ]


def _check_equal(ranks: Sequence[_RankFacts]) -> None:
    """Raise ConfigurationError unless all ranks have the same software and kind of device."""
    for field in dataclasses.fields(_RankFacts):
        if field.name in ("rank", "host"):
            continue
        counts = Counter(getattr(facts, field.name) for facts in ranks)
        if len(counts) > 1:
            usual = counts.most_common(1)[0][0]
            odd = [facts for facts in ranks if getattr(facts, field.name) != usual]
            named = ", ".join(
                f"rank {facts.rank} on {facts.host} has {getattr(facts, field.name)}"
                for facts in odd[:MAX_NAMED]
            )
            more = f" and {len(odd) - MAX_NAMED} more" if len(odd) > MAX_NAMED else ""
            raise ConfigurationError(
                f"all ranks need the same {field.name} but {counts[usual]} of {len(ranks)} have "
                f"{usual} and {named}{more}; use one environment and one kind of node"
            )


def _check_collectives(device: torch.device, limit_s: float) -> dict[str, float]:
    """Collective: a sum over all ranks and an exchange of blocks among all ranks, checked.

    Returns:
        Seconds of each, the second of two runs, as the first one sets up connections.

    Raises:
        ConfigurationError: a rank got something else than what was sent.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_numbers = max(1, NUM_BYTES_PER_RANK // 4 // num_ranks) * num_ranks
    own = torch.full((num_numbers,), float(rank + 1), device=device)
    times_s: dict[str, float] = {}
    for _ in range(2):
        with _limited(f"all_reduce among {num_ranks} ranks", limit_s):
            total = own.clone()
            start_s = time.perf_counter()
            dist.all_reduce(total)
            smallest, largest = total.min().item(), total.max().item()
            times_s["all_reduce"] = time.perf_counter() - start_s
        expected = num_ranks * (num_ranks + 1) / 2
        if not smallest == largest == expected:
            raise _damaged("all_reduce", rank, expected, smallest, largest)
        with _limited(f"all_to_all among {num_ranks} ranks", limit_s):
            received = torch.empty_like(own)
            start_s = time.perf_counter()
            dist.all_to_all_single(received, own)
            sums = received.view(num_ranks, -1).double().mean(dim=1).tolist()
            times_s["all_to_all"] = time.perf_counter() - start_s
        for sender, got in enumerate(sums):
            if got != sender + 1:
                raise _damaged(f"all_to_all from rank {sender}", rank, sender + 1, got, got)
    return times_s


def _damaged(
    what: str, rank: int, expected: float, smallest: float, largest: float
) -> ConfigurationError:
    return ConfigurationError(
        f"{what}: rank {rank} on {socket.gethostname()} should have got {expected:g} everywhere "
        f"but got {smallest:g} to {largest:g}; take this node or its network card out of the job"
    )


@contextmanager
def _limited(what: str, limit_s: float) -> Iterator[None]:
    """End the process with one line unless the block ends in time.

    A collective that waits in native code can be ended in no other way that works for every
    backend.
    """

    def give_up() -> None:
        rank = os.environ.get("RANK", "0")
        print(
            f"error: {socket.gethostname()}, rank {rank}: {what} has not ended within "
            f"{limit_s:g} s; the ranks met, so look at the network between nodes: set "
            "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to the interface that joins them, "
            "NCCL_DEBUG=INFO shows more",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_STATUS_OF_TIMEOUT)

    timer = threading.Timer(limit_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
