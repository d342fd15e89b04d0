"""``preflight``: whether the ranks of a job can communicate, before they load anything.

Every rank publishes what it runs on; then all ranks add up numbers and exchange blocks, the two
kinds of collective that training consists of, and each checks its result. A step that some ranks do
not finish ends the process with an error that names them, where training would wait for its timeout
and say less.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.hydraulis.errors import ConfigurationError, HydraulisError, counted, listed
from megatron.hydraulis.library.devices import constants_of_this_rank
from megatron.hydraulis.loop.startup import (
    MAX_NAMED,
    check_devices,
    check_launched,
    check_launcher_numbers,
    made_by_rank_0,
    meet,
)

NUM_BYTES_PER_RANK = 16 * 2**20
"""Bytes of a rank in a collective, enough for its time to say something about the network."""
EXIT_STATUS_OF_TIMEOUT = 3
_KEY = "hydraulis/preflight"
LEAST_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> of the oldest driver that runs it, by minor-version compatibility:
docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, read 2026-11-22."""
LEAST_SHARE_OF_USUAL = 0.25
"""Share of the usual network's rate of a device below which all pairs of nodes are reported."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_INFINIBAND_FOLDER = Path("/sys/class/infiniband")
_MATRIX_SIZE = {"cuda": 8192, "cpu": 512}
_NUM_PRODUCTS = 8
_NUM_EXCHANGES = 3
"""The fastest counts, as the first one sets up connections."""
LEAST_SHARE_OF_MEDIAN = 0.5
"""A GPU, or a pair of nodes, below this share of the median's rate is reported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``torchrun … -m megatron.hydraulis preflight``."""
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that each step may take (default: %(default)s)",
    )
    parser.add_argument(
        "--matrix-size",
        type=int,
        metavar="N",
        help="rows and columns of the matrices by whose products GPUs are compared, 0 for no "
        f"comparison (default: {_MATRIX_SIZE['cuda']}, on a CPU {_MATRIX_SIZE['cpu']})",
    )


def run(namespace: argparse.Namespace) -> int:
    """Run on every rank; raises ConfigurationError."""
    check_launcher_numbers()
    limit_s: float = namespace.timeout
    check_launched("preflight")
    if os.environ["LOCAL_RANK"] == "0":
        _warn(memory_lock_problem(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]))
    device = torch.device("cpu")
    problem = driver_problem(
        installed_driver(), torch.version.cuda, is_available=torch.cuda.is_available()
    )
    if problem is not None and os.environ.get("CUDA_VISIBLE_DEVICES", "all") != "":
        raise ConfigurationError(f"{socket.gethostname()}: {problem}")
    if torch.cuda.is_available():
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count())
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    own, hosts = _connect(device, limit_s)
    size = _MATRIX_SIZE[device.type] if namespace.matrix_size is None else namespace.matrix_size
    slowest_s = _check_rates(device, hosts, size, limit_s) if size else 0.0
    times_s = _check_collectives(device, limit_s)
    link_rates = _rates_between_nodes(device, hosts, limit_s)
    _check_links(link_rates)
    if dist.get_rank() == 0:
        counts = Counter(hosts)
        print(
            f"preflight: {len(hosts)} ranks on {counted(len(counts), 'host')} "
            f"({', '.join(f'{host}: {count}' for host, count in counts.items())}), "
            f"{own['device']}, torch {own['torch']}, megatron-core {own['megatron_core']}"
        )
        if size:
            print(
                f"preflight: products of {size} x {size} matrices in {slowest_s * 1e3:.1f} ms on "
                f"the slowest rank, {2 * size**3 / slowest_s / 1e12:.3g} TFLOP/s a rank"
            )
        for name, time_s in times_s.items():
            rate = NUM_BYTES_PER_RANK / time_s / 1e9
            print(
                f"preflight: {name} of {NUM_BYTES_PER_RANK / 2**20:g} MiB a rank in "
                f"{time_s * 1e3:.1f} ms, {rate:.2f} GB/s a rank",
                flush=True,
            )
        if device.type == "cuda":
            _warn(_slow_network(link_rates))
        for (one, other), rate in sorted(link_rates.items(), key=lambda item: item[1]):
            print(
                f"preflight: exchange between {one} and {other}, {rate:.2f} GB/s a rank",
                flush=True,
            )
    dist.destroy_process_group()
    return 0


Facts = dict[str, str | int]
"""Software and hardware of a rank, by name; the version is empty if it is not installed."""


