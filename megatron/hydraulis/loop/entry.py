"""A run from its command line to its exit status."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from megatron.hydraulis.quiet_imports import without_garbage_collection

with without_garbage_collection():
    import torch
    import torch.distributed as dist

    from hydraulis_patches.cpu_backend import apply_cpu_backend
    from megatron.hydraulis.command_line import reader_has_gone
    from megatron.hydraulis.errors import HydraulisError
    from megatron.hydraulis.flags.arguments import (
        parse_arguments,
        parse_without_pool,
        wants_proposal,
    )
    from megatron.hydraulis.flags.checks import check_data_files
    from megatron.hydraulis.loop.faults import (
        end_process,
        lost_connection,
        quieten_upstream,
        report_error,
        report_interrupt,
        report_lost_connection,
        report_unexpected_error,
    )
    from megatron.hydraulis.loop.hugging_face import FolderOfRun
    from megatron.hydraulis.loop.job import Job, UserHooks
    from megatron.hydraulis.loop.memory_safety import use_expandable_segments
    from megatron.hydraulis.loop.sft_data import convert_data
    from megatron.hydraulis.loop.startup import (
        check_devices,
        check_launched,
        check_launcher_numbers,
        meet,
    )

__all__ = ["UserHooks", "main"]

_WITHOUT_RANKS = frozenset({"--dry-run", "--help", "-h"})
"""Options with which one process that no launcher has started is enough."""
EXIT_STATUS_OF_ERROR = 2
EXIT_STATUS_OF_UNFORESEEN_ERROR = 1
"""Python's exit status of an uncaught exception."""
EXIT_STATUS_OF_INTERRUPT = 130
"""128 + SIGINT, as shells report it."""
_TIMEOUT_OF_PROPOSAL = timedelta(minutes=10)
"""Ranks wait at least so long for each other and for the pool of --strategy-pool auto."""
RESTART_COUNTS = {
    "Slurm has queued this job again": "SLURM_RESTART_COUNT",
    "torchrun has started the ranks again": "TORCHELASTIC_RESTART_COUNT",
}
"""Text for each kind of restart -> the variable that counts restarts."""


_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable of the hardware queues of a GPU, which CUDA reads when it starts."""


def set_hardware_queues(words: Sequence[str]) -> None:
    """Set the hardware queues of a GPU, unless the user has.

    With one queue upstream's linear layers overlap messages of tp with weight gradients (before
    Blackwell), but nothing except the update hides gathers; with 32 no stream need share one. So it
    is 1 if a strategy has tp or strategies are still to be proposed, else 32, as the cost model
    assumes (`RegroupCosts.for_pool`). docs/regrouping.md has the price of either.

    words: command line of training, not yet checked, or what a profile measures.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in ("--strategy-pool --pool", "--strategy", "--tensor-model-parallel-size"):
        parser.add_argument(*names.split(), nargs="?", const="", default="")
    given, _ = parser.parse_known_args(words)
    pool, tp = given.strategy_pool, given.tensor_model_parallel_size
    text = f"{given.strategy} tp{tp} "
    if os.path.isfile(pool) and os.access(pool, os.R_OK):
        text += Path(pool).read_text(errors="replace")
    has_tp = pool == "auto" or re.search(r"tp([2-9]|1\d)", text) is not None
    if not os.environ.get(_QUEUES):
        os.environ[_QUEUES] = "1" if has_tp else "32"


def main(argv: Sequence[str] | None = None, hooks: UserHooks | None = None) -> None:
    """Train with the given flags; exits with status 2 and one line if they are wrong.

    Once ranks have met, the process of a rank that raises ends at once, with status 1 and a
    traceback if the error is not one of ours. SIGINT ends a rank with status 130.
    """
    try:
        _run_to_its_end(argv, hooks or UserHooks())
    except KeyboardInterrupt:  # which may also come while an error is handled
        report_interrupt()
        end_process(EXIT_STATUS_OF_INTERRUPT)


