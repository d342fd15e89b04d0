"""All layouts of a fixed-length job, ranked, each with the rule that puts it where it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.layout import FixedLengthJob, Layout
from megatron.hydraulis.cost_model.layout_constants import LAYOUT_CONSTANTS, LayoutConstants
from megatron.hydraulis.cost_model.layout_memory import RankMemory
from megatron.hydraulis.cost_model.layout_prediction import LayoutPrediction, predict_layout
from megatron.hydraulis.cost_model.layout_time import StepTime
from megatron.hydraulis.errors import PlanError

__all__ = ["LayoutSearch", "Refusal", "Verdict", "search_layouts"]

_CAUSES = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "elementwise_s": "norms and activations, whole on every tp rank without sequence parallelism",
    "launch_s": "launches: smaller or more micro-batches on each rank",
    "tensor_parallel_s": "messages between tp ranks",
    "recompute_s": "forward passes run again",
    "logits_s": "output layer and loss",
    "imbalance_s": "the last stage has the output layer too, the others wait",
    "boundary_s": "messages between stages",
    "bubble_s": "the pipeline fills and drains",
    "wait_s": "waits of the kernel's software in pipelines",
    "data_parallel_s": "gradients and parameters between replicas",
}
"""Rules by the part of a step in which they bite."""
_MEMORY = {
    "weights_bytes": "weights and gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations kept",
    "working_bytes": "logits or the layer at work",
    "reserve_bytes": "reserve",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layout with the rule that ranks or rejects it."""

    prediction: LayoutPrediction
    rule: str
    """Field of StepTime where the layout loses most against the first, or ``memory``; for the first
    where it loses most beside matrix products and attention."""
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Degrees, or a micro-batch size with them, that cannot be run at all."""

    tp: int
    pp: int
    micro_batch_size: int | None
    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """What there is to choose from."""

    ranked: tuple[Verdict, ...]
    """Layouts that fit, the fastest first."""
    rejected: tuple[Verdict, ...]
    """Layouts that do not fit, the fastest first, as if they did."""
    refused: tuple[Refusal, ...]


def search_layouts(
    job: FixedLengthJob,
    device: DeviceConstants,
    kernel: str,
    constants: LayoutConstants = LAYOUT_CONSTANTS,
) -> LayoutSearch:
    """Predict all layouts and say why each stands where it does.

    tp are powers of two inside a node, pp all degrees whose product with tp divides the ranks,
    micro-batch sizes powers of two; sequence parallelism (with tp) and recomputation on and off.

    Raises ConfigurationError for a kernel that is not known, PlanError when no layout fits.
    """
    constants.kernel(kernel)
    refused: list[Refusal] = []
    predictions = [
        predict_layout(job, layout, device, constants) for layout in _layouts(job, kernel, refused)
    ]
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
    """By time, and at equal times (sequence parallelism that changes nothing) by memory."""
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
        f"shorter sequences"
    )


def _layouts(job: FixedLengthJob, kernel: str, refused: list[Refusal]) -> Iterator[Layout]:
    for tp, pp in _degrees(job, refused):
        dp = job.num_ranks // (tp * pp)
        if job.num_sequences % dp:
            refused.append(
                Refusal(
                    tp,
                    pp,
                    None,
                    "batch",
                    f"replicas share the batch evenly but {job.num_sequences} sequences are not a "
                    f"multiple of {dp} replicas",
                )
            )
            continue
        sequences_per_replica = job.num_sequences // dp
        size = 1
        while size <= sequences_per_replica:
            if sequences_per_replica % size == 0:
                for sequence_parallel in (False, True) if tp > 1 else (False,):
                    for recomputes in (False, True):
                        yield Layout(
                            micro_batch_size=size,
                            tp=tp,
                            pp=pp,
                            kernel=kernel,
                            sequence_parallel=sequence_parallel,
                            recomputes_layers=recomputes,
                        )
            else:
                refused.append(
                    Refusal(
                        tp,
                        pp,
                        size,
                        "batch",
                        f"micro-batches share a replica's {sequences_per_replica} sequences evenly "
                        f"but their size is {size}",
                    )
                )
                break
            size *= 2


def _degrees(job: FixedLengthJob, refused: list[Refusal]) -> Iterator[tuple[int, int]]:
    shape = job.shape
    tp = 1
    while tp <= min(job.ranks_per_node, job.num_ranks):
        cut = {
            "attention heads": shape.num_attention_heads,
            "query groups": shape.num_query_groups,
            "MLP width": shape.ffn_hidden_size,
            "padded vocabulary": shape.vocab_size,
        }
        uneven = [f"{what} {size}" for what, size in cut.items() if size % tp]
        if uneven:
            why = f"tp cuts evenly but {uneven[0]} is not a multiple of {tp}"
            refused.append(Refusal(tp, 1, None, "division", why))
        elif job.num_ranks % tp == 0:
            for pp in range(1, job.num_ranks // tp + 1):
                if (job.num_ranks // tp) % pp:
                    continue
                if pp > shape.num_layers:
                    why = f"every stage has a layer but {pp} stages share {shape.num_layers} layers"
                    refused.append(Refusal(tp, pp, None, "division", why))
                else:
                    yield tp, pp
        tp *= 2


def _first_verdict(prediction: LayoutPrediction) -> Verdict:
    time = prediction.time
    costs = {
        field.name: getattr(time, field.name)
        for field in fields(StepTime)
        if field.name not in ("matmul_s", "attention_s")
    }
    rule = max(costs, key=lambda name: costs[name])
    share = 100.0 * costs[rule] / time.total_s
    return Verdict(prediction, rule, f"fastest; most goes to {_CAUSES[rule]}: {share:.0f} %")


def _verdict(prediction: LayoutPrediction, first: LayoutPrediction) -> Verdict:
    more = {
        field.name: getattr(prediction.time, field.name) - getattr(first.time, field.name)
        for field in fields(StepTime)
    }
    rule = max(more, key=lambda name: more[name])
    slower = 100.0 * (prediction.time.total_s / first.time.total_s - 1.0)
    if more[rule] <= 0.0:
        return Verdict(prediction, "equal", "as fast as the first, with more memory")
    seconds = more[rule]
    return Verdict(prediction, rule, f"+{slower:.1f} %; {_CAUSES[rule]}: +{seconds:.2f} s")


def _memory_why(prediction: LayoutPrediction) -> str:
    memory = prediction.memory
    parts = {
        field.name: getattr(memory, field.name)
        for field in fields(RankMemory)
        if field.name != "stage"
    }
    most = max(parts, key=lambda name: parts[name])
    return (
        f"stage {memory.stage} needs {memory.total_bytes / 1e9:.1f} of "
        f"{prediction.usable_bytes / 1e9:.1f} GB; {_MEMORY[most]}: {parts[most] / 1e9:.1f} GB"
    )
