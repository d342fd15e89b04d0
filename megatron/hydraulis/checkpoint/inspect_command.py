"""``python -m megatron.hydraulis inspect-checkpoint``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron.hydraulis.checkpoint.inspection import Inspection, inspect_folder

EXIT_INCOMPLETE = 1
_BYTES_PER_MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the subcommand."""
    parser.add_argument("folder", type=Path, help="of checkpoints, or of one (iter_…)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare sizes only, not checksums, for which every byte is read",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def run(namespace: argparse.Namespace) -> int:
    """Print what is there; 1 unless every checkpoint is complete. Raises CheckpointError."""
    inspections, latest = inspect_folder(namespace.folder, checks_content=not namespace.quick)
    if namespace.json:
        content = {"latest": latest, "checkpoints": [each.to_json() for each in inspections]}
        print(json.dumps(content, indent=1))
    else:
        for inspection in inspections:
            print("\n".join(_lines(inspection, with_tensors=namespace.tensors)))
        if latest:
            print(f"latest: {latest}")
    return 0 if all(each.is_complete for each in inspections) else EXIT_INCOMPLETE


def _lines(inspection: Inspection, *, with_tensors: bool) -> list[str]:
    said = "complete" if inspection.is_complete else "NOT COMPLETE"
    if inspection.is_complete and inspection.written_by == "hydraulis":
        said += ", checksums right" if inspection.checks_content else ", sizes right"
    if inspection.is_complete and inspection.written_by == "megatron":
        said += " by upstream's marks; it has no checksums of ours"
    lines = [f"{inspection.path}: {said}"]
    lines += [f"  {problem}" for problem in inspection.problems]
    if inspection.iteration is not None:
        writer = "" if inspection.num_ranks is None else f" by {inspection.num_ranks} ranks"
        size = (inspection.num_bytes or 0) / _BYTES_PER_MB
        lines.append(
            f"  iteration {inspection.iteration}, written by {inspection.written_by}{writer}, "
            f"{size:.1f} MB"
        )
    if inspection.tensors:
        optimizer = "with" if inspection.has_optimizer else "without"
        lines.append(
            f"  {inspection.num_parameters:,} parameters in {len(inspection.tensors)} tensors, "
            f"{optimizer} optimizer state"
        )
    if inspection.model:
        lines.append("  model " + ", ".join(f"{k} {v}" for k, v in inspection.model.items()))
    pool = inspection.state.get("planner", {}).get("pool", {})
    if pool:
        lines.append("  pool " + "; ".join(dict.fromkeys(pool.values())))
    if "consumed_train_samples" in inspection.state:
        lines.append(f"  {inspection.state['consumed_train_samples']:,} sequences consumed")
    if with_tensors:
        lines += [
            f"  {key} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} "
            f"in {tensor.num_chunks} chunks"
            for key, tensor in sorted(inspection.tensors.items())
        ]
    return lines
