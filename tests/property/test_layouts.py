"""Properties of the layout model for any model, job and layout."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model.layouts import (
    FixedLengthJob,
    Layout,
    cost_model_of,
    predict_layout,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.regrouping import Hiding, RegroupCosts
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.simulator.simulation import Simulator
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from tests.support.fixed_length import A100, predict

WITHOUT_HOST = replace(A100, core_factor=None)
"""In the simulator the host runs ahead also while parameters are gathered; test_simulation.py has
its time."""
POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw: st.DrawFn, *, may_have_experts: bool = True) -> tuple[FixedLengthJob, Layout]:
    """A job, and a layout that can be run."""
    has_experts = may_have_experts and draw(st.booleans())
    groups = draw(st.sampled_from([8, 16]))
    heads = groups * draw(st.sampled_from([1, 4]))
    shape = ModelShape(
        num_layers=draw(st.integers(8, 80)),
        hidden_size=heads * 128,
        ffn_hidden_size=heads * 128 * draw(st.integers(2, 4)),
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=128,
        vocab_size=draw(st.sampled_from([32_000, 128_000])),
        gated_mlp=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    if has_experts:
        shape = replace(
            shape,
            num_experts=16,
            num_expert_layers=draw(st.integers(1, 8)),
            experts_per_token=draw(st.integers(1, 4)),
            expert_ffn_hidden_size=1024,
        )
    tp, pp, dp, size = draw(POWERS), draw(POWERS), draw(POWERS), draw(POWERS)
    of = FixedLengthJob(
        shape=shape,
        num_ranks=tp * pp * dp,
        sequence_tokens=draw(st.sampled_from([512, 2048, 8192])),
        num_sequences=dp * size * draw(st.integers(1, 4)) * 2,
    )
    how = Layout(
        micro_batch_size=size,
        tp=tp,
        pp=pp,
        ep=min(16, tp * dp, draw(POWERS)) if has_experts else 1,
        sequence_parallel=has_experts or draw(st.booleans()),
        recomputes_layers=draw(st.booleans()),
    )
    return of, how


@settings(max_examples=60)
@given(cases())
def test_parts_are_not_negative_and_add_up(case: tuple[FixedLengthJob, Layout]) -> None:
    prediction = predict(*case)
    assert min(prediction.time.values()) >= -1e-12 * prediction.step_s
    assert min(prediction.memory.values()) >= 0.0
    assert 0.0 < prediction.mfu < 1.0


@settings(max_examples=60)
@given(cases(may_have_experts=False))
def test_sequence_parallelism_needs_no_more_memory_or_time(
    case: tuple[FixedLengthJob, Layout],
) -> None:
    of, how = case
    without, with_it = (predict(of, replace(how, sequence_parallel=sp)) for sp in (False, True))
    assert with_it.memory_bytes <= without.memory_bytes
    # A shorter forward hides less of regrouping. Shares of the forward, which decide how a pipeline
    # fills, are rounded to 1 %.
    with_s, without_s = (each.step_s - each.time["data_parallel_s"] for each in (with_it, without))
    assert with_s <= without_s * (1.005 if how.pp > 1 else 1 + 1e-9)


@settings(max_examples=60)
@given(cases())
def test_larger_micro_batches_need_no_less_memory(case: tuple[FixedLengthJob, Layout]) -> None:
    of, how = case
    larger = replace(how, micro_batch_size=2 * how.micro_batch_size)
    # With fewer micro-batches than stages fewer are in flight, but of at least the same tokens.
    less, more = predict(of, how), predict(of, larger)
    assert more.memory_bytes >= less.memory_bytes * (1 - 1e-12)


@settings(max_examples=60)
@given(cases())
def test_recomputation_is_slower(case: tuple[FixedLengthJob, Layout]) -> None:
    of, how = case
    without, with_it = (predict(of, replace(how, recomputes_layers=re)) for re in (False, True))
    assert with_it.step_s > without.step_s
    kept, less = (each.memory["activations_bytes"] for each in (without, with_it))
    assert less < kept or without.stage != with_it.stage


@settings(max_examples=60)
@given(cases())
def test_more_sequences_take_longer_and_need_no_more_memory_once_the_pipeline_is_full(
    case: tuple[FixedLengthJob, Layout],
) -> None:
    of, how = case
    more = replace(of, num_sequences=2 * of.num_sequences)
    assert predict(more, how).step_s > predict(of, how).step_s
    if how.num_micro_batches(of) >= how.pp:
        assert predict(more, how).memory == predict(of, how).memory


# Replicas of one column and those of two that share experts round to other shares of the forward.
SHARED_EXPERTS = (
    FixedLengthJob(
        shape=ModelShape(
            num_layers=8,
            hidden_size=2048,
            ffn_hidden_size=6144,
            num_attention_heads=16,
            num_query_groups=16,
            kv_channels=128,
            vocab_size=32_000,
            gated_mlp=False,
            tied_embeddings=False,
            num_experts=16,
            num_expert_layers=1,
            experts_per_token=1,
            expert_ffn_hidden_size=1024,
        ),
        num_ranks=32,
        sequence_tokens=512,
        num_sequences=8,
    ),
    Layout(
        micro_batch_size=1,
        tp=4,
        pp=2,
        ep=8,
        sequence_parallel=True,
        recomputes_layers=True,
    ),
)


@settings(max_examples=40)
@given(cases())
@example(SHARED_EXPERTS)
def test_a_step_takes_as_long_as_an_iteration_of_the_simulator(
    case: tuple[FixedLengthJob, Layout],
) -> None:
    of, how = case
    step = predict_layout(of, how, WITHOUT_HOST)
    model = cost_model_of(of, how, WITHOUT_HOST)
    strategy, lengths = how.strategy(of), (of.sequence_tokens,) * how.micro_batch_size
    num_columns = how.dp(of) // len(strategy.replicas)
    micro_batch = MicroBatchWork.packed(lengths * num_columns)
    if num_columns > 1:
        micro_batch = replace(micro_batch, groups=((1, sum(lengths), lengths),) * num_columns)
    of_replica = (micro_batch,) * how.num_micro_batches(of)
    work = IterationWork(strategy, (of_replica,) * len(strategy.replicas), plan_time_s=0.0)
    regroup = RegroupCosts.of(
        of.shape,
        WITHOUT_HOST,
        model.cluster,
        num_atoms=how.tp,
        parameter_bytes=model.parameter_bytes,
    ).for_pool([strategy])
    simulator = Simulator(StageCosts(model, of.shape), regroup=regroup)
    before, iteration = simulator.run([work, work])
    took_s = (iteration.end_ms - before.end_ms) / 1e3
    compute_ms = max(iteration.replica_ends_ms) - iteration.replicas[0].by_stage[0][0].start_ms
    computed_s = step.step_s - step.time["data_parallel_s"]
    assert took_s == pytest.approx(step.step_s, rel=1e-2)
    if regroup.hiding is Hiding.ONE_QUEUE or how.pp == 1:
        assert took_s == pytest.approx(step.step_s)
    if regroup.hiding is Hiding.ONE_QUEUE:
        assert compute_ms / 1e3 == pytest.approx(computed_s)
    else:
        # Layers of the first forward wait for a part of the gathers.
        assert computed_s * (1 - 1e-9) <= compute_ms / 1e3 <= took_s * (1 + 1e-9)
    slots = model.memory.max_tokens(how.scheme)
    assert step.fits == (slots >= how.micro_batch_size * of.sequence_tokens)