def _connect(device: torch.device, limit_s: float) -> tuple[Facts, list[str]]:
    """Collective: the ranks meet, are compared, and make one process group.

    Returns:
        What this rank runs on, and the host of every rank.
    """
    has_cuda = device.type == "cuda"
    timeout = timedelta(seconds=limit_s)
    with _limited("the rendezvous", 2 * limit_s):
        store, rank, num_ranks = meet(timeout)
        own: Facts = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_core": _version_of("megatron-core"),
            "transformer_engine": _version_of("transformer-engine"),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda else "",
            "driver": installed_driver() or "",
            "device": torch.cuda.get_device_name() if has_cuda else "cpu",
            "device_memory_gib": (
                round(torch.cuda.get_device_properties(device).total_memory / 2**30)
                if has_cuda
                else 0
            ),
        }
        hosts = compare_ranks(own, store, rank, num_ranks)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )
    return own, hosts


def compare_ranks(own: Facts, store: dist.Store, rank: int, num_ranks: int) -> list[str]:
    """The host of every rank, after rank 0 has compared what the ranks run on.

    Only rank 0 reads what the others wrote. If all did, requests to the store would grow with the
    square of the number of ranks.

    Raises HydraulisError for ranks that do not answer within the store's timeout, and
    ConfigurationError that names those that differ.
    """
    store.set(f"{_KEY}/{rank}", json.dumps([socket.gethostname(), own]))

    def compared() -> str:
        keys = [f"{_KEY}/{rank}" for rank in range(num_ranks)]
        try:
            texts = store.multi_get(keys)
        except dist.DistStoreError as error:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise HydraulisError(
                f"preflight: all {num_ranks} ranks say what they run on but these did not: "
                f"{listed(silent, most=MAX_NAMED)}; see their logs, or raise --timeout"
            ) from error
        hosts, facts = zip(*map(json.loads, texts), strict=True)
        _check_equal(hosts, facts)
        return json.dumps(hosts)

    found: list[str] = json.loads(
        made_by_rank_0(compared, "preflight", "the comparison of ranks", rank=rank, store=store)
    )
    return found


def _check_equal(hosts: Sequence[str], facts: Sequence[Facts]) -> None:
    """Raise ConfigurationError unless all ranks have the same software and kind of device."""
    for name in facts[0]:
        values = [found[name] for found in facts]
        ((usual, count),) = Counter(values).most_common(1)
        odd = [
            f"rank {rank} on {hosts[rank]} has {value}"
            for rank, value in enumerate(values)
            if value != usual
        ]
        if odd:
            raise ConfigurationError(
                f"all ranks need the same {name} but {count} of {len(facts)} have {usual} and "
                f"{listed(odd, most=MAX_NAMED)}; use one environment and one kind of node"
            )


def installed_driver(path: Path = _DRIVER_FILE) -> str | None:
    """Version of this machine's NVIDIA driver, such as ``580.65.06``; None without one."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def driver_problem(driver: str | None, cuda: str | None, *, is_available: bool) -> str | None:
    """Says why torch cannot use the GPUs of a machine that has a driver; None if it can.

    Without this, the ranks of such a machine would quietly run on its CPU.

    Args:
        driver: from `installed_driver`.
        cuda: version of CUDA that torch is built for, such as ``13.0``; None for none.
        is_available: whether torch finds a GPU.
    """
    if driver is None or is_available:
        return None
    if cuda is None:
        return (
            f"there is an NVIDIA driver ({driver}) but torch is built without CUDA; install torch "
            "from its default index"
        )
    least = LEAST_DRIVERS.get(int(cuda.split(".")[0]))
    if least is not None and int(driver.split(".")[0]) < least:
        return (
            f"torch needs driver {least} or newer for CUDA {cuda} but this node has {driver}; "
            "update the driver, or take the node out of the job"
        )
    return (
        f"there is an NVIDIA driver ({driver}) but torch finds no GPU; see nvidia-smi, and give "
        "the job GPUs, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
    )


def memory_lock_problem(limit_bytes: int, adapters: Path = _INFINIBAND_FOLDER) -> str | None:
    """Says why NCCL may fail to register its buffers with this node's InfiniBand, else None.

    Args:
        limit_bytes: of memory that this process may lock; RLIM_INFINITY for no limit.
        adapters: folder with an entry for each adapter.
    """
    if limit_bytes == resource.RLIM_INFINITY or not any(adapters.glob("*")):
        return None
    return (
        f"{socket.gethostname()}: InfiniBand needs locked memory without a limit but a rank may "
        f"lock {limit_bytes} bytes (ulimit -l); set LimitMEMLOCK=infinity for slurmd"
    )


def _warn(problem: str | None) -> None:
    if problem is not None:
        print(f"warning: preflight: {problem}", file=sys.stderr, flush=True)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _of_all_ranks[Value](own: Value) -> list[Value]:
    """The value of every rank, without the runtime's import of megatron-core."""
    everyone: list[Value] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _check_rates(device: torch.device, hosts: Sequence[str], size: int, limit_s: float) -> float:
    """Collective: multiply matrices on every rank; raise ConfigurationError for a slow rank.

    Returns:
        Seconds of one product on the slowest rank.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best_s = math.inf
    for _ in range(_NUM_PRODUCTS):
        start_s = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - start_s)
    with _limited("comparing the ranks' speeds", limit_s):
        times_s = _of_all_ranks(best_s)
    slow = [f"rank {r} on {hosts[r]}: {times_s[r] * 1e3:.1f} ms" for r in slow_ranks(times_s)]
    # Ranks on CPUs share cores, so that one's time says little of its node.
    if slow and device.type == "cuda":
        raise ConfigurationError(
            f"all GPUs need the same speed but one product of {size} x {size} takes "
            f"{statistics.median(times_s) * 1e3:.1f} ms in the median and "
            f"{listed(slow, most=MAX_NAMED)}; look at clocks, temperature and other processes "
            "(nvidia-smi -q), or take the node out of the job"
        )
    return max(times_s)


def slow_ranks(times_s: Sequence[float]) -> list[int]:
    """Ranks slower than `LEAST_SHARE_OF_MEDIAN` times the median's rate, slowest first."""
    limit_s = statistics.median(times_s) / LEAST_SHARE_OF_MEDIAN
    return sorted(
        (rank for rank, time_s in enumerate(times_s) if time_s > limit_s),
        key=lambda rank: -times_s[rank],
    )


