"""The command line: ``python -m megatron.hydraulis COMMAND …``."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import HydraulisError

__all__ = ["COMMANDS", "main"]

_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


@dataclass(frozen=True)
class Command:
    """A subcommand. Its module has ``add_arguments(parser)`` and ``run(namespace) -> exit status``,
    and is imported only when the command is called, so that help is quick."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command(
        "preprocess",
        "text files, JSON lines and Parquet to a Megatron dataset (.bin and .idx)",
        "megatron.hydraulis.data.preprocess_command",
    ),
    Command(
        "lengths",
        "tell and draw how long the sequences of a corpus are",
        "megatron.hydraulis.lengths.lengths_command",
    ),
    Command(
        "preflight",
        "check that the ranks of a job can meet and talk, before they train",
        "megatron.hydraulis.loop.preflight_command",
    ),
    Command(
        "profile",
        "measure times and memory of schemes on this machine's ranks, and fit a cost profile",
        "megatron.hydraulis.profiler.command",
    ),
    Command(
        "propose",
        "propose a pool of strategies for a corpus, a cost profile and a cluster",
        "megatron.hydraulis.proposal.propose_command",
    ),
    Command(
        "plan",
        "find the best plan for a batch of lengths, a pool and a cost profile",
        "megatron.hydraulis.planner.command",
    ),
    Command(
        "estimate",
        "estimate a cost profile from the model's shape, the device and the cluster",
        "megatron.hydraulis.cost_model.estimate_command",
    ),
    Command(
        "recommend-layout",
        "rank the layouts of fixed-length training, and say why",
        "megatron.hydraulis.cost_model.recommend_layout_command",
    ),
    Command(
        "predict-layouts",
        "predict step time, MFU and memory of fixed-length layouts in a file",
        "megatron.hydraulis.cost_model.predict_layouts_command",
    ),
    Command(
        "check-plan",
        "check a plan by code that shares nothing with the planner",
        "megatron.hydraulis.plan_check.command",
    ),
    Command(
        "simulate",
        "run iterations without a device: the pool against simpler ways to train",
        "megatron.hydraulis.simulator.simulate_command",
    ),
    Command(
        "trace",
        "merge a trace, tell how much each rank worked and waited, and draw an iteration",
        "megatron.hydraulis.observability.trace_picture",
    ),
    Command(
        "inspect-checkpoint",
        "tell what is in a checkpoint, whether it is complete, and compare its checksums",
        "megatron.hydraulis.checkpoint.inspect",
    ),
    Command(
        "report",
        "make a page about a run: what it did, what was predicted, what to do about it",
        "megatron.hydraulis.observability.report_page",
    ),
    Command(
        "export-hf",
        "write a checkpoint's parameters as a Hugging Face folder: Llama, Qwen2, Qwen3",
        "megatron.hydraulis.checkpoint.hugging_face.export_hf",
    ),
    Command(
        "import-hf",
        "make a checkpoint to start from out of a Hugging Face folder: Llama, Qwen2, Qwen3",
        "megatron.hydraulis.checkpoint.hugging_face.import_hf",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 2 for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m megatron.hydraulis")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help)
        if arguments[:1] == [command.name]:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    namespace = parser.parse_args(arguments)
    try:
        status: int = namespace.run(namespace)
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
