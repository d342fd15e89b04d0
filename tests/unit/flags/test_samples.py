"""Training by samples: sizes, iterations and learning rates against upstream's own functions."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from megatron.core import num_microbatches_calculator as upstreams_batches
from megatron.training import training
from megatron.training.global_vars import set_args, unset_global_variables

from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler, SequenceGroup
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.describe import length_text
from megatron.hydraulis.flags.samples import counts_iterations, num_iterations
from tests.unit.flags.argument_command import parse

SCHEDULE = "0:2 2K:4 5K:8"
"""Of rows of 128 tokens: 2, 4 from 15 samples on, 8 from 39 on."""
RATES = (
    *("--lr", "1e-2", "--min-lr", "1e-3", "--lr-warmup-init", "1e-4"),
    *("--decoupled-lr", "3e-2", "--decoupled-min-lr", "2e-3"),
    *("--weight-decay-incr-style", "cosine"),
    *("--start-weight-decay", "0.01", "--end-weight-decay", "0.2"),
)


def resolve(folder: Path, *flags: str) -> Resolved:
    """A run by samples, with the size of the batch among the flags."""
    return parse(folder, *flags, without=("--train-iters", "--global-batch-size"))


@pytest.fixture
def upstream() -> Iterator[None]:
    """Upstream's process-wide variables, unset before and after."""
    upstreams_batches.unset_num_microbatches_calculator()
    unset_global_variables()
    yield
    upstreams_batches.unset_num_microbatches_calculator()
    unset_global_variables()


class Scheduled:
    """Upstream's schedule over a parameter group with its rates and one with decoupled ones."""

    def __init__(self, args: Namespace) -> None:
        decoupled = {"max_lr": args.decoupled_lr, "min_lr": args.decoupled_min_lr}
        self.groups: list[dict[str, Any]] = [{}, decoupled]
        self.scheduler = training.get_optimizer_param_scheduler(
            SimpleNamespace(param_groups=self.groups)
        )

    def step(self, increment: float) -> tuple[float, ...]:
        self.scheduler.step(increment)
        return tuple(group[key] for group in self.groups for key in ("lr", "weight_decay"))


def upstreams_run(resolved: Resolved) -> tuple[list[int], list[tuple[float, ...]]]:
    """Sizes of the batches and rates after each, as upstream's training loop has them."""
    args = Namespace(**vars(resolved.args))
    args.step_batch_size_schedule = resolved.as_given["step_batch_size_schedule"]
    set_args(args)
    upstreams_batches.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=args.global_batch_size,
        micro_batch_size=1,
        data_parallel_size=1,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    scheduled = Scheduled(args)
    sizes: list[int] = []
    rates = []
    for _ in range(args.train_iters):
        upstreams_batches.update_num_microbatches(sum(sizes), consistency_check=True)
        sizes.append(upstreams_batches.get_num_microbatches())
        rates.append(scheduled.step(sizes[-1]))
    return sizes, rates


@pytest.mark.parametrize(
    "flags",
    [
        "--global-batch-size 6 --lr-decay-style cosine --lr-warmup-samples 20",
        "--global-batch-size 6 --lr-decay-samples 70 --lr-warmup-fraction 0.2",
        f"--step-batch-size-schedule {SCHEDULE.replace(' ', ',')} --lr-warmup-samples 13 "
        "--lr-decay-style WSD --lr-wsd-decay-samples 30 --lr-wsd-decay-style minus_sqrt",
    ],
)
def test_sizes_iterations_and_rates_are_upstreams(
    flags: str, tmp_path: Path, upstream: None
) -> None:
    resolved = resolve(tmp_path, "--train-samples", "100", *flags.split(), *RATES)
    theirs, their_rates = upstreams_run(resolved)
    sizes = resolved.sizes
    assert len(theirs) == num_iterations(resolved.args, sizes)
    sampler = LengthSampler(np.full(7, 5), [SequenceGroup(0, 7, 1.0)], seed=1, sizes=sizes)
    batches = [sampler.next_batch() for _ in theirs]
    assert [batch.num_sequences for batch in batches] == theirs
    unset_global_variables()
    args = Namespace(**vars(resolved.args))
    set_args(args)
    scheduled = Scheduled(args)
    assert [scheduled.step(sizes.num_consumed(batch)) for batch in batches] == their_rates


