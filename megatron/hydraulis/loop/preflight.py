"""Whether the ranks of a job can meet and talk, found out before they load anything.

Every rank tells what it is; then all ranks add up numbers and exchange blocks, the two kinds of
collective that training consists of, and each checks what it got. A step that some ranks do not
finish ends the process with an error that names them, where a training run would wait for its
timeout and say less.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["RankFacts", "check_alike", "check_collectives", "facts_of_this_rank", "meet"]

NUM_BYTES_A_RANK = 16 * 2**20
"""Sent by each rank in a collective: enough for its time to say something about the network."""
MAX_NAMED = 16
"""Ranks that an error names before it only counts the rest."""
EXIT_STATUS_OF_TIMEOUT = 3
_KEY = "hydraulis/preflight"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank runs on."""

    rank: int
    host: str
    python: str
    torch: str
    megatron_core: str
    device: str
    """Name of the GPU, or ``cpu``."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def facts_of_this_rank(rank: int, *, has_cuda: bool) -> RankFacts:
    """Facts of the calling process."""
    return RankFacts(
        rank=rank,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=torch.__version__,
        megatron_core=importlib.metadata.version("megatron-core"),
        device=torch.cuda.get_device_name() if has_cuda else "cpu",
    )


def check_alike(ranks: Sequence[RankFacts]) -> None:
    """Raise ConfigurationError unless all ranks have the same software and kind of device."""
    for field in fields(RankFacts):
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


def meet(facts: RankFacts, store: dist.Store, num_ranks: int, limit_s: float) -> list[RankFacts]:
    """The facts of all ranks, exchanged through the store; every rank gets them.

    Raises ConfigurationError that names the ranks that did not come within the limit.
    """
    store.set(f"{_KEY}/{facts.rank}", facts.to_json())
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
        RankFacts(**json.loads(store.get(f"{_KEY}/{rank}").decode())) for rank in range(num_ranks)
    ]


def check_collectives(device: torch.device, limit_s: float) -> dict[str, float]:
    """Collective: a sum over all ranks and an exchange of blocks among all ranks, checked.

    Returns:
        Seconds of each, the second of two runs, as the first one sets up connections.

    Raises:
        ConfigurationError: a rank got something else than what was sent.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_numbers = max(1, NUM_BYTES_A_RANK // 4 // num_ranks) * num_ranks
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


def initialise(limit_s: float, *, has_cuda: bool) -> list[RankFacts]:
    """Collective: the ranks meet, are compared, and make one process group.

    Raises ConfigurationError.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"preflight runs on ranks that torchrun started but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; run torchrun --nproc-per-node N "
            "-m megatron.hydraulis preflight"
        )
    if has_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = timedelta(seconds=limit_s)
    with _limited("the rendezvous", 2 * limit_s):
        store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
        ranks = meet(facts_of_this_rank(rank, has_cuda=has_cuda), store, num_ranks, limit_s)
        check_alike(ranks)
        dist.init_process_group(
            "nccl" if has_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timeout,
        )
    return ranks
