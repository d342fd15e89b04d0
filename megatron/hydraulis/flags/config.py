"""The flags of this package, as one frozen dataclass from which the parser group is generated.

Upstream's ArgumentGroupFactory turns every field into a flag: the name gives ``--the-name``, the
docstring below the field gives the help text, which therefore states the unit.
"""

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from megatron.hydraulis.cost_model.trained_model import CoreAttentionName
from megatron.hydraulis.data.dataset import LongSequences, LossNormalization
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lora import DEFAULT_ALPHA, Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.observability.trace import TraceWindow

# Set by the launcher, so every rank of a job reads the same value. torchrun without --rdzv-id sets
# "none".
_RUN_NAME_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_RUN_NAME = ("", "none")


def default_run_dir(environment: Mapping[str, str] | None = None) -> Path:
    """``runs/<name of the job>``, equal on all ranks: the launcher's name, else ``latest``."""
    if environment is None:
        environment = os.environ
    for variable in _RUN_NAME_VARIABLES:
        name = environment.get(variable, "")
        if name not in _NO_RUN_NAME:
            return Path("runs") / name
    return Path("runs") / "latest"


def _flag(metavar: str) -> dict[str, Any]:
    """Metadata by which upstream's factory names the value of a flag in the help."""
    return {"argparse_meta": {"metavar": metavar}}


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraulisConfig:
    """Balanced training over variable-length sequences."""

    strategy: str | None = field(default=None, metadata=_flag("SPEC"))
    """Replicas and the ranks they run on, for example 'tp4+2*tp2pp2' or 'tp2@0,3+pp2:5,3@1,2';
    every rank is used or named idle. Default: equal replicas of Megatron's tensor, pipeline and
    context parallel sizes, each 1 unless given."""

    strategy_pool: Path | None = field(default=None, metadata=_flag("FILE"))
    """Pool file: strategies of which each iteration uses the one whose plan is predicted to be
    fastest; or auto, a pool that is proposed at the first start from the lengths of the training
    data, and kept in the run folder. Default: one strategy."""

    strategy_schedule: str | None = field(default=None, metadata=_flag("NAMES"))
    """Names of strategies of the pool, for example 'short,long,short', which training iterations
    use in turn; evaluation does not. Default: the planner chooses."""

    balance_pipeline_layers: bool = False
    """Choose the layers of each pipeline stage wherever a scheme lists none, so that the slowest
    stage is as fast as possible and --seq-length still fits. Default: layers are split evenly."""

    regroup_owners_for: str | None = field(default=None, metadata=_flag("STRATEGY"))
    """Strategy of the pool, best the most frequent one, that regroups with the fewest bytes, as
    ranks own the shards that they use in it. Default: rank r owns share r."""

    ranks_per_node: int | None = field(default=None, metadata=_flag("N"))
    """Number of ranks per node (ranks). Default: LOCAL_WORLD_SIZE, else 8, or all of a smaller
    job."""

    elastic: bool = False
    """Continue with any number of ranks, as by torchrun --nnodes MIN:MAX: strategies are adapted or
    dropped, and the log says which. Default: a wrong number of ranks is an error."""

    global_batch_tokens: int | None = field(default=None, metadata=_flag("N"))
    """Size of a global batch (tokens), instead of --global-batch-size in sequences. A sequence that
    does not fit waits for the next batch. Default: --global-batch-size."""

    long_sequences: LongSequences = "split"
    """What to do with a sequence longer than --seq-length (tokens): split it into several, truncate
    it, drop it, or stop with an error. The log says how many there were. Default: split."""

    loss_normalization: LossNormalization = "token"
    """Weight of a token in the loss: that in the data's .weights file, or 1; or this divided by its
    sum over the document, so that each sequence counts the same, the parts of a split one together.
    Default: token, the former."""

    max_tokens_per_micro_batch: int | None = field(default=None, metadata=_flag("N"))
    """Most tokens in one micro-batch, padding included (tokens); where a replica such as cp8~
    splits its cp ranks, a group of c ranks holds c/8 of it. Default: the limit of the memory model
    or the cost profile for each scheme."""

    row_quantum_tokens: int | None = field(default=None, metadata=_flag("N"))
    """Round every row up to a multiple of N tokens, but not beyond its limit, so that rows have few
    different sizes (tokens); 1 adds no padding. Default: 128 with CUDA, where kernels may be
    prepared for each new size, else 1."""

    loss_chunk_tokens: int | None = field(default=None, metadata=_flag("N"))
    """Tokens of a row whose logits exist at the same time (tokens); the backward computes the
    logits of a row of several such chunks again. Default: as many as make 1 GiB of fp32 logits on
    a rank."""

    fs_prefetch: int = field(default=1, metadata=_flag("N"))
    """Weights gathered ahead where cp ranks share them, as in cp8fs (layers); each takes memory for
    one. Default: 1."""

    memory_trial: Literal["auto", "on", "off"] = "auto"
    """Before the first iteration, run the largest micro-batch of each strategy without training,
    and reduce limits that exceed the available memory. Default: auto, on with CUDA and off
    without."""

    core_attention: Literal["auto", CoreAttentionName] = "auto"
    """Transformer Engine's or torch's variable-length kernel, which need CUDA and bf16, or
    scaled_dot_product_attention sequence by sequence, which runs everywhere. Default: auto, the
    first of these that is available; the log says which and why."""

    no_sequence_parallel: bool = False
    """Turn sequence parallelism off. Default: on wherever a replica has tp > 1."""

    no_regroup_overlap: bool = False
    """Gather before the first forward and scatter after the last backward; the results are the same
    bit by bit. For comparison. Default: both overlap compute."""

    cost_profile: Path | None = field(default=None, metadata=_flag("FILE"))
    """Measured times and limits of every scheme. Default: the analytic cost model."""

    report_drift: float | None = field(default=None, metadata=_flag("X"))
    """Measure every micro-batch, and name in the log schemes whose times differ from predicted ones
    by more than this share, for example 0.1, and ranks that are slower than their like by as much.
    Default: neither."""

    plan_ahead: int = field(default=2, metadata=_flag("K"))
    """Iterations planned ahead of training, in a separate process (iterations); 0 plans each
    iteration when it begins. Default: 2."""

    plan_time_limit: float | None = field(default=None, metadata=_flag("SECONDS"))
    """Wall-clock limit for planning one iteration (s): when it is reached, the best plan so far is
    used, marked and counted. Another run may find another plan. Default: none; the search ends by
    itself."""

    plan_dir: Path | None = field(default=None, metadata=_flag("DIR"))
    """Folder for the plans, one JSON file per iteration. Default: not written."""

    replay_plans: Path | None = field(default=None, metadata=_flag("DIR"))
    """Folder that --plan-dir of an earlier run wrote: use its plans instead of making new ones.
    Default: plan."""

    run_dir: Path = field(default_factory=default_run_dir, metadata=_flag("DIR"))
    """Folder of the run: metrics.jsonl, TensorBoard events, summary, resolved configuration.
    Default: runs/<Slurm job or torchrun run id>, else runs/latest."""

    console: Literal["megatron", "compact"] = "megatron"
    """Lines of the log: Megatron's, with this program's fields behind; or compact, at most 120
    columns. TensorBoard and the run folder are the same. Default: megatron."""

    trace: Path | None = field(default=None, metadata=_flag("DIR"))
    """Folder for a trace for Perfetto or Chrome: planned and measured spans of every rank.
    Default: not written."""

    trace_iterations: str | None = field(default=None, metadata=_flag("FIRST..LAST"))
    """Iterations that --trace records, for example 101..105. Default: the first 20 that this start
    of the run trains."""

    keep_last: int | None = field(default=None, metadata=_flag("K"))
    """Newest checkpoints kept in --save (checkpoints); older ones are deleted. Default: all."""

    take_over_save: bool = False
    """Write to --save, --run-dir, --trace and --plan-dir at once although another job seems to
    write there; the log names that job. Default: watch for 180 s whether it is running, which is
    an error."""

    load_fallback: bool = False
    """If the checkpoint that --load names is damaged or incomplete, load the newest earlier one
    that is complete, with a warning. Default: stop with an error."""

    allow_other_data: bool = False
    """Resume although the training data are not those of the checkpoint: at the same place if
    datasets and shares have the same sizes, else with their first sequence. Default: other data
    are an error."""

    allow_changed_settings: bool = False
    """Resume although settings on which the update depends, such as --clip-grad, --bf16 or the
    global batch, are not those of the checkpoint. The learning-rate schedule has Megatron's own
    flags. Default: such a change is an error; the log names all others."""

    skip_nan_iterations: bool = False
    """Skip the update of an iteration whose loss or gradient norm is not finite, and continue.
    Default: stop with an error that names the iteration and its sequences."""

    max_skipped_in_a_row: int = field(default=10, metadata=_flag("K"))
    """With --skip-nan-iterations: updates that may be skipped in a row before the run stops with an
    error (iterations). Default: 10."""

    dry_run: bool = False
    """Print the resolved configuration, replicas with their ranks, parameters per rank, the most
    tokens of a micro-batch and what the corpus contains, then exit. One process is enough."""

    device: str | None = field(default=None, metadata=_flag("NAME"))
    """Device of the job that --dry-run describes, for example h100; a --cost-profile has its own
    times and limits. Default: this machine's."""

    num_ranks: int | None = field(default=None, metadata=_flag("N"))
    """Number of ranks of the job that --dry-run describes (ranks). Default: WORLD_SIZE; on one
    process, those of --strategy."""

    hf: Path | None = field(default=None, metadata=_flag("DIR"))
    """Hugging Face folder of model, tokenizer and dtype; given flags win, but may not contradict
    the weights, with which a run without checkpoint begins. Default: flags describe the model."""

    lora_rank: int | None = field(default=None, metadata=_flag("N"))
    """Train adapters of this rank (rows of A), and nothing else: LoRA. Default: train the
    model."""

    lora_alpha: float | None = field(default=None, metadata=_flag("X"))
    """An adapter's output is multiplied by X / N. Default: 32."""

    lora_targets: list[str] | None = field(default=None, metadata=_flag("NAME"))
    """Layers that have adapters, such as linear_qkv or q_proj. Default: all-linear, without the
    output layer."""

    ignore_unknown_options: bool = False
    """Go on without options that neither Megatron nor this program knows, such as those of a fork.
    They may change the model: the log lists each. Default: such an option is an error."""

    @property
    def scheduled_strategies(self) -> tuple[str, ...]:
        """The names in --strategy-schedule, in order; none without it.

        Raises ConfigurationError for an empty name.
        """
        if self.strategy_schedule is None:
            return ()
        names = tuple(name.strip() for name in self.strategy_schedule.split(","))
        if not all(names):
            raise ConfigurationError(
                f"--strategy-schedule is a list of names separated by commas but is "
                f"{self.strategy_schedule!r}; write for example 'short,long,short'"
            )
        return names

    @property
    def trace_window(self) -> TraceWindow | None:
        """The iterations of --trace-iterations; None without it. Raises ConfigurationError."""
        if self.trace_iterations is None:
            return None
        return TraceWindow.parse(self.trace_iterations)

    def lora(self, shape: ModelShape) -> Lora | None:
        """The adapters that a model of this shape is trained with; None without --lora-rank.

        Raises ConfigurationError for targets that it has not, and for flags without effect.
        """
        if self.lora_rank is None:
            for option, value in (
                ("--lora-alpha", self.lora_alpha),
                ("--lora-targets", self.lora_targets),
            ):
                if value is not None:
                    raise ConfigurationError(
                        f"{option} describes adapters but there are none without --lora-rank; add "
                        f"--lora-rank N, or remove {option}"
                    )
            return None
        alpha = DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha
        return Lora.resolve(self.lora_rank, alpha, self.lora_targets or (), shape)

    @property
    def sequence_parallel(self) -> bool:
        """True if replicas with tp > 1 use sequence parallelism."""
        return not self.no_sequence_parallel