@pytest.mark.parametrize("size", ["--global-batch-size 8", "--global-batch-tokens 1024"])
@pytest.mark.parametrize(
    ("growth", "num_samples"),
    [("--step-batch-size-schedule 0:2,2K:4,5K:8", 72), ("--rampup-batch-size 2 2 12", 126)],
)
def test_with_iterations_growth_leaves_the_rates_of_a_constant_batch(
    growth: str, num_samples: int, size: str, tmp_path: Path, upstream: None
) -> None:
    """2 · 8 + 4 · 6 + 8 · 4 samples in 18 iterations, and 2 · 2 + 4 + 6 + 8 · (18 - 4)."""
    typed = ("--train-iters", "18", "--lr-warmup-iters", "3", "--lr-decay-style", "cosine", *RATES)
    _, theirs = upstreams_run(parse(tmp_path, *typed))
    unset_global_variables()
    without = ("--global-batch-size",)
    resolved = parse(tmp_path, *typed, *growth.split(), *size.split(), without=without)
    scale = 128 if resolved.sizes.in_tokens else 1
    assert resolved.sizes.num_consumed_by(18) == num_samples * scale
    assert f"--train-samples {num_samples}" in length_text(resolved, 50.0)
    args = Namespace(**vars(resolved.args))
    set_args(args)
    scheduled = Scheduled(args)
    assert counts_iterations(number_varies=resolved.sizes.number_varies, by_samples=False)
    ours = [scheduled.step(1) for _ in range(18)]
    assert np.asarray(ours) == pytest.approx(np.asarray(theirs), rel=1e-12)
    (difference,) = (d for d in resolved.differences if growth in str(d).replace(" 2K", ",2K"))
    assert "the learning rate goes by iterations" in difference.why


def ramp_of_earlier_versions(
    start: int, increment: int, ramp: int, full: int, consumed: int
) -> int:
    """The rule of upstream's RampupBatchsizeNumMicroBatchesCalculator, until it was removed."""
    if consumed > ramp:
        return full
    return start + int(consumed / (ramp / ((full - start) / increment))) * increment


@pytest.mark.parametrize("ramp", [(2, 2, 12, 8), (1, 1, 100, 8), (4, 8, 3, 36), (16, 16, 640, 64)])
def test_a_ramp_is_that_of_earlier_versions(ramp: tuple[int, ...], tmp_path: Path) -> None:
    start, increment, num_samples, full = ramp
    typed = ("--rampup-batch-size", str(start), str(increment), str(num_samples))
    ends = ("--train-samples", "1000")
    resolved = resolve(tmp_path, *ends, *typed, "--global-batch-size", str(full))
    (growth,) = (str(each) for each in resolved.differences if "--rampup" in each.typed)
    assert f"{' '.join(typed)}: the global batch grows, whereas Megatron 0.19.2" in growth
    assert resolved.taken == ()
    rows = resolved.sizes
    tokens = resolve(tmp_path, *ends, *typed, "--global-batch-tokens", str(full * 128)).sizes
    for consumed in range(num_samples + 3):
        wanted = ramp_of_earlier_versions(start, increment, num_samples, full, consumed)
        assert rows.after(consumed) == wanted
        assert tokens.after(consumed * 128) == wanted * 128


@pytest.mark.parametrize(
    ("num_samples", "wanted"),
    [
        (4, [4]),
        (7, [4]),
        (22, [4, 4, 8]),
        (27, [4, 4, 8]),
        (60, [4, 4, 8, 12, 16, 16]),
        (70, [4, 4, 8, 12, 16, 16]),
        (76, [4, 4, 8, 12, 16, 16, 16]),
    ],
)
def test_a_ramp_never_leads_beyond_the_end(
    num_samples: int, wanted: list[int], tmp_path: Path
) -> None:
    ramp = ("--rampup-batch-size", "4", "4", "24", "--global-batch-size", "16")
    resolved = resolve(tmp_path, "--train-samples", str(num_samples), *ramp)
    num_consumed = 0
    for num_done, size in enumerate(wanted):
        num_left = num_iterations(resolved.args, resolved.sizes, num_consumed)
        assert num_left == len(wanted) - num_done
        num_consumed += resolved.sizes.after(num_consumed)
        assert size == num_consumed - sum(wanted[:num_done])
    assert num_iterations(resolved.args, resolved.sizes, num_consumed) == 0