def _run_to_its_end(argv: Sequence[str] | None, hooks: UserHooks) -> None:
    try:
        _run(argv, hooks)
    except HydraulisError as error:
        ranks_have_met = dist.is_initialized()
        report_error(error, ranks_have_met=ranks_have_met)
        if ranks_have_met:
            end_process(EXIT_STATUS_OF_ERROR)
        sys.exit(EXIT_STATUS_OF_ERROR)
    except Exception as error:
        if not dist.is_initialized():
            raise
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            print("error: nobody reads the log any more; write it to a file", file=sys.stderr)
        elif lost_connection(error) is not None:
            report_lost_connection(error)
        else:
            report_unexpected_error(error)
        end_process(EXIT_STATUS_OF_UNFORESEEN_ERROR)


def _run(argv: Sequence[str] | None, hooks: UserHooks) -> None:
    check_launcher_numbers()
    words = sys.argv[1:] if argv is None else argv
    set_hardware_queues(words)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        use_expandable_segments()
    else:
        apply_cpu_backend()
    rank = int(os.environ.get("RANK", "0"))
    quieten_upstream(rank)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if not _WITHOUT_RANKS.intersection(words):
        # Before the flags, which would be wrong for a job of this process alone.
        check_launched("train FLAGS", otherwise=", or add --dry-run")
    folder = FolderOfRun.named_in(words)
    if folder is None:
        _start(words, hooks, rank, num_ranks, has_cuda=has_cuda)
        return
    with folder.blamed_for_its_flags(words):
        _start([*folder.flags, *words], hooks, rank, num_ranks, folder, has_cuda=has_cuda)


def _start(
    words: Sequence[str],
    hooks: UserHooks,
    rank: int,
    num_ranks: int,
    folder: FolderOfRun | None = None,
    *,
    has_cuda: bool,
) -> None:
    """Run a complete command line."""
    met, pool = None, None
    if wants_proposal(words):
        from megatron.hydraulis.loop.auto_pool import pool_of_job  # slow to import

        resolved = parse_without_pool(words, num_ranks=num_ranks, rank=rank)
        if resolved.hydraulis.dry_run:
            check_data_files(resolved.args)
        else:
            timeout = timedelta(minutes=resolved.args.distributed_timeout_minutes)
            met = meet(max(timeout, _TIMEOUT_OF_PROPOSAL))
        store = None if met is None else met[0]
        if resolved.args.sft:
            convert_data(resolved.args, resolved.hydraulis.run_dir, store)
        pool = pool_of_job(resolved, has_cuda=has_cuda, store=store)
        if store is not None:
            store.set_timeout(timeout)
    resolved = parse_arguments(words, num_ranks=num_ranks, rank=rank, proposed_pool=pool)
    args = resolved.args
    if folder is not None:
        folder.check(resolved)
    if resolved.hydraulis.dry_run:
        Job(resolved, hooks, has_cuda=has_cuda).print_description()
        return
    if args.sft:
        met = met or meet(timedelta(minutes=args.distributed_timeout_minutes))
        convert_data(args, resolved.hydraulis.run_dir, met[0])
    if has_cuda:
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), torch.cuda.device_count())
        torch.cuda.set_device(args.local_rank)
    if rank == 0:
        _warn_of_restart(save=args.save, loads=args.load is not None)
    job = Job(resolved, hooks, has_cuda=has_cuda)
    job.choose_core_attention()
    corpora = job.load_corpora()
    job.check_longest(corpora)
    job.make_folders()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store, rank, num_ranks = met or meet(timeout)
    dist.init_process_group(
        args.distributed_backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    try:
        job.train(corpora, store)
    except SystemExit:  # how upstream's loop ends upon an exit condition
        dist.destroy_process_group()
        raise
    # After any other exception ranks may still be in a collective, so the groups stay: see `main`.
    dist.destroy_process_group()


def _warn_of_restart(*, save: str | None, loads: bool) -> None:
    """Warn that a run restarted by Slurm or torchrun begins with iteration 1."""
    if loads:
        return
    flags = f"--load {shlex.quote(save)}" if save else "--save DIR --load DIR"
    for who, variable in RESTART_COUNTS.items():
        count = os.environ.get(variable, "")
        if count.isdigit() and int(count) > 0:
            print(
                f"warning: {who} (restart {count}) but there is no --load, so training starts "
                f"again from iteration 1; give {flags} to go on from the latest checkpoint",
                file=sys.stderr,
                flush=True,
            )
