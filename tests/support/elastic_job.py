"""A job under torchrun's own agent, whose ranks are forked: real restarts in a second or two.

What torchrun does besides parsing its command line is `elastic_launch`: rendezvous, start of the
ranks with their environment, watching them, ending all when one fails, starting all again. Here its
agent runs in a separate process, forked from one in which everything is imported.
"""

from __future__ import annotations

import logging
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
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability.records import read_metrics
from tests.support.forked_job import Program, _prepare_once, enter_rank, free_port

SHUTDOWN_S = 2
"""From the signal by which the agent ends a rank to SIGKILL, which also ends a frozen rank. Before
a restart torch 2.13 always waits 30 s."""
LAST_CALL_S = 10
"""Time for which agents wait for more nodes than they need."""
KEEP_ALIVE_S = 3
"""Between signs of life of an agent. Each is a write, after which another agent's write of what it
had read before is refused."""
NUM_KEEP_ALIVES = 5
"""An agent is lost after so many signs of life that did not come. With 3 s in all an agent that a
loaded machine delayed while the agents met was dropped, and the others waited 60 s for it."""
_START_LIMIT_S = 60.0


@dataclass(frozen=True)
class ElasticOutcome:
    """The end of a job, restarts included."""

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

    def ends_of_output(self) -> str:
        """Status, and the ends of what ranks and agent wrote."""
        agent = (self.folder / "agent").read_text(errors="replace")
        return f"--- status {self.status}\n{self.output()[-6000:]}\n--- agent\n{agent[-3000:]}"

    def assert_succeeded(self) -> None:
        """Fails with the end of the output."""
        assert self.status == 0, self.ends_of_output()


class ElasticJob:
    """A running job, as ``torchrun --nnodes 1:NUM_NODES --nproc-per-node NUM_RANKS`` starts it.

    Ranks see the number of their node as ``NODE_NUMBER``; node 0 has the rendezvous. Training
    begins on all nodes, however late one of them joins the others on a loaded machine.

    Args:
        argv: the flags.
        num_ranks: of each node; all of them are on this machine.
        folder: gets a folder ``nodeN`` with the output of each node.
        program: called with the flags on every rank; may be a closure.
        max_restarts: number of restarts after which a failure is final.
        num_nodes: started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        num_ranks: int,
        folder: Path,
        *,
        program: Program = entry.main,
        max_restarts: int,
        num_nodes: int = 1,
    ) -> None:
        _prepare_once()
        all_came = folder / "all_came"

        def program_on_all_nodes(argv: Sequence[str]) -> None:
            # Agents start ranks without a node that is late, and again when it joins.
            if int(os.environ["WORLD_SIZE"]) == num_nodes * num_ranks:
                all_came.touch()
            while not all_came.exists():
                time.sleep(0.1)
            program(argv)

        port = free_port()
        self._folders = [folder / f"node{number}" for number in range(num_nodes)]
        self._agents: list[Any] = []
        for number, each in enumerate(self._folders):
            each.mkdir(parents=True)
            agent = multiprocessing.get_context("fork").Process(
                target=_agent_main,
                args=(program_on_all_nodes, list(argv), num_ranks, each, max_restarts, port),
                kwargs={"number": number, "num_nodes": num_nodes},
            )
            agent.start()
            self._agents.append(agent)
            # The first agent to open the port has the rendezvous.
            deadline_s = time.monotonic() + _START_LIMIT_S
            while number == 0 and agent.is_alive() and not _is_open(port):
                if time.monotonic() > deadline_s:
                    self.close()
                    raise TimeoutError(f"no rendezvous within {_START_LIMIT_S:g} s")
                time.sleep(0.02)

    def outcomes(self, timeout_s: float) -> list[ElasticOutcome]:
        """The end of the job on each node; what still runs after so long is killed."""
        deadline_s = time.monotonic() + timeout_s
        for agent in self._agents:
            agent.join(max(0.0, deadline_s - time.monotonic()))
        statuses = [agent.exitcode for agent in self._agents]
        self.close()
        return [ElasticOutcome(*pair) for pair in zip(statuses, self._folders, strict=True)]

    def close(self) -> None:
        """Kill the agents with their ranks."""
        for agent in self._agents:
            if agent.is_alive():
                # It is the leader of the process group that its ranks belong to.
                os.killpg(agent.pid, signal.SIGKILL)
                agent.join()


def _is_open(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def losses_of(run_dir: Path, *, rel: float = 0.0) -> dict[int, float]:
    """Losses by iteration, from all starts of a run; one trained twice must give the same, to
    ``rel``."""
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
    *,
    number: int,
    num_nodes: int,
) -> None:
    os.setpgid(0, 0)
    os.environ["NODE_NUMBER"] = str(number)
    log = os.open(folder / "agent", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    # torch's own handler imports its compiler for the first exception, which takes a second.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.StreamHandler())
    elastic.propagate = False
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
        monitor_interval=0.1,
        start_method="fork",
        shutdown_timeout=SHUTDOWN_S,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "torchrun")),
    )
    # Agents record every step of their meeting with the name of the function, which Python finds by
    # looking through all modules: 0.2 s of CPU time here, where hundreds of tests have imported
    # theirs. On a loaded machine agents then never wrote before others had written again.
    dynamic_rendezvous.get_method_name = lambda depth=2: "step"
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
