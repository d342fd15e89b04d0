"""Decisions and errors of the launch scripts, without Slurm and without starting a rank.

Jobs on a real Slurm are in tests/slurm/slurm_jobs.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def bash(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=ROOT,
        env=own | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def job_library(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a shell that has the functions of job.sh."""
    code = f"source scripts/slurm/job.sh\n{code}"
    return bash("-euo", "pipefail", "-c", code, **{"RANKS_PER_NODE": "8"} | environment)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SETUP_SCRIPT": "absent.sh"}, "SETUP_SCRIPT is a file that every node sources but"),
        ({"RANKS_PER_NODE": ""}, "Slurm names no GPUs to assign ranks to; set"),
        ({"NUM_NODES": "many"}, "NUM_NODES must be an integer of at least 1 but is 'many'"),
        ({"EXIT_GRACE_S": "0"}, "EXIT_GRACE_S must be an integer of at least 1 but is '0'"),
        ({"NUM_NODES": "2", "MIN_NODES": "3"}, "MIN_NODES is 3 but the job has 2 nodes"),
        ({"HYDRAULIS_ROOT": "/"}, "but '/' does not; submit from it or set HYDRAULIS_ROOT"),
    ],
)
def test_impossible_settings(environment: dict[str, str], says: str) -> None:
    result = job_library("resolve_settings --lr 1", **environment)
    assert result.returncode == 2
    assert says in result.stderr


