"""``python -m megatron.hydraulis predict-layouts``: time, MFU and memory of layouts in a file."""

import argparse
import json
import sys

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.layout_constants import LAYOUT_CONSTANTS
from megatron.hydraulis.cost_model.layout_prediction import predict_layout
from megatron.hydraulis.cost_model.layout_table import read_layouts, write_predictions
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_KERNELS = ", ".join(repr(kernel.name) for kernel in LAYOUT_CONSTANTS.kernels)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    parser.add_argument(
        "--layouts",
        required=True,
        metavar="IN.csv",
        help="layouts, one a row, with the columns seq_len (tokens), world_size (ranks), act_ckpt "
        "(disabled or every_layer), kernel, micro_batch_size (sequences), tp, pp, "
        "sequence_parallel (True, False or blank), layers, hidden, ffn, vocab, gbs (sequences a "
        f"step); others are kept. Kernels: {_KERNELS}",
    )
    parser.add_argument(
        "--device",
        required=True,
        metavar="NAME",
        help="a100-80g, a100-40g, a800-80g, h100 or h200, 8 a node",
    )
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

    Raises ConfigurationError for files, kernels and devices that make no sense.
    """
    device = device_constants(namespace.device)
    rows = read_layouts(namespace.layouts)
    predictions = []
    for row in rows:
        try:
            predictions.append(predict_layout(row.job, row.layout, device))
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
        json.dump(summary, sys.stdout, indent=1)
        print()
    else:
        print(
            f"{len(rows)} layouts on {device.name}, of which {num_fitting} fit: "
            f"written to {namespace.out}"
        )
    return 0
