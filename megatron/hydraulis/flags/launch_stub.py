"""Stands in for launchers while ``hydraulis convert -- COMMAND`` runs somebody's launch script.

It runs as a program without the rest of the package: ``python -I launch_stub.py NAME WORDS…``, in
place of the program of that name. Three ways lead to it, as scripts change PATH: a folder that is
first in PATH, functions exported to bash, and a ``sitecustomize`` module, which catches Python
programs called by their path. It then does one of three things:

- A launcher of training, or Python with a training program, is *recorded* and not run.
- A program that starts others on other machines, or in a container, *hands on*: what it would start
  runs here, once, with stubs.
- Any other Python program runs as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

FOLDER = "HYDRAULIS_CONVERT_FOLDER"
"""The variable with the folder of stubs and of records."""
_AROUND = "HYDRAULIS_CONVERT_AROUND"
"""The variable with the words of the launchers that handed on, as JSON."""
_PASSED = "HYDRAULIS_CONVERT_PASSED"
"""The variable with the process that runs as it is."""
MOST_BYTES = 1 << 20
"""Limit of what is read of a script for its headers."""

_RECORDED = ("torchrun", "deepspeed", "accelerate")
_PYTHON = re.compile(r"python[\d.]*")
_BATCH = ("sbatch", "qsub", "bsub")
_JOB = (*_BATCH, "salloc", "srun", "mpirun", "mpiexec", "orterun", "aprun", "jsrun", "numactl")
_ELSEWHERE = (
    *("ssh", "pdsh", "clush", "pssh", "parallel-ssh", "ray", "kubectl", "nsys"),
    *("docker", "podman", "singularity", "apptainer", "enroot"),
)
"""Programs whose words run here only if they may lead to training: ``docker rm`` does not."""
STUBS = (*_RECORDED, "python", "python3", *_JOB, *_ELSEWHERE, "scontrol")

_PROGRAM = re.compile(rf"bash|sh|zsh|env|{_PYTHON.pattern}|{'|'.join(_RECORDED)}|.+\.(sh|bash|py)")
_LAUNCHING_MODULE = re.compile(r"torch\.distributed\.\w+|(deepspeed|accelerate)\b.*")
_TRAINING_PROGRAM = re.compile(r"(.*[_-])?(pre)?train.*\.py|.*(finetune|posttrain|sft).*\.py")
_MODEL_OPTION = re.compile(
    r"--(num-layers|hidden-size|num-attention-heads|seq-length|micro-batch-size|"
    r"global-batch-size|train-iters|train-samples|tensor-model-parallel-size)\b.*"
)
_SIZE = re.compile(
    r"(?<!\S)--?(nodes|ntasks|ntasks-per-node|gpus-per-node|gres|cpus-per-task|nnodes|"
    r"nproc-per-node|np|[Nnc])(?:[=\s]+|(?=\d))(\S+)"
)
_PBS_SIZE = re.compile(r"(?<![\w-])(select|nodes|ncpus|ngpus|mpiprocs|ppn)=(\d+)")
_SAME_SIZE = {
    "N": "nodes",
    "n": "ntasks",
    "np": "ntasks",
    "c": "cpus-per-task",
    "gres": "gpus-per-node",
    "select": "nodes",
    "ncpus": "cpus-per-task",
    "ngpus": "gpus-per-node",
    "mpiprocs": "ntasks-per-node",
    "ppn": "ntasks-per-node",
}
_VARIABLES = {
    "nodes": "SLURM_NNODES SLURM_JOB_NUM_NODES",
    "ntasks": "SLURM_NTASKS SLURM_NPROCS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "gpus-per-node": "SLURM_GPUS_PER_NODE SLURM_GPUS_ON_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
}
_FIRST_TASK = {
    **dict.fromkeys(("SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"), "0"),
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID"), "1"),
}


def sizes(text: str) -> dict[str, int | None]:
    """Options of sbatch, srun, mpirun, torchrun and PBS; None for a value that is no number."""
    found: dict[str, int | None] = {}
    for name, value in _SIZE.findall(text.replace("_", "-")) + _PBS_SIZE.findall(text):
        number = value.rpartition(":")[2]  # of gpu:a100:8
        found[_SAME_SIZE.get(name, name)] = int(number) if number.isdecimal() else None
    return found


def header(text: str) -> str:
    """The options in the lines of a script that begin with #SBATCH or #PBS."""
    return " ".join(re.findall(r"^#(?:SBATCH|PBS)\s+([^#\n]*)", text, re.MULTILINE))