def _rates_between_nodes(
    device: torch.device, hosts: Sequence[str], limit_s: float
) -> dict[tuple[str, str], float]:
    """Collective: GB/s at which ranks of neighbouring nodes exchange a block, by the slowest rank.

    Each rank has a partner in the other node. There are two rounds, in which every node meets one
    other.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    own_rank = dist.get_rank()
    block = torch.zeros(NUM_BYTES_PER_RANK // 4, device=device)
    received = torch.empty_like(block)
    own_rates: dict[tuple[str, str], float] = {}
    for first in range(2):
        partners = {
            rank: (pair, sum(ranks) - rank)
            for pair in list(itertools.pairwise(ranks_of))[first::2]
            for ranks in zip(ranks_of[pair[0]], ranks_of[pair[1]], strict=False)
            for rank in ranks
        }
        pair, partner = partners.get(own_rank, (None, None))
        time_s = math.inf
        with _limited("the exchange between nodes", limit_s):
            for _ in range(_NUM_EXCHANGES):
                dist.barrier()
                if partner is not None:
                    start_s = time.perf_counter()
                    _exchange(block, received, partner)
                    time_s = min(time_s, time.perf_counter() - start_s)
        if pair is not None:
            own_rates[pair] = block.nbytes / time_s / 1e9
    rates: dict[tuple[str, str], float] = {}
    for found in _of_all_ranks(own_rates):
        for pair, rate in found.items():
            rates[pair] = min(rate, rates.get(pair, math.inf))
    return rates


def _exchange(block: torch.Tensor, received: torch.Tensor, partner: int) -> None:
    """Send a block to another rank and wait for its block."""
    sent = dist.P2POp(dist.isend, block, partner)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, received, partner)]):
        work.wait()
    received[-1].item()


def _check_links(rates: dict[tuple[str, str], float]) -> None:
    """Raise ConfigurationError that names slow pairs, and the node that they have in common."""
    median = statistics.median(rates.values() or [0.0])
    least = LEAST_SHARE_OF_MEDIAN * median
    slow = {pair: rate for pair, rate in rates.items() if rate < least}
    if slow:
        counts = Counter(host for pair in slow for host in pair)
        suspects = [host for host, count in counts.items() if count == max(counts.values())]
        named = listed([f"{a} and {b}: {rate:.2f}" for (a, b), rate in slow.items()], most=8)
        raise ConfigurationError(
            f"nodes must exchange at least {least:.2f} GB/s a rank (median {median:.2f}) but "
            f"{named}; check the network cards and cables of {listed(suspects, most=MAX_NAMED)} "
            "and NCCL_SOCKET_IFNAME or NCCL_IB_HCA, or take the node out of the job"
        )


def _slow_network(rates: dict[tuple[str, str], float]) -> str | None:
    """A warning if all links are slow, as over the wrong interface: then pairs do not differ."""
    constants = constants_of_this_rank(has_cuda=True, speaks=False)
    usual = constants.inter_node.bytes_per_s * constants.link_fraction / 1e9
    if not rates or statistics.median(rates.values()) >= LEAST_SHARE_OF_USUAL * usual:
        return None
    return (
        f"nodes of {constants.name} usually exchange {usual:.1f} GB/s a rank but these "
        f"{statistics.median(rates.values()):.2f}; is it the right interface? "
        "(NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ulimit -l)"
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
