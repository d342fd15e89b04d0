"""What the wheel and the source distribution hold, and the wheel in an environment without the
checkout, with the commands of a user."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.forked_job import free_port
from tests.support.tiny_corpus import SEQ_LENGTH, document_lengths, tiny_command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
_BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools replaces sys.argv
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
_TRAIN = "import sys; from megatron.hydraulis.__main__ import main; sys.exit(main(['train']))"
_ONE_AFTER_THE_OTHER = """
import json, runpy, shutil, sys
script = shutil.which("hydraulis")
for words in json.loads(sys.argv[1]):
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and an empty folder to work in."""

    folder: Path
    work_dir: Path

    @classmethod
    def make(cls, tmp_path: Path) -> Environment:
        """One without pip; that of the running interpreter installs into it."""
        folder, work_dir = tmp_path / "environment", tmp_path / "work"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        work_dir.mkdir()
        return cls(folder, work_dir)

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, *arguments: str) -> None:
        self.run(sys.executable, "-m", "pip", "--python", str(self.folder), "install", *arguments)

    def run(self, *command: str, **more: str) -> str:
        """Run a command of this environment in the folder, with more variables; what it printed."""
        variables = {
            **{name: os.environ[name] for name in os.environ if name != "PYTHONPATH"},
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            **more,
        }
        done = subprocess.run(
            [shutil.which(command[0], path=variables["PATH"]) or command[0], *command[1:]],
            cwd=self.work_dir,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout


def check_imports_come_from_the_wheel(environment: Environment) -> None:
    modules = ("megatron.hydraulis", "megatron.hydraulis.loop", "hydraulis_patches")
    found = ", ".join(f"find_spec({module!r}).origin" for module in modules)
    code = f"from importlib.util import find_spec; print({found})"
    for path in environment.run("python", "-c", code).split():
        assert Path(path).is_relative_to(environment.site_packages)


def link_what_planning_requires(environment: Environment) -> None:
    """Link the distributions that the wheel requires without an extra, and what these require."""
    source, target = Path(sysconfig.get_path("purelib")), environment.site_packages
    (wheel,) = metadata.distributions(name="hydraulis-megatron", path=[str(target)])
    distributions = [wheel]
    linked = {wheel.name}
    for distribution in distributions:
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.name in linked:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                linked.add(requirement.name)
                distributions.append(metadata.distribution(requirement.name))
        if distribution is not wheel:
            for name in {file.parts[0] for file in distribution.files or []} - {".."}:
                if not (target / name).exists():
                    (target / name).symlink_to(source / name)


def check_only_planning_is_installed(environment: Environment) -> None:
    assert "planning only" in environment.run("hydraulis", "--version")
    for code in ("import megatron.hydraulis as h; h.Engine", _TRAIN):
        with pytest.raises(AssertionError, match=r"this needs the package \S+, .*\[train\]"):
            environment.run("python", "-c", code)


def check_planning(environment: Environment) -> None:
    inputs = [
        *("--lengths", str(EXAMPLES / "lengths_instance_b.json")),
        *("--cost-profile", str(EXAMPLES / "cost_profile_llama32b_a800.json")),
        *("--pool", str(EXAMPLES / "pool_64_ranks.json")),
    ]
    assert "118900 tokens" in environment.run("hydraulis", "plan", *inputs)
    corpus = ["--lengths", str(EXAMPLES / "lengths_instance_b.json"), "--seq-length", "32768"]
    model = ["--model", str(EXAMPLES / "model_llama32b.json"), "--device", "a800-80g"]
    job = ["--num-ranks", "32", "--global-batch-size", "16", "--num-batches", "1"]
    assert "gain of the pool" in environment.run("hydraulis", "advise", *corpus, *model, *job)


def check_training(environment: Environment, num_ranks: int, *launcher: str) -> None:
    """Preprocess a corpus and train two iterations.

    Without a launcher one process runs both commands, so that it imports torch and Megatron once.
    """
    corpus = environment.work_dir / "corpus.jsonl"
    with open(corpus, "w", encoding="utf-8") as file:
        for length in document_lengths():
            text = " ".join(str(token % 60) for token in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "61"]
    preprocess = [
        *("preprocess", "--input", str(corpus), "--output-prefix", "data/corpus"),
        *("--workers", "1", *tokenizer),
    ]
    run_dir = environment.work_dir / "run"
    flags = tiny_command("data/corpus", run_dir, *tokenizer, "--strategy", f"tp{num_ranks}")
    train = ["train", *flags, "--train-iters", "2", "--seq-length", str(SEQ_LENGTH)]
    if launcher:
        environment.run("hydraulis", *preprocess)
        environment.run(*launcher, "hydraulis", *train)
    else:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        commands = json.dumps([preprocess, train])
        environment.run("python", "-c", _ONE_AFTER_THE_OTHER, commands, **rank, **master)
    records = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(record)["iteration"] for record in records] == [1, 2]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The project's wheel and source distribution, built from a clean copy of its files."""
    folder = tmp_path_factory.mktemp("distributions")
    copy = folder / "source"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("megatron", "hydraulis_patches"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_wheel_and_sdist_hold_licence_program_and_every_file_of_the_packages(
    distributions: tuple[Path, Path],
) -> None:
    wheel, sdist = distributions
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        info = next(name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(archive.read(info))
        licence = archive.read(info.replace("METADATA", "licenses/LICENSE"))
        scripts = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert described["License-Expression"] == "Apache-2.0"
    assert described.get_all("License-File") == ["LICENSE"]
    assert described["Author"] is None
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert "hydraulis = megatron.hydraulis.__main__:main" in scripts
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "setup.py", "pyproject.toml"} <= in_sdist
    files = {
        str(file.relative_to(ROOT))
        for package in ("megatron/hydraulis", "hydraulis_patches")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and file.suffix not in (".pyc", ".md")
    }
    assert not files - in_wheel
    assert not files - in_sdist
    assert not {name for name in in_wheel if name.startswith(("tests/", "megatron/__init__"))}


@pytest.mark.timeout(300)
@pytest.mark.distributed
def test_the_wheel_plans_and_trains_outside_the_checkout(
    tmp_path: Path, distributions: tuple[Path, Path]
) -> None:
    """Dependencies are those of the running interpreter: a .pth file shows their folder, but does
    not run the .pth files in it, of which one leads to the checkout."""
    wheel, _ = distributions
    environment = Environment.make(tmp_path)
    environment.install("--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))
    link_what_planning_requires(environment)
    check_only_planning_is_installed(environment)
    check_planning(environment)
    (environment.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    check_imports_come_from_the_wheel(environment)
    check_training(environment, 1)


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_wheel_brings_all_its_dependencies(
    tmp_path: Path, distributions: tuple[Path, Path]
) -> None:
    """As a user installs it: everything from the package index. Takes minutes and gigabytes."""
    wheel, _ = distributions
    environment = Environment.make(tmp_path)
    environment.install("--quiet", f"{wheel}[train]")
    assert environment.run("hydraulis", "--version").startswith("hydraulis ")
    check_imports_come_from_the_wheel(environment)
    check_planning(environment)
    # As in README.md.
    launcher = ("torchrun", "--standalone", "--nproc-per-node", "2", "--no-python")
    check_training(environment, 2, *launcher)
    shutil.rmtree(environment.folder)