def header_of(words: Sequence[str]) -> str:
    """The headers of scripts among the words."""
    headers = []
    for path in filter(os.path.isfile, words):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            headers.append(header(file.read(MOST_BYTES).decode(errors="replace")))
    return " ".join(filter(None, headers))


def set_job_variables(environment: dict[str, str], text: str) -> None:
    """Give variables of Slurm and PBS without a value that of the first task of a job with these
    options."""
    values = dict(_FIRST_TASK)
    found = sizes(text)
    for size, names in _VARIABLES.items():
        if found.get(size) is not None:
            values |= dict.fromkeys(names.split(), str(found[size]))
    hosts = [f"node{at}" for at in range(min(found.get("nodes") or 1, 1 << 10))]
    values["SLURM_JOB_NODELIST"] = values["SLURM_NODELIST"] = ",".join(hosts)
    if FOLDER in environment:
        values["PBS_NODEFILE"] = str(Path(environment[FOLDER], "nodes"))
        if "PBS_NODEFILE" not in environment:
            Path(values["PBS_NODEFILE"]).write_text("\n".join([*hosts, ""]))
    for name, value in values.items():
        environment.setdefault(name, value)


def split_call(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """The words before the training program, the program and its options."""
    for at, word in enumerate(words[1:], 1):
        if word.endswith(".py"):
            return list(words[:at]), word, list(words[at + 1 :])
        if words[at - 1] == "-m" and not _LAUNCHING_MODULE.fullmatch(word):
            return list(words[: at - 1]), word, list(words[at + 1 :])
    at = next((at for at, word in enumerate(words) if _MODEL_OPTION.fullmatch(word)), len(words))
    return list(words[:at]), "", list(words[at:])


def is_training(words: Sequence[str]) -> bool:
    """True if words that begin with Python call a launcher or a training program."""
    script = next((at for at, word in enumerate(words[1:], 1) if word[:1] != "-"), len(words))
    if "-c" in words[1 : script + 1]:
        return False
    program = PurePath(words[script]).name if script < len(words) else ""
    if words[script - 1] == "-m":
        return bool(_LAUNCHING_MODULE.fullmatch(program)) or has_model_options(words)
    return (
        program in _RECORDED
        or bool(_TRAINING_PROGRAM.fullmatch(program))
        or has_model_options(words)
    )


def has_model_options(words: Sequence[str]) -> bool:
    """True if two or more options are those of Megatron's models and training."""
    return sum(bool(_MODEL_OPTION.fullmatch(word.replace("_", "-"))) for word in words) > 1


def handed_on(words: Sequence[str]) -> list[str]:
    """Words that a launcher would start: those from the first one on that names a shell, Python, a
    launcher of training or a script; else a text for a shell; else from the first program on."""
    is_job = PurePath(words[0]).name in _JOB
    if not (is_job or re.search(r"torchrun|deepspeed|accelerate|python|\.sh\b", " ".join(words))):
        return []
    for at, word in enumerate(words[1:], 1):
        if not re.search(r"\s", word) and _PROGRAM.fullmatch(PurePath(word).name):
            return list(words[at:])
    for word in reversed(words[1:]):
        if re.search(r"\s", word):
            return ["bash", "-c", word.removeprefix("--wrap=")]
    for at, word in enumerate(words[1:], 1):
        if is_job and word[:1] != "-" and shutil.which(word):
            return list(words[at:])
    return []


def _record(folder: Path, words: Sequence[str], around: Sequence[Sequence[str]]) -> None:
    """Write a call, in a file whose name sorts by time."""
    call = {"words": list(words), "around": list(around)}
    path = folder / f"{time.time_ns():020d}-{os.getpid()}"
    path.write_text(json.dumps(call))
    path.rename(path.with_suffix(".json"))


def _real(name: str, folder: Path) -> str | None:
    """The program that a stub of this name stands for."""
    folders = (each for each in os.get_exec_path() if Path(each) != folder / "bin")
    return shutil.which(name, path=os.pathsep.join(folders))


def _hand_on(words: Sequence[str], environment: dict[str, str]) -> int:
    """Run here, once, what a launcher would start elsewhere; returns its exit status."""
    inner = handed_on(words)
    options = " ".join(words[: len(words) - len(inner)])
    is_batch = PurePath(words[0]).name in _BATCH
    if is_batch and not inner:
        text = sys.stdin.read(MOST_BYTES)
        inner = ["bash", "-c", text]
        options += f" {header(text)}"
    elif is_batch:
        options = f"{header_of(inner)} {options}"
        if Path(inner[0]).suffix in (".sh", ".bash"):  # need not be executable
            inner = ["bash", *inner]
    around = [*json.loads(environment.get(_AROUND, "[]")), shlex.split(options)]
    environment[_AROUND] = json.dumps(around)
    if PurePath(words[0]).name in (*_BATCH, "salloc", "srun"):
        set_job_variables(environment, options)
    if not inner:
        return 0
    status = subprocess.run(
        inner, env=environment, stdout=sys.stderr if is_batch else None
    ).returncode
    if is_batch:
        print("1" if "--parsable" in words else "Submitted batch job 1")
    return status


def run(program: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Act for the program that was called with these words; returns the exit status.

    program: where a Python that is already running lies, or the name of a stub.
    """
    folder = Path(environment[FOLDER])
    name = PurePath(words[0]).name
    if name == "scontrol":
        print("\n".join(environment.get("SLURM_JOB_NODELIST", "node0").split(",")))
        return 0
    if name in (*_JOB, *_ELSEWHERE):
        return _hand_on(words, dict(environment))
    is_python = bool(_PYTHON.fullmatch(name))
    if is_python and len(words) > 1 and PurePath(words[1]).name in _RECORDED:
        words = words[1:]  # torchrun, which is a script in Python
    elif is_python and not is_training(words):
        real = program if os.path.isabs(program) else _real(name, folder)
        if real is None:
            print(f"{name}: not found", file=sys.stderr)
            return 127
        os.execve(real, list(words), {**environment, _PASSED: str(os.getpid())})
    _record(folder, words, json.loads(environment.get(_AROUND, "[]")))
    return 0


def install(folder: Path, environment: dict[str, str], command: Sequence[str]) -> None:
    """Write the stubs into a folder, let the environment lead to them, and give it the variables
    of a job for which a script in the command has headers."""
    stub = f"{shlex.quote(sys.executable)} -I {shlex.quote(__file__)}"
    is_in_job = "SLURM_JOB_ID" in environment
    (folder / "bin").mkdir()
    for name in STUBS:
        if name == "scontrol" and is_in_job:
            continue
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {stub} {name} {name} "$@"\n')
        path.chmod(0o755)
        environment[f"BASH_FUNC_{name}%%"] = f'() {{ {stub} {name} {name} "$@"\n}}'
    (folder / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if os.environ.get({_PASSED!r}) != str(os.getpid()) and {FOLDER!r} in os.environ:\n"
        "    with open('/proc/self/cmdline') as file:\n"
        "        words = file.read().split(chr(0))[:-1]\n"
        f"    ours = [{sys.executable!r}, '-I', {__file__!r}, sys.executable]\n"
        "    os.execv(ours[0], ours + words)\n"
    )
    environment[FOLDER] = str(folder)
    if options := header_of(command):
        environment[_AROUND] = json.dumps([options.split()])
        set_job_variables(environment, options)
    for name, first in (("PATH", folder / "bin"), ("PYTHONPATH", folder)):
        environment[name] = os.pathsep.join(filter(None, (str(first), environment.get(name))))


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:], os.environ))
