"""``hydraulis recommend-layout``: all layouts of fixed-length training, ranked, and why."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.cost_model.estimate_command import powers_of_two
from megatron.hydraulis.cost_model.layer_arguments import given_layers, parameter_bytes
from megatron.hydraulis.cost_model.layouts import (
    CAUSES,
    PURPOSES,
    FixedLengthJob,
    Layout,
    LayoutPrediction,
    predict_layout,
)
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.cost_model.shape_arguments import (
    add_device_argument,
    add_job_arguments,
    add_model_arguments,
    job_ranks,
    model_words,
    shape_of,
)
from megatron.hydraulis.cost_model.software import SOFTWARE_NAMES, TRAINING, software_of
from megatron.hydraulis.errors import ConfigurationError, PlanError, StrategyError
from megatron.hydraulis.terminal import print_json, print_next, results_console


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layout with the cause of its rank or rejection."""

    prediction: LayoutPrediction
    rule: str
    """Field of StepTime in which the layout loses most against the first, or ``memory``; of the
    first one the largest besides matrix products and attention."""
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Degrees, or degrees and a micro-batch size, that cannot run."""

    tp: int
    pp: int
    ep: int
    micro_batch_size: int | None
    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """All layouts of a job."""

    ranked: tuple[Verdict, ...]
    """Layouts that fit, the fastest first."""
    rejected: tuple[Verdict, ...]
    """Layouts that do not fit, by the time that they would take."""
    refused: tuple[Refusal, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, has_activations=False)
    job = parser.add_argument_group("job")
    add_device_argument(job)
    add_job_arguments(job)
    job.add_argument(
        "--seq-length", type=int, required=True, metavar="N", help="tokens of every sequence"
    )
    job.add_argument(
        "--global-batch-size",
        type=int,
        required=True,
        metavar="N",
        help="rows of --seq-length tokens of a global batch, as in Megatron",
    )
    job.add_argument(
        "--kernel",
        default=TRAINING.name,
        metavar="NAME",
        help=f"one of {SOFTWARE_NAMES} (default: %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=int, default=10, metavar="N", help="layouts to print (default: %(default)s)"
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print all layouts as JSON: times in s, memory in bytes of the fullest rank",
    )


def run(namespace: argparse.Namespace) -> int:
    """Rank the layouts and print them; returns the exit status.

    Raises ConfigurationError for flags that make no sense, PlanError when no layout fits.
    """
    if namespace.top < 1:
        raise ConfigurationError(
            f"--top is at least 1 but is {namespace.top}; give a positive number"
        )
    num_ranks, ranks_per_node = job_ranks(namespace)
    shape, num_parameter_bytes = shape_of(namespace), parameter_bytes(namespace)
    job = FixedLengthJob(
        shape=shape,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        sequence_tokens=namespace.seq_length,
        num_sequences=namespace.global_batch_size,
        layers=given_layers(namespace, shape) | {"parameter_bytes": num_parameter_bytes},
    )
    search = search_layouts(job, device_constants(namespace.device), namespace.kernel)
    if namespace.json:
        print_json(_to_json(search))
        return 0
    console = results_console()
    num_tokens = job.num_sequences * job.sequence_tokens
    print(
        f"global batch: {job.num_sequences:,} rows of {job.sequence_tokens:,} tokens, as in "
        f"Megatron; here --global-batch-tokens {num_tokens}"
    )
    best = search.ranked[0].prediction
    has_ep = job.shape.num_experts > 0
    title = f"fastest of {len(search.ranked)} that fit"
    console.print(_table(title, search.ranked[: namespace.top], has_ep=has_ep))
    faster = sorted(
        (v for v in search.rejected if v.prediction.time.total_s < best.time.total_s),
        key=lambda verdict: verdict.prediction.memory.total_bytes,
    )
    if faster:
        title = f"would be faster than the first, but out of memory ({len(faster)}), least first"
        console.print(_table(title, faster[: namespace.top], has_ep=has_ep))
    if has_ep:
        console.print(
            "ep: ranks that hold a layer's experts together, each expert whole: Megatron's "
            "--expert-model-parallel-size with --expert-tensor-parallel-size 1; at 1 tp cuts them"
        )
    console.print(
        f"{len(search.rejected)} layouts are out of memory, {len(search.refused)} cannot be run: "
        f"--json lists them. Layouts have no cp; advise compares strategies that have."
    )
    is_assumed_fp32 = num_parameter_bytes == FP32_BYTES and not namespace.fp32
    print_next(
        "hydraulis advise --lengths CORPUS.idx --seq-length",
        *(str(job.sequence_tokens), "--global-batch-tokens", str(num_tokens)),
        *("--num-ranks", str(num_ranks), "--ranks-per-node", str(ranks_per_node)),
        *(*model_words(namespace), *(["--fp32"] if is_assumed_fp32 else [])),
        *("--device", namespace.device),
    )
    return 0


def _table(title: str, verdicts: Sequence[Verdict], *, has_ep: bool) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("size", "tp", "pp", *["ep"] * has_ep):
        table.add_column(column, justify="right")
    table.add_column("SP")
    table.add_column("again")
    for column in ("step s", "MFU %", "GB"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for verdict in verdicts:
        prediction, layout = verdict.prediction, verdict.prediction.layout
        table.add_row(
            str(layout.micro_batch_size),
            str(layout.tp),
            str(layout.pp),
            *[str(layout.ep)] * has_ep,
            "yes" if layout.sequence_parallel else "no",
            "layers" if layout.recomputes_layers else "none",
            f"{prediction.time.total_s:.2f}",
            f"{100.0 * prediction.mfu:.1f}",
            f"{prediction.memory.total_bytes / 1e9:.1f}",
            verdict.why,
        )
    return table


def _to_json(search: LayoutSearch) -> dict[str, Any]:
    return {
        "ranked": [_verdict_to_json(verdict) for verdict in search.ranked],
        "rejected": [_verdict_to_json(verdict) for verdict in search.rejected],
        "refused": [dataclasses.asdict(refusal) for refusal in search.refused],
    }


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    prediction, layout = verdict.prediction, verdict.prediction.layout
    return {
        "micro_batch_size": layout.micro_batch_size,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": "full" if layout.recomputes_layers else None,
        "predicted_step_time_s": prediction.time.total_s,
        "predicted_mfu": prediction.mfu,
        "predicted_memory_bytes": prediction.memory.total_bytes,
        "usable_memory_bytes": prediction.usable_bytes,
        "predicted_fits": prediction.fits,
        "rule": verdict.rule,
        "why": verdict.why,
        "time_s": dataclasses.asdict(prediction.time),
        "memory": dataclasses.asdict(prediction.memory),
    }


def search_layouts(job: FixedLengthJob, device: DeviceConstants, kernel: str) -> LayoutSearch:
    """Predict and rank all layouts.

    tp are powers of two inside a node, pp all degrees whose product with tp divides the ranks, ep
    powers of two up to the ranks of a stage, micro-batch sizes powers of two; sequence parallelism
    (with tp) and recomputation on and off.

    Raises ConfigurationError for an unknown kernel, PlanError when no layout fits.
    """
    software_of(kernel)
    refused: list[Refusal] = []
    predictions = [predict_layout(job, layout, device) for layout in _layouts(job, kernel, refused)]
    predictions.sort(key=_order)
    fitting = [prediction for prediction in predictions if prediction.fits]
    rejected = [prediction for prediction in predictions if not prediction.fits]
    if not fitting:
        raise PlanError(_none_fits(job, device, rejected, refused))
    first = fitting[0]
    ranked = [_first_verdict(first)]
    ranked += [_verdict(prediction, first) for prediction in fitting[1:]]
    return LayoutSearch(
        tuple(ranked),
        tuple(Verdict(prediction, "memory", _memory_why(prediction)) for prediction in rejected),
        tuple(refused),
    )


def _order(prediction: LayoutPrediction) -> tuple[float, float, int]:
    """By time; equal times (sequence parallelism without effect) by memory."""
    layout = prediction.layout
    return prediction.time.total_s, prediction.memory.total_bytes, layout.tp


def _none_fits(
    job: FixedLengthJob,
    device: DeviceConstants,
    rejected: Sequence[LayoutPrediction],
    refused: Sequence[Refusal],
) -> str:
    if not rejected:
        return (
            f"no layout can be run on {job.num_ranks} ranks: {refused[0].why}"
            if refused
            else f"no layout can be run on {job.num_ranks} ranks; change their number"
        )
    least = min(rejected, key=lambda prediction: prediction.memory.total_bytes)
    return (
        f"a layout must fit in {least.usable_bytes / 1e9:.1f} GB of {device.name} but the smallest "
        f"of {len(rejected)} needs {least.memory.total_bytes / 1e9:.1f} GB; use more ranks or "
        f"shorter sequences, or advise: its strategies have cp, layouts have none"
    )


def _layouts(job: FixedLengthJob, kernel: str, refused: list[Refusal]) -> Iterator[Layout]:
    for tp, pp, ep in _degrees(job, refused):
        dp = job.num_ranks // (tp * pp)
        if job.num_sequences % dp:
            why = (
                f"replicas share the batch evenly but {job.num_sequences} sequences are not a "
                f"multiple of {dp} replicas"
            )
            refused.append(Refusal(tp, pp, ep, None, "batch", why))
            continue
        sequences_per_replica = job.num_sequences // dp
        spreads = (False,) if tp == 1 else (True,) if job.shape.whole_matrices else (False, True)
        for size in powers_of_two(sequences_per_replica):
            if sequences_per_replica % size:
                why = (
                    f"micro-batches share a replica's {sequences_per_replica} sequences evenly "
                    f"but their size is {size}"
                )
                refused.append(Refusal(tp, pp, ep, size, "batch", why))
                break
            for sequence_parallel, recomputes in itertools.product(spreads, (False, True)):
                yield Layout(
                    micro_batch_size=size,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    kernel=kernel,
                    sequence_parallel=sequence_parallel,
                    recomputes_layers=recomputes,
                )


def _degrees(job: FixedLengthJob, refused: list[Refusal]) -> Iterator[tuple[int, int, int]]:
    """tp, pp and ep of layouts that divide model and job; each degree is refused once."""

    def divides(tp: int, pp: int, ep: int) -> bool:
        replica = Layout(micro_batch_size=1, tp=tp, pp=pp, ep=ep, kernel=TRAINING.name)
        try:
            replica.strategy(job)
        except StrategyError as error:
            refused.append(Refusal(tp, pp, ep, None, "division", str(error)))
            return False
        return True

    for tp in powers_of_two(min(job.ranks_per_node, job.num_ranks)):
        if job.num_ranks % tp or not divides(tp, 1, 1):
            continue
        for pp in range(1, job.num_ranks // tp + 1):
            if (job.num_ranks // tp) % pp or not divides(tp, pp, 1):
                continue
            num_together = math.gcd(job.num_ranks // pp, job.shape.num_experts or 1)
            for ep in range(1, num_together + 1):
                if num_together % ep == 0 and divides(tp, pp, ep):
                    yield tp, pp, ep


def _first_verdict(prediction: LayoutPrediction) -> Verdict:
    time = prediction.time
    costs = [name for name in CAUSES if name not in ("matmul_s", "attention_s")]
    rule = max(costs, key=lambda name: float(getattr(time, name)))
    share = 100.0 * getattr(time, rule) / time.total_s
    return Verdict(prediction, rule, f"fastest; most goes to {CAUSES[rule]}: {share:.0f} %")


def _verdict(prediction: LayoutPrediction, first: LayoutPrediction) -> Verdict:
    more = {name: getattr(prediction.time, name) - getattr(first.time, name) for name in CAUSES}
    rule = max(more, key=lambda name: more[name])
    slower = 100.0 * (prediction.time.total_s / first.time.total_s - 1.0)
    if more[rule] <= 0.0:
        return Verdict(prediction, "equal", "as fast as the first, with more memory")
    seconds = more[rule]
    return Verdict(prediction, rule, f"+{slower:.1f} %; {CAUSES[rule]}: +{seconds:.2f} s")


def _memory_why(prediction: LayoutPrediction) -> str:
    memory = prediction.memory
    parts = {name: getattr(memory, name) for name in PURPOSES}
    most = max(parts, key=lambda name: parts[name])
    return (
        f"stage {memory.stage} needs {memory.total_bytes / 1e9:.1f} of "
        f"{prediction.usable_bytes / 1e9:.1f} GB; {PURPOSES[most]}: {parts[most] / 1e9:.1f} GB"
    )
