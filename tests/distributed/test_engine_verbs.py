"""The verbs of a Python program: the losses of fine-tuning and RL under every kind of strategy.

The reference is upstream's whole model on one process, sequence by sequence, with losses for one
sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.library.batches import Batch, TokenSequence
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.runtime.outcome import LossTotal
from megatron.hydraulis.runtime.process_groups import provide_memory_buffer
from megatron.hydraulis.runtime.token_loss import Segments
from megatron.hydraulis.strategy import Pool
from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of
from tests.support.law import FP64_TOLERANCE, SHORT_MODEL
from tests.support.models import (
    Job,
    RankRun,
    SmallModel,
    assemble,
    build_engine,
    rank_run,
    sequences,
    use_fp64_loss,
)
from tests.support.planning import TableCostModel
from tests.support.reference import build_upstream_model

pytestmark = pytest.mark.distributed

LENGTHS = [17, 5, 9, 30, 3, 12, 8, 21]
"""Tokens to predict of each sequence."""
STRATEGIES = ("4*tp1", "tp2+2*tp1", "tp2pp2", "2*cp2", "cp4~", "pp2+tp1+idle", "cp4~fs", "tp2cp2fs")
LIMIT = 40
TEMPERATURE = 0.6
CLIP, EPSILON = 0.2, 1e-3


# --- losses, as users write them ---


def ppo(log_probs: Tensor, entropy: Tensor, inputs: Mapping[str, Tensor], _: Segments) -> Tensor:
    ratio = (log_probs - inputs["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, clipped * advantages) - EPSILON * entropy


def gspo(log_probs: Tensor, entropy: Tensor, inputs: Mapping[str, Tensor], of: Segments) -> Tensor:
    mask = inputs["mask"]
    mean = of.sum(mask * (log_probs - inputs["old"])) / of.sum(mask)
    ratio = mean.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    advantages = inputs["advantages"]
    return -torch.minimum(ratio * advantages, clipped * advantages)


def dpo(
    log_probs: Sequence[Tensor], references: Sequence[Tensor], masks: Sequence[Tensor]
) -> Tensor:
    """Of pairs of a chosen and a rejected sequence, which follow each other."""
    pairs = zip(log_probs, references, masks, strict=True)
    gains = torch.stack([(mask * (own - old)).sum() for own, old, mask in pairs])
    return -torch.nn.functional.logsigmoid(0.1 * (gains[0::2] - gains[1::2])).mean()


def distillation(
    log_probs: Tensor, entropy: Tensor, inputs: Mapping[str, Tensor], _: Segments
) -> Tensor:
    """Divergence from a teacher over the tokens that it finds most likely."""
    teacher = inputs["teacher"]
    return (teacher.exp() * (teacher - inputs["token_log_probs"])).sum(dim=1) - 0.1 * log_probs


def negative(log_probs: Tensor, *_: Any) -> Tensor:
    return -log_probs


def negative_alone(log_probs: Tensor, entropy: Tensor | None, *_: Any) -> Tensor:
    assert entropy is None
    return -log_probs


# --- on every rank ---


def rollout() -> list[TokenSequence]:
    """Responses with advantages; weights of 0 for prompts, 1 sequence without any weight."""
    rng = np.random.default_rng(5)
    found = []
    for number, tokens in enumerate(sequences(rng, LENGTHS, SHORT_MODEL.vocab_size)):
        prompt = 1 + number % 3
        mask = np.ones(len(tokens))
        mask[:prompt] = 0
        weights = mask * (number != 4)
        found.append(
            TokenSequence(
                tokens,
                weights.astype(np.float32),
                {
                    "mask": torch.from_numpy(mask.astype(bool)),
                    "advantages": torch.full(
                        (len(tokens),), float(rng.normal()), dtype=torch.float64
                    ),
                    "old": torch.from_numpy(rng.normal(-4.0, 0.3, len(tokens))),
                },
            )
        )
    return found


def make_engine(texts: Sequence[str] = STRATEGIES, model: SmallModel = SHORT_MODEL) -> Engine:
    if model.dtype == torch.float64:
        use_fp64_loss()
    job = Job(model, tuple(texts), (), (), (), num_atoms=8)
    runtime = build_engine(job)
    cost_model = TableCostModel(default_limit=LIMIT)
    limits = Limits(cost_model)
    return Engine(runtime, GreedyPlanner(runtime.pool, cost_model, limits), limits)


def in_strategy(engine: Engine, name: str) -> Engine:
    """The same model, planned in one strategy of its pool."""
    pool = Pool.of(engine.runtime.pool.strategy(name))
    planner = GreedyPlanner(pool, engine._limits.cost_model, engine._limits)
    return Engine(engine.runtime, planner, engine._limits)


def sequence_mean(found: list[TokenSequence]) -> list[TokenSequence]:
    return [
        replace(each, weights=each.weights / max(1.0, float(each.weights[1:].sum())))
        for each in found
    ]


def taught(sequence: TokenSequence) -> TokenSequence:
    """With a teacher's three tokens, of which one is the label, and their log-probabilities."""
    ids = torch.from_numpy(sequence.tokens)[:, None] + torch.tensor([0, 7, 31])
    generator = torch.Generator().manual_seed(len(ids))
    teacher = torch.randn(ids.shape, generator=generator, dtype=torch.float64) - 3.0
    inputs = {"token_ids": ids % SHORT_MODEL.vocab_size, "teacher": teacher}
    return replace(sequence, inputs=inputs)


