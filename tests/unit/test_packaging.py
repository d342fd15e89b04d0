"""Rules for an installation: the namespace, the pins, the boundaries between layers."""

import ast
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ("megatron.core", "megatron.training", "torch")


def arguments_of_setup() -> dict[str, Any]:
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", given.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return given


def declared(extra: str | None = "train") -> dict[str, Requirement]:
    """Requirements in setup.py by name: those of every installation and those of the extra."""
    given = arguments_of_setup()
    texts = given["install_requires"] + (given["extras_require"][extra] if extra else [])
    return {requirement.name: requirement for requirement in map(Requirement, texts)}


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()


def test_upstream_and_ours_are_one_namespace_from_any_folder(tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec\n"
        "import megatron, megatron.hydraulis, hydraulis_patches\n"
        "assert megatron.__file__ is None\n"
        "print(find_spec('megatron.core').origin)\n"
        "print(megatron.hydraulis.__file__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    core, ours = result.stdout.split()
    assert "site-packages" in core
    assert Path(ours).is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("megatron-core", ["0.19.2"], ["0.19.1", "0.20.0"]),
        ("torch", ["2.11.0", "2.13.1", "2.15.0"], ["2.10.0", "2.16.0"]),
        ("highspy", ["1.15.1"], ["1.14.0", "1.16.0"]),
    ],
)
def test_pins(name: str, allowed: list[str], refused: list[str]) -> None:
    specifier = declared()[name].specifier
    assert all(specifier.contains(version) for version in allowed)
    assert not any(specifier.contains(version) for version in refused)


def test_undeclared_requirements_of_megatron_core_are_declared_here() -> None:
    upstream = {
        Requirement(text).name
        for text in metadata.requires("megatron-core") or []
        if "extra ==" not in text
    }
    undeclared = {"einops", "psutil", "pyyaml", "tqdm", "transformers"}
    assert not undeclared & upstream, "megatron-core declares it by now: see setup.py"
    assert undeclared <= declared().keys()


def test_apex_is_never_installed_from_pypi() -> None:
    everything = declared("te") | declared("wandb") | declared("dev")
    assert "apex" not in everything


def test_installed_packages_satisfy_the_requirements() -> None:
    unsatisfied = [
        f"{requirement} but {metadata.version(name)} is installed"
        for name, requirement in declared("dev").items()
        if Version(metadata.version(name)) not in requirement.specifier
    ]
    assert not unsatisfied


def test_every_third_party_import_is_declared() -> None:
    """No import of ours relies on a transitive dependency."""
    distributions = metadata.packages_distributions()
    names = {canonicalize_name(name) for name in declared()}
    of_verl = {"peft", "tensordict", "verl"}
    optional = {"transformer-engine", "transformer-engine-torch", "wandb"} | of_verl
    undeclared = set()
    for file in [*(ROOT / "megatron").rglob("*.py"), *(ROOT / "hydraulis_patches").rglob("*.py")]:
        for module in imported_modules(file):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("megatron", "hydraulis_patches"):
                continue
            owners = {canonicalize_name(name) for name in distributions.get(top, [top])}
            if not owners & (names | optional):
                undeclared.add(f"{file.relative_to(ROOT)}: {module}")
    assert not undeclared


def imported_modules(file: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    return modules


def test_every_package_is_installed() -> None:
    """A folder without __init__.py would be found as a namespace, but hides a forgotten file."""
    folders = {file.parent for file in (ROOT / "megatron" / "hydraulis").rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").is_file()} == set()


def test_every_other_file_of_a_package_is_installed() -> None:
    found: dict[str, set[str]] = {}
    for file in (ROOT / "megatron" / "hydraulis").rglob("*"):
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            package = ".".join(file.parent.relative_to(ROOT).parts)
            found.setdefault(package, set()).add(f"*{file.suffix}")
    assert "megatron.hydraulis.observability" in found
    declared_data = arguments_of_setup()["package_data"]
    assert found == {package: set(patterns) for package, patterns in declared_data.items()}


def assignments_to_upstream(source: str) -> list[str]:
    """Assignments to an attribute of a module or class that was imported from upstream."""
    tree = ast.parse(source)
    upstream = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(UPSTREAM):
            upstream |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(UPSTREAM):
                    upstream.add(alias.asname or alias.name.split(".")[0])
    if not upstream:
        return []
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "setattr"
        ):
            targets = [ast.Attribute(node.args[0], "?", ast.Store())]
        for target in targets:
            base: ast.expr = target
            while isinstance(base, ast.Attribute):
                base = base.value
            is_attribute = isinstance(target, ast.Attribute) and isinstance(base, ast.Name)
            if is_attribute and ast.unparse(base) in upstream:
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("source", "num_found"),
    [
        ("from megatron.training import training\ntraining.train_step = 1", 1),
        ("import torch\ntorch.cuda.current_device = print", 1),
        ("from megatron.core.optimizer import Adam as A\nsetattr(A, 'step', 1)", 1),
        ("import torch\nx = torch.zeros(1)\nx.grad = None", 0),
    ],
)
def test_the_search_for_assignments_finds_them(source: str, num_found: int) -> None:
    assert len(assignments_to_upstream(source)) == num_found


def test_only_patches_assign_to_upstream() -> None:
    found = {
        str(file.relative_to(ROOT)): assignments
        for file in [*(ROOT / "megatron").rglob("*.py"), ROOT / "pretrain_gpt.py"]
        if (assignments := assignments_to_upstream(file.read_text()))
    }
    assert not found


VIOLATIONS = {
    "planner.plan": "megatron.core.utils",
    "transfer.plan": "torch",
    "runtime.executor": "megatron.hydraulis.planner.planners",
    "optimizer": "megatron.training",
    "strategy.strategy": "megatron.hydraulis.runtime",
    "observability.records": "megatron.hydraulis.strategy",
    "library.planning": "verl",
    "loop.job": "megatron.hydraulis.library.verl_engine",
}
"""Modules by what they must not import."""


def test_import_contracts_reject_violations(tmp_path: Path) -> None:
    """The linter runs elsewhere on the real tree; here on a copy that breaks every contract."""
    for name in ("megatron", "hydraulis_patches"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", tmp_path)
    for module, imported in VIOLATIONS.items():
        path = tmp_path / "megatron" / "hydraulis" / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with open(file, "a") as changed:
            changed.write(f"\nimport {imported}\n")
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    for module, imported in VIOLATIONS.items():
        assert f"megatron.hydraulis.{module} -> {imported} (l." in result.stdout, module


LICENCE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""Of https://www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_licence_is_apache_2_verbatim_below_the_copyright_line() -> None:
    first, blank, text = (ROOT / "LICENSE").read_bytes().split(b"\n", maxsplit=2)
    assert first == b"Copyright 2026 the Hydraulis on Megatron authors"
    assert not blank
    assert hashlib.sha256(text).hexdigest() == LICENCE_SHA256


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "megatron" / "hydraulis").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