def test_a_constant_size_counts_what_was_consumed_in_another(tmp_path: Path) -> None:
    by_size = resolve(tmp_path, "--train-samples", "12800", "--global-batch-size", "128")
    left = [num_iterations(by_size.args, by_size.sizes, n) for n in (0, 6400, 12672, 12673, 12800)]
    assert left == [100, 50, 1, 0, 0]


@pytest.mark.parametrize(
    "flags", ["--global-batch-size 16", "--rampup-batch-size 8 4 9 --global-batch-size 16"]
)
def test_training_has_a_batch(flags: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one global batch or more but --train-samples is"):
        resolve(tmp_path, "--train-samples", "7", *flags.split())


def test_samples_are_tokens_under_a_token_budget(tmp_path: Path) -> None:
    sizes = resolve(
        tmp_path,
        *("--train-samples", "100", "--step-batch-size-schedule", SCHEDULE),
        *("--global-batch-tokens", "1024", "--eval-interval", "3", "--eval-global-batch-size", "3"),
    )
    assert sizes.sizes == BatchSizes(((0, 256), (15 * 128, 512), (39 * 128, 1024)), in_tokens=True)
    assert sizes.as_given["step_batch_size_schedule"] == SCHEDULE, "or a change would go unnoticed"
    assert sizes.evaluation_sizes == BatchSizes(((0, 384),), in_tokens=True)


def test_sampling_goes_on_with_the_size_at_which_it_was_interrupted() -> None:
    sizes = BatchSizes(((0, 2), (5, 3), (11, 8)))

    def fresh() -> LengthSampler:
        return LengthSampler(np.arange(1, 31), [SequenceGroup(0, 30, 1.0)], seed=3, sizes=sizes)

    whole, again = fresh(), fresh()
    batches = [whole.next_batch() for _ in range(6)]
    assert [batch.num_sequences for batch in batches] == [2, 2, 2, 3, 3, 8]
    states = []
    for batch in batches:
        assert again.next_batch() == batch
        states.append(again.state_dict())
        again = fresh()
        again.load_state_dict(states[-1])
    assert [state["num_sequences"] for state in states] == [2, 4, 6, 9, 12, 20]
    assert states[2]["num_tokens"] == sum(batch.num_tokens for batch in batches[:3])


@pytest.mark.parametrize("in_tokens", [False, True])
def test_what_megatron_has_consumed_counts(in_tokens: bool) -> None:
    sampler = LengthSampler(
        np.ones(30, dtype=int),
        [SequenceGroup(0, 30, 1.0)],
        seed=3,
        sizes=BatchSizes(((0, 2), (5, 3), (11, 8)), in_tokens),
        num_consumed_sequences=0 if in_tokens else 10,
        num_consumed_tokens=10 if in_tokens else 0,
    )
    assert [sampler.next_batch().num_sequences for _ in range(2)] == [3, 8]


def test_log_and_dry_run_say_how_long_training_is_here_and_in_megatron(tmp_path: Path) -> None:
    by_size = resolve(tmp_path, "--train-samples", "100", "--global-batch-size", "8")
    text = "100 sequences, about 5,000 tokens, in 12 iterations; .* 12,800 tokens"
    assert re.match(text, length_text(by_size, 50.0))
    by_tokens = resolve(
        tmp_path,
        *("--train-samples", "100", "--step-batch-size-schedule", SCHEDULE),
        *("--global-batch-tokens", "1024"),
    )
    text = "12,800 tokens, the 100 samples .* at least 22 iterations"
    assert re.match(text, length_text(by_tokens, 50.0))
    assert re.search("256 .* 2 times, .* 4,992 tokens", by_tokens.sizes.text(50.0, 128))
    assert length_text(parse(tmp_path), 50.0) == ""
