"""A job under torchrun's own agent, whose ranks are forked: real restarts in a second or two.

What torchrun does besides parsing its command line is `elastic_launch`: rendezvous, start of the
ranks with their environment, watching them, ending all when one fails, starting all again. Here its
agent runs in a separate process, forked from one in which everything is imported.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability.records import read_metrics
from tests.support.forked_job import Program, _prepare_once, enter_rank, free_port

SHUTDOWN_S = 2
"""From the signal by which the agent ends a rank to SIGKILL, which also ends a frozen rank. Before
a restart torch 2.13 always waits 30 s."""
LAST_CALL_S = 2
"""Time for which agents wait for more nodes than they need."""
KEEP_ALIVE_S = 1
"""Between signs of life of an agent."""
NUM_KEEP_ALIVES = 15
"""An agent is lost after so many signs of life that did not come. With 3 an agent that a loaded
machine delayed while the agents met was dropped, and the others waited 60 s for it."""


@dataclass(frozen=True)
class ElasticOutcome:
    """How a job ended, restarts included."""

    status: int | None
    """Of the agent; None if it hung."""
    folder: Path

    def output(self, name: str = "*") -> str:
        """Output of ranks, restart by restart: of the files ``restart0.rank1.stdout`` and so on."""
        paths = sorted(self.folder.glob(f"restart{name}"))
        return "".join(path.read_text(errors="replace") for path in paths)

    @property
    def num_starts(self) -> int:
        return len({path.name.split(".")[0] for path in self.folder.glob("restart*.rank*")})

    def assert_succeeded(self) -> None:
        """Fails with the end of the output."""
        assert self.status == 0, (
            f"status {self.status}\n{self.output()[-6000:]}\n"
            + ((self.folder / "agent").read_text()[-3000:])
        )


def run_elastic_job(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    program: Program = entry.main,
    max_restarts: int,
    timeout_s: float,
) -> ElasticOutcome:
    """Run ``program(argv)`` as ``torchrun --nproc-per-node num_ranks --max-restarts …`` would.

    Args:
        argv: the flags.
        num_ranks: on this machine.
        folder: where each rank's output is kept.
        program: called on every rank; may be a closure.
        max_restarts: number of restarts after which a failure is final.
        timeout_s: for the whole job; then agent and ranks are killed.
    """
    agent = _start_agent(argv, num_ranks, folder, program, max_restarts, free_port(), 1)
    agent.join(timeout_s)
    status = agent.exitcode
    if status is None:
        _kill(agent)
    return ElasticOutcome(status, folder)


def run_elastic_nodes(
    argv: Sequence[str],
    num_nodes: int,
    folder: Path,
    *,
    lost: int,
    after: str,
    max_restarts: int,
    timeout_s: float,
) -> list[ElasticOutcome]:
    """As ``torchrun --nnodes 1:num_nodes`` on as many nodes of one rank each, one of which is lost.

    Training begins on all nodes, however late one of them joins the others on a loaded machine.

    Args:
        argv: the flags.
        num_nodes: all of them here; the output of each is in a separate folder.
        folder: of these folders.
        lost: number of the node that is killed with its rank; not 0, which has the rendezvous.
        after: text on any rank's output upon which that happens.
        max_restarts: of every agent.
        timeout_s: for the whole job.
    """
    port = free_port()
    folders = [folder / f"node{number}" for number in range(num_nodes)]
    all_came = folder / "all_came"

    def program(argv: Sequence[str] | None) -> None:
        # Agents start ranks without a node that is late, and again when it joins.
        if int(os.environ["WORLD_SIZE"]) == num_nodes:
            all_came.touch()
        elif not all_came.exists():
            time.sleep(timeout_s)
        entry.main(argv)

    agents: list[Any] = []
    deadline_s = time.monotonic() + timeout_s
    is_lost = False
    try:
        for each in folders:
            agents.append(_start_agent(argv, 1, each, program, max_restarts, port, num_nodes))
            # The first agent to open the port has the rendezvous.
            while not agents[0].exitcode and not _is_open(port) and time.monotonic() < deadline_s:
                time.sleep(0.05)
        while time.monotonic() < deadline_s and any(agent.is_alive() for agent in agents):
            if not is_lost and any(after in ElasticOutcome(0, each).output() for each in folders):
                _kill(agents[lost])
                is_lost = True
            time.sleep(0.05)
        statuses = [agent.exitcode for agent in agents]
    finally:
        for agent in agents:
            if agent.is_alive():
                _kill(agent)
    return [ElasticOutcome(*pair) for pair in zip(statuses, folders, strict=True)]


def _start_agent(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    program: Program,
    max_restarts: int,
    port: int,
    num_nodes: int,
) -> Any:
    _prepare_once()
    folder.mkdir(parents=True, exist_ok=True)
    agent = multiprocessing.get_context("fork").Process(
        target=_agent_main,
        args=(program, list(argv), num_ranks, folder, max_restarts, port, num_nodes),
    )
    agent.start()
    return agent


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _kill(agent: Any) -> None:
    """With its ranks: it is the leader of the process group that they belong to."""
    os.killpg(agent.pid, signal.SIGKILL)
    agent.join()


def losses_of(run_dir: Path, *, rel: float = 0.0) -> dict[int, float]:
    """By iteration, from all starts of a run; one trained twice must give the same, to ``rel``."""
    losses: dict[int, float] = {}
    for folder in (*sorted(run_dir.glob("earlier.*")), run_dir):
        for record in read_metrics(folder):
            assert record.lm_loss is not None
            before = losses.setdefault(record.iteration, record.lm_loss)
            is_same = math.isclose(before, record.lm_loss, rel_tol=rel, abs_tol=0.0)
            assert is_same, f"iteration {record.iteration} has another loss"
    return losses


def _agent_main(
    program: Program,
    argv: list[str],
    num_ranks: int,
    folder: Path,
    max_restarts: int,
    port: int,
    num_nodes: int,
) -> None:
    os.setpgid(0, 0)
    log = os.open(folder / "agent", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    # As scripts/slurm/job.sh does it: otherwise agents that have once started ranks without a node
    # send them to an outdated store when it joins (docs/faults.md).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(num_nodes > 1))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=num_nodes,
        nproc_per_node=num_ranks,
        run_id=f"test{port}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={
            "last_call_timeout": LAST_CALL_S,
            "keep_alive_interval": KEEP_ALIVE_S,
            "keep_alive_max_attempt": NUM_KEEP_ALIVES,
        },
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.05,
        start_method="fork",
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")),
    )
    join = ProcessContext._join_procs_with_timeout

    def join_for_less(processes: ProcessContext, timeout: float) -> None:
        join(processes, min(timeout, SHUTDOWN_S))

    ProcessContext._join_procs_with_timeout = join_for_less  # type: ignore[method-assign,assignment]
    status = 0
    try:
        elastic_launch(config, _rank_main)(program, argv, folder)
    except BaseException as error:
        print(type(error).__name__, error, flush=True)
        status = 1
    sys.stdout.flush()
    os._exit(status)


def _rank_main(program: Program, argv: list[str], folder: Path) -> None:
    rank = os.environ["RANK"]
    # The agent counts restarts; a frozen rank may still hold the file of the previous one.
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    enter_rank(argv, folder, f"restart{restart}.rank{rank}")
    started_s = time.time()
    try:
        program(argv)
    finally:
        print(f"RANK {rank} ran for {time.time() - started_s:.2f} s", flush=True)
        sys.stdout.flush()
        sys.stderr.flush()
