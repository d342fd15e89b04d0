"""``hydraulis predict-layouts``: time, MFU and memory of layouts in a file."""

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.layer_arguments import given_layers, parameter_bytes
from megatron.hydraulis.cost_model.layouts import (
    FixedLengthJob,
    Layout,
    LayoutPrediction,
    predict_layout,
)
from megatron.hydraulis.cost_model.shape_arguments import (
    add_device_argument,
    add_model_arguments,
    given_shape,
)
from megatron.hydraulis.cost_model.software import SOFTWARE_NAMES
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE
from megatron.hydraulis.terminal import print_json

PREDICTED_COLUMNS = (
    "predicted_step_time_s",
    "predicted_mfu",
    "predicted_fits",
    "predicted_memory_bytes",
)
_NUMBERS = ("seq_len", "world_size", "micro_batch_size", "tp", "pp", "gbs")
_MODEL_NUMBERS = ("layers", "hidden", "ffn", "vocab")
_LARGEST = 10**9
"""Limit of every number in a row."""
_RECOMPUTES = {"disabled": False, "every_layer": True}
_TRUTHS = {"": False, "false": False, "0": False, "true": True, "1": True}
# Width of a head: models are Llamas without grouped queries.
_HEAD_SIZE = 128


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A row of the file."""

    where: str
    """File and line, for errors."""
    cells: Mapping[str, str]
    job: FixedLengthJob
    layout: Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layouts",
        required=True,
        metavar="IN.csv",
        help="layouts, one a row, with the columns seq_len (tokens), world_size (ranks), act_ckpt "
        "(disabled or every_layer), kernel, micro_batch_size (sequences), tp, pp, ep (may be "
        "absent), sequence_parallel (True, False or blank), gbs (sequences a step) and, of a Llama "
        "that no flag describes, layers, hidden, ffn, vocab; others are kept. Kernels: "
        f"{SOFTWARE_NAMES}",
    )
    add_model_arguments(parser, has_activations=False)
    add_device_argument(parser, f"; {RANKS_PER_NODE} ranks a node")
    parser.add_argument(
        "--out",
        required=True,
        metavar="OUT.csv",
        help="write the rows here, with predicted_step_time_s (s), predicted_mfu, predicted_fits "
        "and predicted_memory_bytes (bytes, of the fullest rank) added",
    )
    parser.add_argument("--json", action="store_true", help="print a summary as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Predict all rows and write them; returns the exit status.

    Raises ConfigurationError for invalid files and unknown kernels and devices.
    """
    device = device_constants(namespace.device)
    rows = read_layouts(namespace.layouts, given_shape(namespace))
    predictions, precision = [], {"parameter_bytes": parameter_bytes(namespace)}
    for row in rows:
        try:
            layers = given_layers(namespace, row.job.shape) | precision
            job = replace(row.job, layers=layers)
            predictions.append(predict_layout(job, row.layout, device))
        except ConfigurationError as error:
            raise ConfigurationError(f"{row.where}: {error}") from None
    write_predictions(namespace.out, rows, predictions)
    num_fitting = sum(prediction.fits for prediction in predictions)
    if namespace.json:
        summary = {
            "device": device.name,
            "num_layouts": len(rows),
            "num_fitting": num_fitting,
            "out": str(namespace.out),
        }
        print_json(summary)
    else:
        print(
            f"{len(rows)} layouts on {device.name}, of which {num_fitting} fit: "
            f"written to {namespace.out}"
        )
    return 0


