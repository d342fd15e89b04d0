"""Rules of contribution, broken on purpose: the law's comparison must find each of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from megatron.hydraulis.runtime import catalogue as catalogue_module
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.transfer.canonical import ParameterSpec
from tests.support import models
from tests.support.gloo_pool import pool_of
from tests.support.law import law_job, wrong_gradients
from tests.support.models import Job, RankRun, SmallModel, run_job

Rule = Callable[[], AbstractContextManager[Any]]
"""Breaks a rule while it is entered; can be pickled."""


def described(names: str, **changes: Any) -> AbstractContextManager[Any]:
    """Parameters whose names match have wrong fields of `ParameterSpec`."""
    right = catalogue_module._spec

    def spec(*arguments: Any) -> ParameterSpec:
        found = right(*arguments)
        return dataclasses.replace(found, **changes) if re.search(names, found.name) else found

    return patch.object(catalogue_module, "_spec", spec)


@contextmanager
def forgotten(names: str, rank: int) -> Iterator[None]:
    """A rank drops its gradients of parameters whose names match.

    Without overlap, which would send gradients before they are dropped.
    """
    right = RuntimeEngine._run

    def run(self: RuntimeEngine, runtime: Any, *others: Any) -> Any:
        reports = right(self, runtime, *others)
        if dist.get_rank() == rank:
            for index, bound in runtime.arena.bound.items():
                if re.search(names, self.layout.parameters[index].name):
                    bound.gradient.zero_()
        return reports

    def engine(*arguments: Any, **named: Any) -> RuntimeEngine:
        return RuntimeEngine(*arguments, **{**named, "overlap": False})

    with patch.object(RuntimeEngine, "_run", run), patch.object(models, "RuntimeEngine", engine):
        yield


def run_broken(job: Job, rule: Rule) -> RankRun:
    """Every rank runs the job with a broken rule."""
    with rule():
        return run_job(job)


def wrong_with(rule: Rule, num_ranks: int, text: str, model: SmallModel) -> set[str]:
    """The parameters with wrong gradients, one of them by far more than rounding."""
    job = law_job(num_ranks, text, model)
    errors = wrong_gradients(job, pool_of(num_ranks).run(run_broken, job, rule))
    assert max(errors.values(), default=0.0) > 1e-3, errors
    return set(errors)