def squared(outputs: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """Couples everything with everything."""
    sums = [torch.cat([each.flatten() for each in rows]).sum() for rows in outputs.values()]
    return 1e-3 * (sums[0] * sums[1])


def train_pairs(engine: Engine, batch: Batch, found: Sequence[TokenSequence]) -> float:
    """The loss. Weights, of which some are 0, play no part."""
    references, masks = ([each.inputs[name] for each in found] for name in ("old", "mask"))
    return engine.batch_loss(batch, lambda outputs: dpo(outputs["log_probs"], references, masks))


def gradients_of(engine: Engine, case: str) -> np.ndarray:
    """This rank's undivided gradients of a case."""
    found = rollout()
    if case == "dpo":
        train_pairs(engine, engine.plan(found, mini_batches=2), found)
    elif case == "distillation of pairs":
        batch = engine.plan([taught(each) for each in found])
        engine.batch_loss(batch, squared, ("log_probs", "token_log_probs"))
    elif case == "distillation":
        engine.forward_backward(engine.plan([taught(each) for each in found]), distillation)
    else:
        if case == "grpo, sequence means":
            found = sequence_mean(found)
        engine.forward_backward(engine.plan(found), gspo if case == "gspo" else ppo)
    gradients = engine.runtime.shards.gradients.clone().numpy()  # its storage is resized
    engine.runtime.discard_gradients()
    return gradients


CASES = ("ppo", "grpo, sequence means", "gspo", "dpo", "distillation", "distillation of pairs")


def run_cases() -> dict[str, RankRun]:
    """By case: gradients in each strategy."""
    engine = make_engine()
    return {
        case: rank_run(
            engine.runtime,
            [gradients_of(in_strategy(engine, name), case) for name in STRATEGIES],
            [],
            [],
            [],
        )
        for case in CASES
    }


# --- one process ---


def outputs_of(
    model: Any, tokens: np.ndarray, temperature: float = 1.0, token_ids: Tensor | None = None
) -> tuple[Tensor, ...]:
    """(n - 1,) log-probabilities and entropies, and (n - 1, k) log-probabilities of ids."""
    ids = torch.from_numpy(tokens)
    length = len(ids) - 1
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    logits = model(ids[None, :-1], torch.arange(length)[None], mask)[0]
    logs = (logits / temperature).log_softmax(-1)
    found = logs.gather(1, ids[1:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    return found if token_ids is None else (*found, logs.gather(1, token_ids[1:]))


def run_reference() -> dict[str, dict[str, np.ndarray]]:
    """By case: whole gradients."""
    use_fp64_loss()
    provide_memory_buffer()
    found = {}
    for case in CASES:
        model = build_upstream_model(SHORT_MODEL, Job(SHORT_MODEL, (), (), (), ()).seed)
        total = reference_loss(model, case)
        total.backward()
        found[case] = {name: each.grad.numpy() for name, each in model.named_parameters()}
    return found


def reference_loss(model: Any, case: str) -> Tensor:
    given = rollout()
    if case == "dpo":
        own = [outputs_of(model, each.tokens)[0] for each in given]
        references, masks = ([each.inputs[k][1:] for each in given] for k in ("old", "mask"))
        return dpo(own, references, masks)
    if case.startswith("distillation"):
        given = [taught(each) for each in given]
        outputs = [
            outputs_of(model, each.tokens, token_ids=each.inputs["token_ids"]) for each in given
        ]
        if case == "distillation of pairs":
            return squared(
                {"log_probs": [o[0] for o in outputs], "of ids": [o[2] for o in outputs]}
            )
        return sum(
            (
                torch.from_numpy(each.weights[1:]).double()
                @ distillation(
                    log_probs,
                    entropy,
                    {"teacher": each.inputs["teacher"][1:], "token_log_probs": of_ids},
                    None,  # type: ignore[arg-type]
                )
                for each, (log_probs, entropy, of_ids) in zip(given, outputs, strict=True)
            ),
            start=torch.zeros((), dtype=torch.float64),
        )
    total = torch.zeros((), dtype=torch.float64)
    for each in sequence_mean(given) if case == "grpo, sequence means" else given:
        log_probs, entropy = outputs_of(model, each.tokens)
        old, advantages, mask = (each.inputs[k][1:] for k in ("old", "advantages", "mask"))
        weights = torch.from_numpy(each.weights[1:]).double()
        if case == "gspo":
            ratio = ((mask * (log_probs - old)).sum() / mask.sum()).exp()
            surrogate = torch.minimum(
                ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            )
            total = total - (weights * surrogate).sum()
        else:
            ratio = (log_probs - old).exp()
            surrogate = torch.minimum(
                ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages
            )
            total = total - (weights * (surrogate + EPSILON * entropy)).sum()
    return total


@cache
def runs() -> tuple[list[dict[str, RankRun]], dict[str, dict[str, np.ndarray]]]:
    return pool_of(4).run(run_cases), pool_of(1).run(run_reference)[0]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process_in_every_strategy(case: str) -> None:
    of_ranks, reference = runs()
    mine = [of_rank[case] for of_rank in of_ranks]
    for i, strategy in enumerate(STRATEGIES):
        found = assemble(mine, [run.gradients[i] for run in mine])
        assert_same(found, reference[case], FP64_TOLERANCE, strategy)


@dataclass(frozen=True)
class VerbsProbe:
    """What a rank has seen."""

    outputs: dict[str, list[np.ndarray]]
    """Of a batch of two mini-batches."""
    of_share: list[np.ndarray]
    """Log-probabilities where each rank has given its share."""
    of_temperature: list[np.ndarray]
    """Log-probabilities at `TEMPERATURE`."""
    total: LossTotal
    """What the pass back at `TEMPERATURE` returns for two mini-batches."""
    num_other_ratios: dict[str, int]
    """By strategy: tokens whose ratio of probabilities is not exactly 1."""
    norms: tuple[float | None, ...]
    """With a divisor on the step, on each of two calls, and where each rank has given its share."""
    losses: tuple[float, ...]
    """Of three steps on one batch."""
    of_pairs: tuple[tuple[float, float | None], ...]
    """Loss and norm of pairs that all ranks give, and of those of which each has given one."""
    of_sums: tuple[tuple[float, float | None], ...]
    """Loss and norm of a sum of outputs, by two passes and by one."""
    of_ids: list[np.ndarray]
    """Log-probabilities of three ids in the place of each token at `TEMPERATURE`."""


def probe_verbs() -> VerbsProbe:
    engine = make_engine()
    found = rollout()
    batch = engine.plan(found, mini_batches=2)
    outputs = engine.forward(batch, ("log_probs", "entropy"))
    rank = engine.runtime.rank
    of_share = engine.forward(engine.plan(found[2 * rank : 2 * rank + 2], scatter=True))
    of_temperature = engine.forward(batch, temperature=TEMPERATURE)["log_probs"]
    of_ids = engine.forward(
        engine.plan([taught(each) for each in found]), "token_log_probs", temperature=TEMPERATURE
    )["token_log_probs"]
    total = engine.forward_backward(batch, negative, temperature=TEMPERATURE)
    engine.discard_gradients()
    num_others = {}
    for name in STRATEGIES:
        in_one = in_strategy(engine, name)
        planned = in_one.plan(found)
        planned = planned.with_inputs(old=in_one.forward(planned)["log_probs"])
        num_others[name] = 0

        def count(log_probs: Tensor, entropy: Tensor, inputs: Any, of: Segments) -> Tensor:
            if log_probs.any():  # unlike the check before the model runs
                ratios = (log_probs.detach() - inputs["old"]).exp()
                num_others[name] += int((ratios != 1).sum())  # noqa: B023
            return log_probs

        in_one.forward_backward(planned, count)
        engine.runtime.discard_gradients()
    engine.forward_backward(engine.plan(found[:3]), ppo)
    engine.forward_backward(engine.plan(found[3:]), ppo)
    norms = [engine.optim_step(lr=0.0, divisor=7.0)]
    engine.forward_backward(engine.plan(found[:3]), ppo, divisor=7.0)
    engine.forward_backward(engine.plan(found[3:]), ppo, divisor=7.0)
    norms.append(engine.optim_step())
    share = found[2 * rank : 2 * rank + 2]
    scattered = engine.plan([replace(each, inputs={}) for each in share], scatter=True)
    scattered = scattered.with_inputs(
        **{name: [each.inputs[name] for each in share] for name in ("old", "advantages")}
    )
    engine.forward_backward(scattered, ppo)
    norms.append(engine.optim_step(divisor=7.0))
    plain = [each.tokens for each in found]
    # A step needs no sums but those of its update.
    engine.runtime.loss_of_last = lambda _: pytest.fail("other sums")  # type: ignore[assignment]
    steps = [engine.train_step(plain, negative_alone, lr=0.01, entropy=False) for _ in range(3)]
    del engine.runtime.loss_of_last
    of_pairs = [(train_pairs(engine, engine.plan(found), found), engine.optim_step(lr=0.0))]
    loss = train_pairs(engine, engine.plan(share, scatter=True), share)
    of_pairs.append((loss, engine.optim_step()))

    def sums(outputs: Mapping[str, list[Tensor]]) -> Tensor:
        return sum(
            (k * row.sum() for k, rows in enumerate(outputs.values(), 2) for row in rows),
            start=torch.zeros(()),
        )

    of_sums = []
    for is_linear in (False, True):
        batch = engine.plan(found)
        loss = engine.batch_loss(
            batch, sums, ("log_probs", "entropy"), temperature=TEMPERATURE, is_linear=is_linear
        )
        of_sums.append((loss, engine.optim_step()))
    return VerbsProbe(
        {name: [each.numpy() for each in values] for name, values in outputs.items()},
        [each.numpy() for each in of_share["log_probs"]],
        [each.numpy() for each in of_temperature],
        total,
        num_others,
        tuple(norms),
        tuple(step.loss.mean for step in steps),
        tuple(of_pairs),
        tuple(of_sums),
        [each.numpy() for each in of_ids],
    )


def run_reference_outputs(temperature: float) -> list[tuple[np.ndarray, np.ndarray]]:
    use_fp64_loss()
    provide_memory_buffer()
    model = build_upstream_model(SHORT_MODEL, Job(SHORT_MODEL, (), (), (), ()).seed)
    with torch.no_grad():
        return [
            tuple(
                np.r_[0.0, each.numpy()] for each in outputs_of(model, sequence.tokens, temperature)
            )
            for sequence in rollout()
        ]


@cache
def probes() -> list[VerbsProbe]:
    return pool_of(4).run(probe_verbs)


def test_outputs_are_in_the_order_of_the_caller() -> None:
    reference = pool_of(1).run(run_reference_outputs, 1.0)[0]
    for rank, probe in enumerate(probes()):
        for i, name in enumerate(("log_probs", "entropy")):
            for found, expected in zip(probe.outputs[name], reference, strict=True):
                np.testing.assert_allclose(found, expected[i], rtol=0, atol=1e-10)
        own = reference[2 * rank : 2 * rank + 2]
        for found, expected in zip(probe.of_share, own, strict=True):
            np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-10)


def test_a_temperature_divides_the_logits_of_both_passes() -> None:
    reference = pool_of(1).run(run_reference_outputs, TEMPERATURE)[0]
    weights = [each.weights for each in rollout()]
    loss = -sum(float(w @ r[0]) for w, r in zip(weights, reference, strict=True))
    for probe in probes():
        for found, expected in zip(probe.of_temperature, reference, strict=True):
            np.testing.assert_allclose(found, expected[0], rtol=0, atol=1e-10)
        assert probe.total.loss_sum == pytest.approx(loss, rel=1e-10)
        assert probe.total.weight_sum == sum(float(each[1:].sum()) for each in weights)


def run_reference_ids() -> list[np.ndarray]:
    use_fp64_loss()
    provide_memory_buffer()
    model = build_upstream_model(SHORT_MODEL, Job(SHORT_MODEL, (), (), (), ()).seed)
    with torch.no_grad():
        return [
            outputs_of(model, each.tokens, TEMPERATURE, taught(each).inputs["token_ids"])[2].numpy()
            for each in rollout()
        ]


def test_log_probabilities_of_given_ids() -> None:
    reference = pool_of(1).run(run_reference_ids)[0]
    for probe in probes():
        for found, expected in zip(probe.of_ids, reference, strict=True):
            np.testing.assert_allclose(found[1:], expected, rtol=0, atol=1e-10)
            assert not found[0].any()


def test_the_ratio_of_an_unchanged_model_is_exactly_1() -> None:
    for probe in probes():
        assert probe.num_other_ratios == dict.fromkeys(STRATEGIES, 0)


def test_a_divisor_of_each_call_is_that_of_the_step() -> None:
    of_step, of_calls, _ = probes()[0].norms
    assert of_step == pytest.approx(of_calls, rel=1e-12)


def test_inputs_of_shares_are_those_of_all() -> None:
    of_all, _, of_shares = probes()[0].norms
    assert of_all == pytest.approx(of_shares, rel=1e-12)


def test_pairs_of_shares_are_those_of_all() -> None:
    """A rank's loss is the mean over its pairs, of which there are four in all."""
    for probe in probes():
        (loss, norm), of_shares = probe.of_pairs
        assert norm is not None
        assert of_shares == pytest.approx((4 * loss, 4 * norm), rel=1e-12)


def test_a_linear_loss_needs_one_pass() -> None:
    for probe in probes():
        by_two, by_one = probe.of_sums
        assert by_one == pytest.approx(by_two, rel=1e-12)


def test_steps_train() -> None:
    for probe in probes():
        assert probe.losses == probes()[0].losses
        assert probe.losses[2] < probe.losses[1] < probe.losses[0]


def mean_loss(log_probs: Tensor, *_: Any) -> Tensor:
    return -log_probs.mean()


def detached_loss(log_probs: Tensor, *_: Any) -> Tensor:
    return -log_probs.detach()


def largest_loss(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.max() - log_probs


def minus_entropy(log_probs: Tensor, entropy: Tensor, *_: Any) -> Tensor:
    return log_probs - entropy


def summed_loss(log_probs: Tensor, _: Any, __: Any, segments: Segments) -> Tensor:
    return segments.sum(log_probs[:, None])


def complex_loss(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs * (1.0 + 2.0j)


def errors() -> dict[str, str]:
    """On every rank: the message of each wrong use."""
    engine = make_engine()
    rank = engine.runtime.rank
    tokens = rollout()[0].tokens
    ones = np.ones(len(tokens), dtype=np.float32)
    batch = engine.plan([tokens])

    def divide_twice() -> None:
        engine.forward_backward(batch, scaled_by_1, divisor=2.0)
        try:
            engine.optim_step(divisor=2.0)
        finally:
            engine.discard_gradients()

    def load_while_gradients_wait() -> None:
        engine.forward_backward(batch, scaled_by_1)
        try:
            engine.load("checkpoints")
        finally:
            engine.discard_gradients()

    scattered = engine.plan([tokens], scatter=True)
    wrong: dict[str, Callable[[], Any]] = {
        "mean": lambda: engine.forward_backward(batch, mean_loss),
        "no tokens": lambda: engine.forward_backward(batch, largest_loss),
        "shape of a sum": lambda: engine.forward_backward(batch, summed_loss),
        "detached": lambda: engine.forward_backward(batch, detached_loss),
        "missing input": lambda: engine.forward_backward(batch, ppo),
        "two divisors": divide_twice,
        "too long": lambda: engine.plan([np.zeros(9 * LIMIT, dtype=np.int64)]),
        "other sequences": lambda: engine.plan([tokens[: 3 + rank // 3]]),
        "other inputs": lambda: engine.plan(
            [TokenSequence(tokens, inputs={"a": torch.full([len(tokens)], float(rank == 1))})]
        ),
        "other vocabulary": lambda: engine.plan([tokens, [1, 99 if rank == 2 else 2]]),
        "weights": lambda: engine.plan([TokenSequence(tokens, -ones)]),
        "inputs of one": lambda: engine.plan(
            [tokens, TokenSequence(tokens, inputs={"a": torch.from_numpy(ones)})]
        ),
        "mini-batches": lambda: engine.plan([tokens], mini_batches=2),
        "outputs": lambda: engine.forward(batch, ("logits",)),
        "no outputs": lambda: engine.forward(batch, ()),
        "no ids": lambda: engine.forward(batch, "token_log_probs"),
        "ids of others": lambda: engine.forward_backward(
            batch.with_inputs(token_ids=[np.full((len(tokens), 2), 61)]), negative
        ),
        "0 ids": lambda: engine.forward(
            batch.with_inputs(token_ids=[np.zeros((len(tokens), 0), dtype=int)]), "token_log_probs"
        ),
        "log-probs of a teacher": lambda: engine.forward_backward(
            batch.with_inputs(
                token_ids=[np.zeros((len(tokens), 2), dtype=int)],
                token_log_probs=[np.zeros((len(tokens), 2))],
            ),
            negative,
        ),
        "outputs twice": lambda: engine.forward(batch, ("entropy", "entropy")),
        "other outputs": lambda: engine.forward(batch, "entropy" if rank == 1 else "log_probs"),
        "dtypes": lambda: engine.plan([tokens] * 2).with_inputs(a=[ones, ones.astype(int)]),
        "shapes": lambda: engine.plan(
            [
                TokenSequence(tokens, inputs={"a": torch.from_numpy(a)})
                for a in (ones, np.stack([ones] * 2, axis=1))
            ]
        ),
        "other names": lambda: scattered.with_inputs(**{"b" if rank == 2 else "a": [ones]}),
        "inputs of all": lambda: scattered.with_inputs(a=[ones] * (4 if rank == 3 else 1)),
        "other divisor": lambda: engine.forward_backward(
            batch, scaled_by_1, divisor=2.0 if rank else 1.0
        ),
        "divisor of one": lambda: engine.forward_backward(
            batch, scaled_by_1, divisor=0.0 if rank == 1 else 1.0
        ),
        "temperature": lambda: engine.forward(batch, temperature=0.0),
        "lr of one": lambda: engine.train_step([tokens], scaled_by_1, lr=-1.0 if rank == 1 else 1),
        "other lr": lambda: engine.optim_step(lr=0.5 if rank == 2 else 1.0),
        "no entropy": lambda: engine.forward_backward(batch, minus_entropy, entropy=False),
        "complex loss": lambda: engine.forward_backward(batch, complex_loss),
        "no loss": lambda: engine.forward_backward(batch, None),  # type: ignore[arg-type]
        "no batch": lambda: engine.forward([tokens]),  # type: ignore[arg-type]
        "no batch to train": lambda: engine.forward_backward(3, negative),  # type: ignore[arg-type]
        "other batch": lambda: engine.forward(scattered if rank == 1 else batch),
        "no outputs but a number": lambda: engine.forward(batch, 5),  # type: ignore[arg-type]
        "no sequences": lambda: engine.plan(None),  # type: ignore[arg-type]
        "0 sequences": lambda: engine.plan([]),
        "a text": lambda: engine.plan("tokens"),
        "rows of texts": lambda: engine.plan([["a", "b"]]),
        "ragged": lambda: engine.plan([[[1], [2, 3]]]),
        "scatter of one": lambda: engine.plan([tokens], scatter=rank == 2),
        "half a mini-batch": lambda: engine.plan([tokens], mini_batches=0.5),  # type: ignore[arg-type]
        "NaN": lambda: engine.forward(batch, temperature=float("nan")),
        "True": lambda: engine.forward_backward(batch, scaled_by_1, divisor=True),
        "huge lr": lambda: engine.optim_step(lr=10**400),
        "lr of a tensor": lambda: engine.optim_step(lr=torch.ones(2)),  # type: ignore[arg-type]
        "lr": lambda: engine.optim_step(lr="x"),  # type: ignore[arg-type]
        "no call": lambda: engine.optim_step(lr=0.25),  # none of these has added a gradient
        "load": load_while_gradients_wait,
        "no number of a batch": lambda: engine.batch_loss(batch, lambda of: of["log_probs"][0]),
        "detached number": lambda: engine.batch_loss(batch, lambda of: torch.zeros(())),
        "raises on one": lambda: engine.batch_loss(batch, raises_on_rank_1),
        "gradients of a batch": lambda: engine.batch_loss([tokens], raises_on_rank_1),  # type: ignore[arg-type]
    }
    found = {}
    rate = engine.runtime.optimizer.param_groups[0]["lr"]
    for name, use in wrong.items():
        with pytest.raises(HydraulisError) as error:
            use()
        found[name] = str(error.value)
        assert engine.runtime.optimizer.param_groups[0]["lr"] == rate
        if name == "other vocabulary":  # the failing rank's own error shows where it failed
            assert (error.value.__cause__ is not None) == (rank == 2)
    return found


def raises_on_rank_1(outputs: Mapping[str, list[Tensor]]) -> Tensor:
    if dist.get_rank() == 1:
        raise RuntimeError("a bug")
    return outputs["log_probs"][0].sum()


def scaled_by_1(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs


def test_wrong_uses_raise_one_error_on_every_rank() -> None:
    of_ranks = pool_of(4).run(errors)
    messages = {
        "mean": "one number per token, here 17 in shape (17,), but returned shape ()",
        "no tokens": "is called with 0 tokens",
        "shape of a sum": "here 17 in shape (17,), but got shape (17, 1)",
        "detached": "must depend on log_probs or entropy",
        "missing input": "reads the input 'old' but the sequences have none",
        "two divisors": "optim_step has divisor 2 and 1 calls",
        "too long": "359",
        "other sequences": "ranks [3] have others than rank 0",
        "other inputs": "ranks [1] have others than rank 0",
        "other vocabulary": "sequence 1: token ids lie in [0, 61) but there is 99",
        "weights": "that of token 0 is -1",
        "inputs of one": "sequence 0 has [] and sequence 1 has ['a']",
        "mini-batches": "1 sequences for 2 mini-batches",
        "outputs": "logits was asked for",
        "no outputs": "none was asked for",
        "no ids": "those of the input 'token_ids' but sequence 0 has []",
        "ids of others": "in [0, 61) but those of sequence 0 are torch.int64 of shape (2,) from 61",
        "0 ids": "those of sequence 0 are torch.int64 of shape (0,); correct",
        "log-probs of a teacher": "rename it, for example to 'old_token_log_probs'",
        "outputs twice": "each once, but entropy, entropy was asked for",
        "other outputs": "outputs, temperature and adapters but ranks [1] have others",
        "dtypes": "'a' are torch.float32 of shape () in sequence 0 and torch.int64",
        "shapes": "torch.float32 of shape (2,) in sequence 1",
        "other names": "the same names of inputs but ranks [2] have others",
        "inputs of all": "'a' has 4 for 1 sequences",
        "other divisor": "divisor, entropy and temperature but ranks [1, 2, 3] have others",
        "divisor of one": "must be positive and finite but is 0.0",
        "temperature": "the temperature must be positive and finite but is 0.0",
        "lr of one": "lr must be at least 0 and finite but is -1.0",
        "other lr": "the same lr and divisor but ranks [2] have others",
        "no entropy": "raised TypeError: unsupported operand",
        "lr": "lr must be at least 0 and finite but is 'x'",
        "complex loss": "real numbers on cpu but returned torch.complex64",
        "no loss": "raised TypeError: 'NoneType' object is not callable",
        "no batch": "what engine.plan(sequences) returns but got [array(",
        "no batch to train": "what engine.plan(sequences) returns but got 3;",
        "other batch": "outputs, temperature and adapters but ranks [1] have others",
        "no outputs but a number": "but 5 was asked for",
        "no sequences": "rows of token ids but are None",
        "0 sequences": "at least 1 sequence but has 0",
        "a text": "rows of token ids but are 'tokens'",
        "rows of texts": "sequence 0: tokens must be real numbers but are <U1",
        "ragged": "sequence 0: tokens must be a row of numbers but",
        "scatter of one": "the same mini_batches and scatter but ranks [2] have others",
        "half a mini-batch": "mini_batches is a whole number from 1 on but is 0.5",
        "NaN": "the temperature must be positive and finite but is nan",
        "True": "the divisor must be positive and finite but is True",
        "huge lr": "the lr must be at least 0 and finite but is 1000",
        "lr of a tensor": "the lr must be at least 0 and finite but is tensor(",
        "no call": "there were 0 since the last update",
        "no number of a batch": "is one number that depends on its outputs but is tensor([",
        "detached number": "is one number that depends on its outputs but is tensor(0.)",
        "raises on one": "a bug (rank 1)",
        "gradients of a batch": "what engine.plan(sequences) returns but got [array(",
        "load": "gradients of 1 calls of forward_backward wait for an update, which a load",
    }
    for found in of_ranks:
        assert found == of_ranks[0]
        for name, text in messages.items():
            assert text in found[name]


def fail_and_go_on() -> None:
    """On one rank: no gradient of a failed call reaches an update."""
    engine = make_engine(("tp1",))
    found = rollout()
    batch = engine.plan(found, mini_batches=2)
    batch = batch.with_inputs(
        part=[np.full(len(each.tokens), i >= len(found) // 2) for i, each in enumerate(found)]
    )

    def fails(log_probs: Tensor, _: Tensor, inputs: Mapping[str, Tensor], *__: Any) -> Tensor:
        if log_probs.any() and inputs["part"].any():
            raise RuntimeError("a bug in the second part")
        return log_probs

    engine.discard_gradients()  # no call
    engine.forward_backward(batch, scaled_by_1)
    expected = engine.optim_step(lr=0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="second part"):
            engine.forward_backward(batch, fails)
        with pytest.raises(HydraulisError, match="there were 0 since the last update"):
            engine.optim_step()
    engine.forward_backward(batch, scaled_by_1)
    assert engine.optim_step() == expected
    engine.forward_backward(batch, lambda log_probs, *_: log_probs * float("nan"))
    with pytest.warns(
        RuntimeWarning, match="the loss is nan and the norm None: nothing is updated"
    ):
        assert engine.optim_step() is None


def test_a_failed_call_leaves_no_gradients() -> None:
    pool_of(1).run(fail_and_go_on)