def read_layouts(path: str | Path, shape: ModelShape | None = None) -> list[LayoutRow]:
    """Read the rows of a file of layouts; other columns are kept.

    Required are seq_len, world_size, micro_batch_size, tp, pp, gbs (sequences a step), kernel, and
    act_ckpt (disabled or every_layer); sequence_parallel (True or False) and ep may be blank or
    absent. Without a shape layers, hidden, ffn and vocab describe the model, a Llama: heads of 128
    without groups, gated MLP, two embeddings.

    Raises ConfigurationError for an unreadable file, a missing column, columns of a model besides
    the shape, and an invalid value, with its line.
    """
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"layouts {path}: must be a CSV file that can be read but: {reason}; "
            f"give the path of one"
        ) from error
    of_model = _MODEL_NUMBERS if shape is None else ()
    needed = (*_NUMBERS, *of_model, "kernel", "act_ckpt")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ConfigurationError(
            f"layouts {path}: needs the columns {', '.join(needed)} but has no "
            f"{', '.join(missing)}; add them"
        )
    repeated = [name for name in _MODEL_NUMBERS if name in columns and name not in of_model]
    if repeated:
        raise ConfigurationError(
            f"layouts {path}: flags describe the model but the file has the columns "
            f"{', '.join(repeated)} too; remove either"
        )
    if not rows:
        raise ConfigurationError(
            f"layouts {path}: needs a row for every layout but has 0 rows below its header; "
            f"add them"
        )
    return [_row(row, f"layouts {path}, line {line}", shape) for line, row in rows]


def _row(cells: Mapping[str, str], what: str, shape: ModelShape | None) -> LayoutRow:
    if None in cells or None in cells.values():
        raise ConfigurationError(
            f"{what}: a row has a value for every column but this one has more or fewer; correct it"
        )
    number = {name: _integer(cells, name, what) for name in _NUMBERS}
    ep = _integer(cells, "ep", what) if cells.get("ep", "").strip() else 1
    try:
        job = FixedLengthJob(
            shape=shape or _llama(cells, what),
            num_ranks=number["world_size"],
            sequence_tokens=number["seq_len"],
            num_sequences=number["gbs"],
        )
        layout = Layout(
            micro_batch_size=number["micro_batch_size"],
            tp=number["tp"],
            pp=number["pp"],
            ep=ep,
            kernel=cells["kernel"].strip(),
            sequence_parallel=_choice(
                {"sequence_parallel": "", **cells}, "sequence_parallel", _TRUTHS, what
            ),
            recomputes_layers=_choice(cells, "act_ckpt", _RECOMPUTES, what),
        )
        layout.dp(job)
    except ConfigurationError as error:
        if str(error).startswith(what):
            raise
        raise ConfigurationError(f"{what}: {error}") from None
    return LayoutRow(what, cells, job, layout)


def _llama(cells: Mapping[str, str], what: str) -> ModelShape:
    layers, hidden, ffn, vocab = (_integer(cells, name, what) for name in _MODEL_NUMBERS)
    num_heads = max(1, hidden // _HEAD_SIZE)
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=num_heads,
        num_query_groups=num_heads,
        kv_channels=max(1, hidden // num_heads),
        vocab_size=vocab,
        gated_mlp=True,
        tied_embeddings=False,
    )


def _integer(cells: Mapping[str, str], name: str, what: str) -> int:
    try:
        value = float(cells[name])
        if value == int(value) and abs(value) <= _LARGEST:
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ConfigurationError(
        f"{what}: {name} is a whole number of at most {_LARGEST:,} but it is {cells[name]!r}; "
        f"correct it"
    )


def _choice(cells: Mapping[str, str], name: str, values: Mapping[str, bool], what: str) -> bool:
    text = cells[name].strip().lower()
    if text not in values:
        known = ", ".join(repr(value) for value in values)
        raise ConfigurationError(
            f"{what}: {name} is one of {known} but it is {cells[name]!r}; correct it"
        )
    return values[text]


def write_predictions(
    path: str | Path, rows: Sequence[LayoutRow], predictions: Sequence[LayoutPrediction]
) -> None:
    """Write the rows as they were read, with PREDICTED_COLUMNS.

    Raises ConfigurationError for a path that cannot be written.
    """
    columns = [name for name in rows[0].cells if name not in PREDICTED_COLUMNS]
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*columns, *PREDICTED_COLUMNS])
            for row, prediction in zip(rows, predictions, strict=True):
                predicted = (
                    f"{prediction.time.total_s:.6g}",
                    f"{prediction.mfu:.6g}",
                    str(prediction.fits),
                    f"{prediction.memory.total_bytes:.0f}",
                )
                writer.writerow([*(row.cells[name] for name in columns), *predicted])
    except OSError as error:
        raise ConfigurationError(
            f"--out {path}: must be a path that can be written but: {error.strerror}; "
            f"give another path"
        ) from error
