"""Mutations of a worker's runtime: the same-update test must detect each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron.hydraulis.runtime import catalogue as catalogue_module
from megatron.hydraulis.runtime import executor
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import loss_func, make_forward_step
from megatron.hydraulis.transfer.canonical import Contribution, ParameterSpec
from tests.support import models
from tests.support.models import Job, RankRun, run_job


def run_mutated(job: Job, mutation: str) -> RankRun:
    """On every rank: the job with a mutation of `MUTATIONS`."""
    with MUTATIONS[mutation]():
        return run_job(job)


def _qk_norms_replicated() -> Any:
    def change(spec: ParameterSpec) -> ParameterSpec:
        if not any(norm in spec.name for norm in catalogue_module.QK_NORMS):
            return spec
        return dataclasses.replace(spec, contribution=Contribution.REPLICATED)

    return _with_specs(change)


def _with_specs(change: Callable[[ParameterSpec], ParameterSpec]) -> Any:
    right = catalogue_module._spec
    return patch.object(catalogue_module, "_spec", lambda *arguments: change(right(*arguments)))


def _contribution(wrong: Contribution, *, instead_of: Contribution) -> Any:
    def change(spec: ParameterSpec) -> ParameterSpec:
        if spec.contribution is not instead_of:
            return spec
        return dataclasses.replace(spec, contribution=wrong)

    return lambda: _with_specs(change)


def _halves_not_cut_apart() -> Any:
    return _with_specs(lambda spec: dataclasses.replace(spec, stride=1))


def _engine_without_overlap(*arguments: Any, **named: Any) -> Engine:
    return Engine(*arguments, **{**named, "overlap": False})


@contextmanager
def _tied_output_end_forgotten() -> Iterator[None]:
    right = Engine._run

    def run(self: Engine, runtime: Any, *others: Any) -> Any:
        reports = right(self, runtime, *others)
        role = None if runtime.bound is None else runtime.bound.role
        if role is not None and not role.has_embedding and role.has_output:
            for bound in runtime.arena.bound.values():
                if bound.name.startswith("embedding."):
                    bound.gradient.zero_()
        return reports

    # Without overlap; otherwise the gradients would be sent before they can be dropped.
    with (
        patch.object(Engine, "_run", run),
        patch.object(models, "Engine", _engine_without_overlap),
    ):
        yield


@contextmanager
def _second_cp_rank_forgotten() -> Iterator[None]:
    right = Engine._run

    def run(self: Engine, runtime: Any, batches: Any, *others: Any) -> Any:
        reports = right(self, runtime, batches, *others)
        if any(batch.context_rank == 1 for batch in batches):
            runtime.arena.zero_gradients()
        return reports

    # Without overlap; otherwise the gradients would be sent before they can be dropped.
    with (
        patch.object(Engine, "_run", run),
        patch.object(models, "Engine", _engine_without_overlap),
    ):
        yield


@contextmanager
def _mean_of_each_micro_batch() -> Iterator[None]:
    def mean_loss(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, num_tokens, report = loss_func(mask, output)
        return loss / num_tokens, num_tokens, report

    with (
        patch.object(models, "make_forward_step", lambda: make_forward_step(mean_loss)),
        patch.object(executor, "check_loss_function", lambda *_: True),
    ):
        yield


MUTATIONS: dict[str, Callable[[], Any]] = {
    "q/k norms replicated": _qk_norms_replicated,
    "sequence-parallel norms replicated": _contribution(
        Contribution.REPLICATED, instead_of=Contribution.PARTIAL
    ),
    "replicated biases summed": _contribution(
        Contribution.PARTIAL, instead_of=Contribution.REPLICATED
    ),
    "gate and up not cut apart": _halves_not_cut_apart,
    "tied output end forgotten": _tied_output_end_forgotten,
    "second cp rank forgotten": _second_cp_rank_forgotten,
    "mean of each micro-batch": _mean_of_each_micro_batch,
}