def composed(*flags: str, **environment: str) -> str:
    arguments = " ".join(f"'{flag}'" for flag in flags)
    result = job_library(
        f"resolve_settings {arguments}; compose_training; print_settings", **environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_rendezvous_and_every_setting_are_printed(tmp_path: Path) -> None:
    text = composed("--lr", "1", RUN_DIR=str(tmp_path), NUM_NODES="4", SLURM_JOB_ID="123456")
    assert "MASTER_PORT      23456\n" in text
    assert "--rdzv-endpoint localhost:23456 --rdzv-id 123456-0" in text
    assert "--nnodes 4 --nproc-per-node 8" in text
    assert f"--exit-signal-handler --run-dir {tmp_path} --save {tmp_path}/checkpoints" in text


def test_the_head_of_the_script_has_every_setting_with_its_default() -> None:
    header = (ROOT / "scripts/slurm/pretrain_gpt.sbatch").read_text()
    unset = {"OMP_NUM_THREADS": "", "CUDA_DEVICE_MAX_CONNECTIONS": ""}
    documented = dict(re.findall(r"^#   ([A-Z_]+) +(?:.*? {2,})?(\S.*)$", header, re.MULTILINE))
    printed = dict(
        re.findall(r"^([A-Z_]+) +(\S+)", composed(CHECKPOINT_DIR="", **unset), re.MULTILINE)
    )
    assert documented.keys() == printed.keys()
    for name, value in printed.items():
        if value.isdigit() and name not in ("RANKS_PER_NODE", "MIN_NODES", "MASTER_PORT"):
            defaults = re.findall(r"\d+", documented[name])
            assert value in defaults, f"{name}: {documented[name]}"


def hold_checkpoint(folder: Path, iteration: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


ELSEWHERE = ("--load", "/other", "--ckpt-step", "7", "--finetune", "--lr", "1")


def test_a_requeued_job_loads_its_own_checkpoint(tmp_path: Path) -> None:
    own = tmp_path / "checkpoints"
    # From the first start on, because torchrun restarts ranks with the same flags.
    assert f"--save-interval 500 --lr 1 --load {own}\n" in composed(
        "--lr", "1", RUN_DIR=str(tmp_path)
    )
    assert "--load /other --ckpt-step 7 --finetune --lr 1\n" in composed(
        *ELSEWHERE, RUN_DIR=str(tmp_path)
    )
    hold_checkpoint(own, 12)
    text = composed(*ELSEWHERE, RUN_DIR=str(tmp_path))
    assert f"--save-interval 500 --lr 1 --load {own}\n" in text
    assert "/other" not in text


@pytest.mark.parametrize("load", [(), ("--load", "{own}")])
def test_a_job_does_not_go_back_in_its_own_checkpoints(
    tmp_path: Path, load: tuple[str, ...]
) -> None:
    own = tmp_path / "checkpoints"
    hold_checkpoint(own, 12)
    flags = [word.format(own=own) for word in ("--ckpt-step", "7", *load)]
    result = job_library(f"resolve_settings {' '.join(flags)}", RUN_DIR=str(tmp_path))
    assert result.returncode == 2
    assert f"set a new CHECKPOINT_DIR and give --load {own} with it" in result.stderr


def test_ranks_that_are_started_again_resume_from_the_runs_own_checkpoint(tmp_path: Path) -> None:
    def started(**environment: str) -> str:
        result = bash(
            *("scripts/rank.sh", "printf", "%s ", "pretrain_gpt.py", *ELSEWHERE),
            RANK="3",
            LOCAL_RANK="1",
            HYDRAULIS_LOG_DIR=str(tmp_path),
            HYDRAULIS_NODE_DIR=str(tmp_path),
            **environment,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    own = tmp_path / "checkpoints"
    first = f"[rank 3] pretrain_gpt.py {' '.join(ELSEWHERE)} "
    assert started() == started(HYDRAULIS_RESUME_FROM=str(own)) == first
    hold_checkpoint(own, 12)
    again = started(HYDRAULIS_RESUME_FROM=str(own))
    assert again == f"[rank 3] pretrain_gpt.py --lr 1 --load {own} "
    log = (tmp_path / "rank-0003.log").read_text()
    assert log.count("--- ") == 3
    assert f"--load {own}" in log


def test_flags_win_over_variables(tmp_path: Path) -> None:
    text = composed("--run-dir", "/a", "--save=/b", "--save-interval", "9", RUN_DIR=str(tmp_path))
    assert "RUN_DIR          /a\n" in text
    assert "CHECKPOINT_DIR   /b\n" in text
    assert "--exit-signal-handler --run-dir /a --save=/b --save-interval 9 --load /b\n" in text


def test_cpus_come_from_the_job_or_the_node_and_binding_is_torchruns() -> None:
    assert "--cpus-per-task 96 --cpu-bind none" in composed(SLURM_CPUS_ON_NODE="96")
    # Of salloc.
    for of_job in ("64(x2)", "64,32(x3)"):
        assert "--cpus-per-task 64 --cpu-bind" in composed(SLURM_JOB_CPUS_PER_NODE=of_job)
    asked = composed(SLURM_CPUS_ON_NODE="96", SLURM_CPUS_PER_TASK="32")
    assert "--cpus-per-task 32" in asked
    assert "--numa-binding" not in asked
    bound = composed(NUMA_BINDING="node")
    assert "--nproc-per-node 8 --numa-binding node --rdzv-backend c10d" in bound


def test_a_setup_script_is_sourced_before_the_ranks_start(tmp_path: Path) -> None:
    script = tmp_path / "setup.sh"
    script.write_text('export NCCL_IB_HCA=mlx5 PATH="$PATH:/some/module"\n')
    fake_srun = 'srun() { while [[ $1 != bash ]]; do shift; done; "$@"; }'
    result = job_library(
        f"{fake_srun}; resolve_settings --lr 1; "
        '"${step[@]}" "${setup[@]}" bash -c \'echo "$NCCL_IB_HCA ${PATH##*:} $1"\' x "a b"',
        SETUP_SCRIPT=str(script),
    )
    assert result.stdout == "mlx5 /some/module a b\n", result.stderr


def test_a_container_without_the_hosts_tmpdir(tmp_path: Path) -> None:
    result = bash(
        *("scripts/node.sh", "--bad-option", "--", "program.py"),
        TMPDIR="/not/mounted",
        HYDRAULIS_LOG_DIR=str(tmp_path),
        PYTHON="/bin/true",
    )
    assert result.returncode == 0, result.stderr


def test_containers_and_the_loss_of_nodes_are_options_of_the_step() -> None:
    text = composed(
        CONTAINER_IMAGE="img", CONTAINER_MOUNTS="/d:/d", NUM_NODES="4", MIN_NODES="2", PYTHON=""
    )
    assert "--no-kill --kill-on-bad-exit=0" in text
    assert " --elastic" in text, "strategies are written for 4 nodes"
    assert " --elastic" in composed(NUM_NODES="2", MIN_NODES="2"), "it may have been 4 before"
    assert " --elastic" not in composed(NUM_NODES="4")
    assert f"--container-image=img --container-mounts=/d:/d --container-workdir={ROOT} " in text
    assert "--nnodes 2:4 " in text
    assert "PYTHON           python3\n" in text


@pytest.mark.parametrize(
    ("last", "saved", "restart", "says", "queued"),
    [
        (40, 40, 0, "at iteration 40, saved up to 40: requeueing job 5", True),
        (100, 100, 0, "all 100 iterations are done; not requeued", False),
        (40, 30, 1, "saved nothing beyond iteration 30", False),
        (50, 40, 9, "the most that MAX_REQUEUES allows", False),
    ],
)
def test_a_job_is_requeued_while_it_makes_progress(
    tmp_path: Path, last: int, saved: int, restart: int, says: str, queued: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1}}\n{{"iteration": {last}}}\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(saved))
    result = job_library(
        "scontrol() { echo called scontrol $*; }\n"
        "resolve_settings --train-iters 100; saved_at_start=30; requeue_job || true",
        RUN_DIR=str(tmp_path),
        SLURM_JOB_ID="5",
        SLURM_RESTART_COUNT=str(restart),
        MAX_REQUEUES="9",
    )
    assert says in result.stdout + result.stderr
    assert ("called scontrol requeue 5" in result.stdout) is queued


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("scripts/run_local.sh", ["--lr"], "the number of ranks, 1 or more, but is '--lr'"),
        ("scripts/slurm/local_cluster.sh", ["begin"], "an action and a folder but got 'begin'"),
        ("scripts/slurm/interactive.sh", ["--nodes", "2"], "-- and the flags of pretrain_gpt.py"),
        ("scripts/slurm/sweep.sbatch", ["nowhere"], "a file of runs but there is no 'nowhere'"),
        ("scripts/slurm/pretrain_gpt.sbatch", ["--lr", "1"], "in a Slurm job and this is not one"),
    ],
)
def test_a_wrong_call_prints_the_usage(script: str, arguments: list[str], says: str) -> None:
    result = bash(script, *arguments, RANKS_PER_NODE="1")
    assert result.returncode == 2
    assert says in result.stderr


