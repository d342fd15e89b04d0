"""The Slurm scripts on a real Slurm: two nodes, both this machine, started for the test.

Not part of the suite, as it needs Debian's packages slurm-wlm and munge: `make slurm-test`. Because
of its name pytest does not collect it by default.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.tiny_corpus import tiny_command, write_corpus

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
LIMIT_S = 240.0
"""For every wait; a loaded machine takes a minute to start four ranks."""

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and a corpus to train on."""

    folder: Path
    prefix: str

    def run(self, *command: str, **environment: str) -> str:
        """Standard output of a command that must succeed."""
        result = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def environment(self, **more: str) -> dict[str, str]:
        """Of a login shell for this cluster."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return own | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "EXIT_GRACE_S": "60",
            **more,
        }

    def submit(self, job: str, *flags: str, options: str = "", **environment: str) -> Job:
        """Submit a job script of this project on two nodes of two ranks."""
        run_dir = self.folder / job
        identifier = self.run(
            *("sbatch", "--parsable", "--nodes", "2", "--gpus-per-node", "2"),
            *("--cpus-per-task", "2", "--output", f"{run_dir}.log", *shlex.split(options)),
            str(SCRIPTS / "pretrain_gpt.sbatch"),
            *tiny_command(self.prefix, run_dir, *flags),
            **environment,
        )
        return Job(self, identifier.strip(), run_dir, Path(f"{run_dir}.log"))


@dataclass(frozen=True)
class Job:
    """A submitted job."""

    cluster: Cluster
    identifier: str
    run_dir: Path
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def shown(self, name: str) -> str:
        """A field of `scontrol show job`."""
        fields = self.cluster.run("scontrol", "show", "job", "--oneliner", self.identifier)
        found = re.search(rf"\b{name}=(\S+)", fields)
        assert found is not None, fields
        return found[1]

    def wait(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not happen\n{self.text}"
            time.sleep(0.5)

    def wait_for_state(self, *states: str) -> str:
        self.wait(f"state {states}", lambda: self.shown("JobState") in states)
        return self.shown("JobState")

    def wait_for_iteration(self, iteration: int, *, after: str = "") -> None:
        """Wait until an iteration is in the log after the last occurrence of a text."""
        self.wait(
            f"iteration {iteration} after {after!r}",
            lambda: bool(re.search(rf"{after}(?s:.*)iteration +{iteration}/", self.text)),
        )

    @property
    def num_saved(self) -> int:
        """Iterations of the latest checkpoint; 0 without one."""
        latest = self.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
        return int(latest.read_text()) if latest.exists() else 0

    def kill_rank(self, rank: int, start: int) -> None:
        """As the kernel does if a process uses too much memory."""
        log = (self.run_dir / "logs" / f"start-{start}" / f"rank-{rank:04}.log").read_text()
        os.kill(int(re.findall(r"^--- .*, process (\d+),", log, re.MULTILINE)[-1]), signal.SIGKILL)

    def losses(self) -> dict[int, float]:
        """Loss of each iteration, over all starts of the job."""
        found = {}
        for path in (*sorted(self.run_dir.glob("earlier.*/metrics.jsonl")), self.metrics):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if "lm_loss" in record:
                    found[record["iteration"]] = record["lm_loss"]
        return found

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # A short path: that of munge's socket is limited.
    folder = Path(tmp_path_factory.mktemp("slurm"))
    prefix = write_corpus(folder / "corpus" / "tiny")
    script = str(SCRIPTS / "local_cluster.sh")
    subprocess.run(["bash", script, "start", str(folder)], check=True, timeout=60)
    try:
        yield Cluster(folder, prefix)
    finally:
        subprocess.run(["bash", script, "stop", str(folder)], check=True, timeout=60)
        shutil.rmtree(folder / "spool", ignore_errors=True)


def test_a_killed_warned_and_cancelled_job_has_the_losses_of_an_undisturbed_one(
    cluster: Cluster,
) -> None:
    # Long enough that training is still running when it is ended. The pre-flight of the second
    # start must not load the checkpoint.
    endless = ("--train-iters", "1000000", "--log-interval", "1")
    job = cluster.submit("ended", *endless, SAVE_INTERVAL="5")

    # A rank dies in the first start: torchrun restarts from the checkpoint of this start.
    job.wait("a checkpoint", lambda: job.num_saved > 0)
    job.kill_rank(1, start=0)
    loaded = re.compile(r"loaded \S+: (\d+) iterations")
    job.wait("a restart", lambda: bool(loaded.search(job.text)))
    num_loaded = int(loaded.findall(job.text)[0])
    assert num_loaded % 5 == 0 < num_loaded
    job.wait_for_iteration(num_loaded + 1, after="loaded ")

    # Slurm sends the warning signal: the ranks save, and the job is requeued under its number.
    cluster.run("scancel", "--signal=USR1", "--batch", job.identifier)
    job.wait("the requeue", lambda: job.shown("Restarts") == "1")
    assert "ended with status 0 after SIGUSR1" in job.text
    saved = re.search(r"at iteration (\d+), saved up to (\d+): requeueing", job.text)
    assert saved is not None, job.text
    assert saved[1] == saved[2]
    last = int(saved[1]) + 3
    job.wait_for_iteration(last, after=f"loaded .*: {saved[1]} iterations")
    assert (job.run_dir / "logs" / "start-1" / "rank-0003.log").is_file()

    # Cancelled, it ends and is not requeued.
    cluster.run("scancel", job.identifier)
    job.wait_for_state("CANCELLED")
    job.wait("the end", lambda: not cluster.run("squeue", "--noheader").strip())
    assert job.shown("Restarts") == "1"
    left = subprocess.run(
        ["pgrep", "--full", "--list-full", f"run-dir {job.run_dir}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert left.stdout == ""

    # No iteration is missing, and none has another loss.
    whole = cluster.submit("whole", *endless, "--exit-interval", str(last), CHECKPOINT_DIR="")
    assert whole.wait_for_state("COMPLETED", "FAILED") == "COMPLETED", whole.text
    assert "pre-flight 3 of 3" in whole.text
    assert "preflight: 4 ranks on " in whole.text
    for rank in range(4):
        lines = (whole.run_dir / "logs" / "start-0" / f"rank-{rank:04}.log").read_text()
        assert f"rank {rank} on " in lines
    losses = job.losses()
    assert sorted(losses)[:last] == sorted(whole.losses()) == list(range(1, last + 1))
    assert {i: losses[i] for i in range(1, last + 1)} == whole.losses()


def test_preflight_stops_a_job_whose_flags_are_wrong_before_any_rank_starts(
    cluster: Cluster,
) -> None:
    job = cluster.submit("wrong", "--strategy", "tp8")
    assert job.wait_for_state("COMPLETED", "FAILED") == "FAILED"
    assert "strategy 'tp8': 1 replica uses 8 ranks but the job has 4" in job.text.replace(
        "replicas use", "replica uses"
    )
    assert "error: pre-flight: pretrain_gpt.py refuses these flags" in job.text
    assert "training starts" not in job.text


def test_preflight_names_the_nodes_that_cannot_start_python(
    cluster: Cluster, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$SLURMD_NODENAME" = local2 ]; then echo "no such library" >&2; exit 1; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    job = cluster.submit("lame", PYTHON=str(python))
    assert job.wait_for_state("COMPLETED", "FAILED") == "FAILED"
    assert "no such library" in job.text
    assert "but 1 did not: local2;" in job.text


def test_each_array_task_runs_a_line_of_the_sweep(cluster: Cluster) -> None:
    sweep = cluster.folder / "sweep.txt"
    sweep.write_text("# runs\n--lr 1e-2\n\n--lr '2e-2' --seed 7\n")
    flags = tiny_command(cluster.prefix, cluster.folder, without=("--lr", "--run-dir"))
    identifier = cluster.run(
        *("sbatch", "--parsable", "--array", "1-2", "--gpus-per-node", "1"),
        *("--output", str(cluster.folder / "sweep-%a.log")),
        *(str(SCRIPTS / "sweep.sbatch"), str(sweep), *flags),
        RUN_DIR=str(cluster.folder / "sweep"),
        CHECKPOINT_DIR="",
        PREFLIGHT="0",
    ).strip()
    good = Job(cluster, f"{identifier}_1", cluster.folder / "sweep" / "1", Path())
    assert good.wait_for_state("COMPLETED", "FAILED") == "COMPLETED"
    settings = json.loads((good.run_dir / "config.json").read_text())["settings"]
    assert (settings["lr"], settings["seed"]) == (2e-2, 7)
    bad = Job(cluster, f"{identifier}_2", cluster.folder / "sweep" / "2", Path())
    assert bad.wait_for_state("COMPLETED", "FAILED") == "FAILED"
    assert "has 2 runs but the array asks for run 2" in (cluster.folder / "sweep-2.log").read_text()


def test_the_interactive_script_trains_in_an_allocation_and_ends(cluster: Cluster) -> None:
    printed = cluster.run(
        *("bash", str(SCRIPTS / "interactive.sh")),
        *("--nodes", "1", "--gpus-per-node", "1", "--", "--strategy", "tp1"),
        *tiny_command(cluster.prefix, cluster.folder / "interactive"),
        CHECKPOINT_DIR="",
        PREFLIGHT="0",
    )
    assert "--cpus-per-task 8 --cpu-bind none" in printed, "all CPUs of the node"
    assert "iteration        3/       3" in printed
    assert "training ended with status 0" in printed
    assert cluster.run("squeue", "--noheader").strip() == ""
