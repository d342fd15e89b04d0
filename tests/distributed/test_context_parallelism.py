"""cp ranks share every micro-batch, and waves regroup them: the update is that of one process.

The job is that of the same-update law: sequences of 1 to 33 tokens, some shorter
than the 2·cp chunks that each is cut into.
"""

from dataclasses import replace

import pytest
import torch

from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Strategy
from tests.support.gloo_pool import WorkerFailure, pool_of
from tests.support.law import (
    GPT2_LIKE,
    LENGTHS,
    SHORT_MODEL,
    SPLITS,
    changing,
    check_law,
    law_job,
    waves,
)
from tests.support.models import Job, build_engine

pytestmark = pytest.mark.distributed

MODELS = {
    "fp32": replace(SHORT_MODEL, dtype=torch.float32),
    "tied embeddings": replace(SHORT_MODEL, tied=True),
    "multi-head attention": replace(SHORT_MODEL, num_groups=8),
    "two query groups, no sequence parallelism": replace(
        SHORT_MODEL, num_groups=2, sequence_parallel=False
    ),
    "q/k norms": replace(SHORT_MODEL, qk_layernorm=True),
    "GPT-2 like": GPT2_LIKE,
}

STRATEGIES = [
    (2, "cp2"),
    (4, "cp4"),
    (4, "tp2cp2"),
    (4, "cp2pp2"),
    (4, "cp2@2,0+tp2@3,1"),
    (3, "cp3"),
    (4, "cp2+pp2"),
]


@pytest.mark.parametrize(("num_ranks", "text"), STRATEGIES)
def test_cp_ranks_give_the_same_update(num_ranks: int, text: str) -> None:
    check_law(law_job(num_ranks, text), num_ranks)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_same_update(name: str) -> None:
    """Each iteration in another strategy."""
    check_law(changing(("tp2cp2", "cp2pp2", "cp4"), MODELS[name]), 4)


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_of_a_wave_gives_the_same_update(name: str) -> None:
    check_law(waves([SPLITS[name]]), 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_waves_may_be_cut_differently(dtype: torch.dtype) -> None:
    job = waves(list(SPLITS.values()))
    model = replace(SHORT_MODEL, dtype=dtype)
    settings = law_job(4, "cp4", model).settings
    check_law(replace(job, model=model, settings=settings), 4)


@pytest.mark.parametrize("text", ["cp2~pp2", "tp2cp2~", "tp2cp2~@3,1,0,2"])
def test_pipelines_and_tensor_parallel_ranks_may_split(text: str) -> None:
    job = waves([[(0, 1), (1, 1)], [(0, 2)], [(0, 1), (1, 1)]])
    check_law(replace(job, strategies=(text,)), 4)


def test_a_wave_may_leave_groups_without_sequences() -> None:
    job = waves([SPLITS["1+1+1+1"], SPLITS["2+2"]])
    counts = [[group[2] for group in wave] for a in job.assignments for wave in a.groups[0]]
    assert any(0 in wave and sum(wave) for wave in counts)
    assert any(wave[0] == 0 for wave in counts)


def test_strategies_with_and_without_cp_may_alternate() -> None:
    check_law(changing(("tp2cp2", "cp2~+2*tp1", "4*tp1")), 4)


def run_uncut(job: Job) -> None:
    """On every rank: whole rows instead of parts."""
    engine = build_engine(job)
    engine.train_step(job.strategies[0], [pack(job.batches[0])], make_forward_step())


def run_misplaced(job: Job) -> None:
    """On every rank: a group that does not begin at a multiple of its size."""
    engine = build_engine(job)
    part = pack(job.batches[0], context_size=2, context_rank=(engine.rank + 1) % 2)
    engine.train_step(job.strategies[0], [part], make_forward_step())


def test_packs_with_invalid_groups_are_refused() -> None:
    """Each rank would train whole rows, and every token count twice."""
    with pytest.raises(WorkerFailure, match=r"context group of 1: .* of all 2 cp ranks"):
        pool_of(2).run(run_uncut, law_job(2, "cp2"))
    with pytest.raises(WorkerFailure, match="aligned powers of two; pack micro-batches by"):
        pool_of(4).run(run_misplaced, law_job(4, "cp4~"))


def test_every_job_has_short_sequences() -> None:
    """The tests above must cover short sequences."""
    assert all(1 in batch for batch in LENGTHS[1:])
    assert Strategy.parse("cp4", 4).replicas[0].scheme.cp * 2 > min(LENGTHS[0])
