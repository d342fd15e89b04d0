"""Everything that is measured on one GPU; results with device and date in docs/results/."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PARTS = ("attention", "profile", "training")
RESULTS = Path("docs/results")
_PACKAGES = ("torch", "megatron-core", "transformer-engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and write the results; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep runs and profile here")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "error: these benchmarks measure a GPU but torch finds no CUDA device; run them where "
            "there is one"
        )
        return 2
    from benchmarks.gpu import attention, programs

    found: dict[str, Any] = {"setup": _setup()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if "attention" in arguments.parts:
            found["attention"] = attention.run()
            torch.cuda.empty_cache()  # the programs below are processes of their own
        if "profile" in arguments.parts:
            found["profile"] = programs.profile(folder)
        if "training" in arguments.parts:
            path = folder / "profile.json"
            found["training"] = programs.training(folder, path if path.is_file() else None)
    device = re.sub(r"[^a-z0-9]+", "_", found["setup"]["device"].lower()).strip("_")
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"{found['setup']['date']}_{device}"
    path.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(found))
    print(f"results: {path}.json and {path}.md")
    return 0


def _setup() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        **versions,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The results as tables."""
    setup = found["setup"]
    packages = ", ".join(f"{name} {setup[name]}" for name in _PACKAGES)
    lines = [f"# {setup['device']}, {setup['date']}", "", packages, ""]
    if "attention" in found:
        lines += ["## Core attention, forward and backward of one layer", ""]
        lines += _table(found["attention"]["rows"])
        lines += [f"Left out: {k}: {why}." for k, why in found["attention"]["left_out"].items()]
    if "profile" in found:
        lines += ["## Packs of equal tokens: measured and fitted", ""]
        lines += _table(found["profile"]["rows"])
    if "training" in found:
        run = dict(found["training"])
        memory = run.pop("memory")
        lines += ["## Training", ""]
        lines += [f"- {name}: {_cell(value)}" for name, value in run.items()]
        lines += ["", "## Memory: foretold by the model and measured", "", *_table(memory)]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["nothing", ""]
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(_cell(row[name]) for name in names)} |" for row in rows]
    return [*lines, ""]


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