_FIRST_OF_TOPIC = {
    "strategy": "Strategies",
    "global_batch_tokens": "Batches and memory",
    "cost_profile": "Planning and costs",
    "run_dir": "Run folder, traces, faults",
    "dry_run": "Without training",
    "hf": "Models and launch scripts of others",
}
"""First field of HydraulisConfig on a topic -> the topic; fields of one topic follow each other."""


def _fields_by_topic() -> dict[str, tuple[str, ...]]:
    topics: dict[str, tuple[str, ...]] = {}
    topic = ""
    for each in fields(HydraulisConfig):
        topic = _FIRST_OF_TOPIC.get(each.name, topic)
        topics[topic] = (*topics.get(topic, ()), each.name)
    return topics


FIELDS_BY_TOPIC: Mapping[str, tuple[str, ...]] = MappingProxyType(_fields_by_topic())
"""Topic -> fields of HydraulisConfig, as --help and docs/flags.md show them."""


def option_of(name: str) -> str:
    """The flag of a field: ``run_dir`` is ``--run-dir``."""
    return "--" + name.replace("_", "-")


def typed(args: argparse.Namespace, name: str) -> str:
    """The flag of a setting with its value, as one would type it."""
    value = getattr(args, name)
    values = [] if value is True else value if isinstance(value, list) else [value]
    return shlex.join((option_of(name), *map(str, values)))