RANK = """
import os, signal, sys, time
def end(*_):
    time.sleep(1)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(f"ready, started by {os.getppid()}", flush=True)
time.sleep(60)
"""


def test_node_asks_ranks_to_end_and_ends_well_with_a_log_for_each(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(RANK)
    node = subprocess.Popen(
        [
            *("bash", "scripts/node.sh", "--standalone", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", "2", "--", str(program)),
        ],
        cwd=ROOT,
        env=os.environ
        | {"PYTHON": sys.executable, "HYDRAULIS_LOG_DIR": str(tmp_path / "logs")}
        | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    logs = [tmp_path / "logs" / f"rank-{rank:04}.log" for rank in range(2)]
    try:
        deadline_s = time.monotonic() + 90
        while not all(log.exists() and "ready" in log.read_text() for log in logs):
            assert node.poll() is None, node.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        # Like Slurm: every process gets the signal, including torchrun.
        os.killpg(node.pid, signal.SIGUSR1)
        for name in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(int(re.findall(r"started by (\d+)", logs[0].read_text())[0]), name)
        output, _ = node.communicate(timeout=60)
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
    assert node.returncode == 0, output
    assert "Traceback" not in output, output
    for rank, log in enumerate(logs):
        assert "saved" in log.read_text()
        assert f"[rank {rank}] saved" in output
