"""``torchrun … -m megatron.hydraulis preflight``: can the ranks of this job meet and talk."""

import argparse
import os
from collections import Counter

import torch
import torch.distributed as dist

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.loop.devices import check_devices
from megatron.hydraulis.loop.preflight import (
    NUM_BYTES_A_RANK,
    check_collectives,
    initialise,
)

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
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
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        num_ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        check_devices(num_ranks_of_node, torch.cuda.device_count())
    ranks = initialise(limit_s, has_cuda=has_cuda)
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    times_s = check_collectives(device, limit_s)
    if dist.get_rank() == 0:
        hosts = Counter(facts.host for facts in ranks)
        print(
            f"preflight: {len(ranks)} ranks on {len(hosts)} hosts "
            f"({', '.join(f'{host}: {count}' for host, count in hosts.items())}), "
            f"{ranks[0].device}, torch {ranks[0].torch}, megatron-core {ranks[0].megatron_core}"
        )
        for name, time_s in times_s.items():
            rate = NUM_BYTES_A_RANK / time_s / 1e9
            print(
                f"preflight: {name} of {NUM_BYTES_A_RANK / 2**20:g} MiB a rank in "
                f"{time_s * 1e3:.1f} ms, {rate:.2f} GB/s a rank",
                flush=True,
            )
    dist.destroy_process_group()
    return 0
