"""Patches of `megatron.training`: its step, data, optimizer, checkpoints and log."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

from megatron.training import global_vars

from hydraulis_patches.hashes import TRAINING_LOOP_HASHES
from hydraulis_patches.registry import AppliedPatch, Patch, SetState, check_signature

_TRAINING = "megatron.training.training:"


class LoopReplacements(Protocol):
    """Functions that the patched loop calls; see `megatron.hydraulis.loop.step`."""

    @property
    def train_step(self) -> Callable[..., Any]:
        """This function and the next seven have upstream's parameters."""

    @property
    def evaluate(self) -> Callable[..., Any]: ...

    @property
    def get_megatron_optimizer(self) -> Callable[..., Any]: ...

    @property
    def build_train_valid_test_data_iterators(self) -> Callable[..., Any]: ...

    @property
    def update_train_iters(self) -> Callable[..., Any]: ...

    @property
    def consume_seqlen_stats_in_iteration(self) -> Callable[..., Any]: ...

    @property
    def save_checkpoint(self) -> Callable[..., Any]: ...

    @property
    def load_checkpoint(self) -> Callable[..., Any]: ...

    def around_training_log(self, training_log: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of upstream's function."""

    def around_print_rank_last(self, print_rank_last: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of upstream's function."""


def _patch(name: str, reason: str, removable_when: str, *, cpu_only: bool = False) -> Patch:
    target = name if ":" in name else _TRAINING + name
    return Patch(
        name=target.split(":")[1],
        targets={target: TRAINING_LOOP_HASHES[target]},
        reason=reason,
        removable_when=removable_when,
        cpu_only=cpu_only,
    )


REPLACED = (
    _patch(
        "train_step",
        "runs get_num_microbatches() micro-batches of one shape on every rank; a plan gives each "
        "replica its own number and lengths, and gradients meet on the canonical shards",
        "upstream takes a train step as an argument of pretrain()",
    ),
    _patch(
        "evaluate",
        "as train_step",
        "upstream takes an evaluation as an argument of pretrain()",
    ),
    _patch(
        "get_megatron_optimizer",
        "builds optimizers over a model's parameters; ours owns shards that no model holds",
        "upstream takes an optimizer factory as an argument of pretrain()",
    ),
    _patch(
        "build_train_valid_test_data_iterators",
        "builds data loaders per data-parallel rank of one fixed layout",
        "upstream takes iterators as an argument of pretrain()",
    ),
    _patch(
        "update_train_iters",
        "counts batches of the nominal size, and prints their number",
        "upstream takes the number of iterations from the data",
    ),
    _patch(
        "consume_seqlen_stats_in_iteration",
        "sums over parallel_state's groups, which stay uninitialised; the plan knows the sums",
        "upstream takes the statistics from the train step",
    ),
    _patch(
        "save_checkpoint",
        "rewrites the file that names the latest checkpoint in place, copies all that it saves, "
        "and asks parallel_state",
        "upstream publishes a checkpoint by a rename and takes the writer as an argument",
    ),
    _patch(
        "load_checkpoint",
        "starts from scratch where nothing can be loaded, loads what does not fit as far as it "
        "goes, and unpickles what it reads without weights_only",
        "upstream fails in all three cases",
    ),
)

WRAPPED = (
    _patch(
        "training_log",
        "computes the batch size from the micro-batch calculator, wrong under a token budget, "
        "divides one iteration's operations by the mean time of all since the last line, and shows "
        "the mean of the first two losses as the second",
        "upstream takes batch size and operations from the train step, adds the latter up, and "
        "resets after the first line",
    ),
    _patch(
        "print_rank_last",
        "training_log has no hook for further fields of its line",
        "upstream takes further fields from the train step",
    ),
)

GET_FORWARD_BACKWARD_FUNC = _patch(
    "get_forward_backward_func",
    "asks parallel_state, which stays uninitialised, for a function that is never called here",
    "upstream asks the given pg_collection",
)
REPORT_THEORETICAL_MEMORY = _patch(
    "report_theoretical_memory",
    "prints a figure for one scheme on all ranks, wrong for a heterogeneous strategy",
    "upstream leaves it to the model",
)
COMPILE_DEPENDENCIES = _patch(
    "megatron.training.initialize:_compile_dependencies",
    "announces a compilation and runs make in the installed package, which ships the compiled "
    "helpers but no Makefile, so that the process exits",
    "the wheel holds a Makefile, or upstream skips what is compiled",
)
BUILD_TOKENIZER = _patch(
    "megatron.training.global_vars:_build_tokenizer",
    "loads the tokenizer on every rank, which training does not need: its data are tokens and the "
    "size of the vocabulary is known; get_tokenizer() still returns it, loaded at its first use",
    "upstream loads the tokenizer when it is asked for",
)
SET_JIT_FUSION_OPTIONS = _patch(
    "set_jit_fusion_options",
    "warms up compiled fusions with tensors of (sequence length, 1, ffn) whatever a strategy's tp "
    "and cp: 35-175 GiB for a million tokens, and 10-20 s of compilation for shapes that no "
    "micro-batch has",
    "upstream shapes the warm-up by a given scheme and number of tokens",
)
REPORT_MEMORY = _patch(
    "report_memory",
    "prints the CUDA allocator's figures, all zero on a CPU",
    "upstream reports the memory of the device in use",
    cpu_only=True,
)

ALL = (
    *REPLACED,
    *WRAPPED,
    GET_FORWARD_BACKWARD_FUNC,
    REPORT_THEORETICAL_MEMORY,
    COMPILE_DEPENDENCIES,
    BUILD_TOKENIZER,
    SET_JIT_FUSION_OPTIONS,
    REPORT_MEMORY,
)


MEMORY_BUFFER = SetState(
    name="megatron.core.parallel_state:_set_global_memory_buffer",
    reason="sequence-parallel linear layers gather into parallel_state._GLOBAL_MEMORY_BUFFER, "
    "which upstream makes along with the global groups, uninitialised here; set by the engine "
    "(runtime/process_groups.py: provide_memory_buffer)",
    removable_when="upstream takes the buffer from the layer or its pg_collection",
)

MOE_METRICS = SetState(
    name="megatron.core.transformer.moe.moe_logging:set_moe_metrics_tracker",
    reason="upstream's log line shows the losses of routers from a tracker that upstream's routers "
    "fill; ours are among the losses of an iteration, so the tracker reports nothing; set by the "
    "loop (loop/step.py: around_training_log)",
    removable_when="upstream logs only losses that the train step returns",
)


def apply_training_loop(loop: LoopReplacements, *, has_cuda: bool) -> list[AppliedPatch]:
    """Replace upstream's functions by the loop's methods.

    Raises:
        UpstreamVersionError: upstream is another version, or could not call a replacement.
    """
    applied: list[AppliedPatch] = []
    for patch in REPLACED:
        replacement = getattr(loop, patch.name)
        check_signature(_TRAINING + patch.name, replacement)
        applied += patch.apply(_replace_by(replacement))
    for patch in WRAPPED:
        applied += patch.apply(getattr(loop, f"around_{patch.name}"))
    applied += GET_FORWARD_BACKWARD_FUNC.apply(_replace_by(_never_called))
    applied += BUILD_TOKENIZER.apply(_replace_by(build_tokenizer_at_first_use))
    silenced = [REPORT_THEORETICAL_MEMORY, COMPILE_DEPENDENCIES, SET_JIT_FUSION_OPTIONS]
    if not has_cuda:
        silenced.append(REPORT_MEMORY)
    for patch in silenced:
        applied += patch.apply(_replace_by(_nothing))
    return applied


def _replace_by(replacement: Callable[..., Any]) -> Callable[[Any], Any]:
    """A function of the original, which it ignores, as `Patch.apply` takes it."""
    return lambda original: replacement


class _Tokenizer:
    """Upstream's tokenizer, built when an attribute of it is first read."""

    def __init__(self, args: Any) -> None:
        self._args = args

    def __getattr__(self, name: str) -> Any:
        return getattr(self._built, name)

    @cached_property
    def _built(self) -> Any:
        return global_vars.build_tokenizer(self._args)


def build_tokenizer_at_first_use(args: Any) -> Any:
    """Set what `get_tokenizer()` returns."""
    global_vars._GLOBAL_TOKENIZER = _Tokenizer(args)
    return global_vars._GLOBAL_TOKENIZER


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a function whose effect is not wanted."""


def _never_called(*args: Any, **kwargs: Any) -> None:
    """Stands for arguments that upstream's loop passes to `train_step`, which does not use them."""
