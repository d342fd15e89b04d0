"""Patches are applied only to the upstream version that they were written for."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron.core import jit
from megatron.core.tensor_parallel import random
from megatron.training import global_vars, initialize, training

from hydraulis_patches import registry
from hydraulis_patches.__main__ import main as list_patches
from hydraulis_patches.cpu_backend import (
    CPU_BACKEND,
    DISPATCHED_COUNTS,
    REPLACEMENTS,
    RNG_STATE,
    RNG_TRACKER,
    stand_in_for,
)
from hydraulis_patches.deferred_compile import JIT_FUSER, compile_at_first_call
from hydraulis_patches.hashes import (
    CPU_BACKEND_HASHES,
    DISPATCHED_COUNTS_HASHES,
    RNG_STATE_HASHES,
    TRAINING_LOOP_HASHES,
)
from hydraulis_patches.registry import (
    AppliedPatch,
    Patch,
    SetState,
    check_signature,
    source_hash,
)
from hydraulis_patches.training_loop import (
    ALL,
    BUILD_TOKENIZER,
    MEMORY_BUFFER,
    MOE_METRICS,
    REPLACED,
    WRAPPED,
    apply_training_loop,
    build_tokenizer_at_first_use,
)
from megatron.hydraulis.errors import UpstreamVersionError

UPSTREAM = """
def answer(question, *, times=1):
    return "upstream's"


LIMIT = 3
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module to patch, written to a file as upstream's are."""
    (tmp_path / "some_upstream.py").write_text(UPSTREAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_upstream", raising=False)
    return importlib.import_module("some_upstream")


def undo_all(applied: list[AppliedPatch]) -> None:
    """Undoes in reverse order, so that names that were replaced twice are restored."""
    for patch in reversed(applied):
        patch.undo()


def patch_of(*attributes: str) -> Patch:
    targets = [f"some_upstream:{attribute}" for attribute in attributes]
    return Patch(
        name="test_patch",
        targets={target: source_hash(target) for target in targets},
        reason="a test",
        removable_when="never",
        versions=(version("megatron-core"),),
    )


def test_the_cpu_backend_was_written_for_the_installed_upstream() -> None:
    CPU_BACKEND.check()


@pytest.mark.parametrize("target", TRAINING_LOOP_HASHES)
def test_hashes_of_the_training_loop_s_names_are_those_installed(target: str) -> None:
    module, attribute = target.split(":")
    original = getattr(importlib.import_module(module), attribute)
    assert inspect.isroutine(original)
    assert source_hash(target) == TRAINING_LOOP_HASHES[target]


def test_without_cuda_no_generator_state_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    # Upstream creates its tracker of CUDA generators when a state is saved. Jobs that are forked
    # from this process must not inherit it, because they have a different one.
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    applied = RNG_STATE.apply(stand_in_for)
    applied += RNG_STATE.apply(stand_in_for)  # another test's patch may be applied
    try:
        before = torch.get_rng_state()
        saved = random._get_all_rng_states()
        torch.rand(1)
        random._set_all_rng_states(*saved)
        assert torch.equal(torch.get_rng_state(), before)
        assert saved[1].numel() == 0
        RNG_STATE.check()  # as in a process that has applied it
    finally:
        undo_all(applied)


@pytest.mark.parametrize("target", [*RNG_STATE_HASHES, *DISPATCHED_COUNTS_HASHES])
def test_replacements_on_the_cpu_have_upstream_s_signatures(target: str) -> None:
    check_signature(target, REPLACEMENTS[target.split(":")[1]])


def test_an_unknown_version_is_refused_naming_version_and_patch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "installed_version", lambda: "0.20.0")
    message = r"patch 'cpu_backend'.* 0\.20\.0 is installed.*; install 'megatron-core==0\.19\.2'"
    with pytest.raises(UpstreamVersionError, match=message):
        CPU_BACKEND.check()


def test_an_unknown_version_is_not_changed(
    upstream: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = upstream.answer
    patch = patch_of("answer")
    monkeypatch.setattr(registry, "installed_version", lambda: "0.20.0")
    with pytest.raises(UpstreamVersionError):
        patch.apply(lambda original: lambda question, *, times=1: "ours")
    assert upstream.answer is original


def test_changed_source_is_refused_and_nothing_is_replaced(
    upstream: ModuleType, tmp_path: Path
) -> None:
    patch = patch_of("LIMIT", "answer")
    text = UPSTREAM.replace("upstream's", "somebody else's")
    (tmp_path / "some_upstream.py").write_text(text)
    changed = importlib.reload(upstream)
    original = changed.answer
    with pytest.raises(UpstreamVersionError, match="'test_patch': the source of some_upstream:"):
        patch.apply(lambda original: None)
    assert changed.answer is original
    assert changed.LIMIT == 3


def test_every_module_of_the_cpu_backend_has_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(CPU_BACKEND.targets) == {f"{module}:torch" for module in CPU_BACKEND_HASHES}
    for target in CPU_BACKEND.targets:
        wrong = dict(CPU_BACKEND.targets) | {target: "0" * 16}
        patch = Patch("cpu_backend", wrong, CPU_BACKEND.reason, CPU_BACKEND.removable_when)
        with pytest.raises(UpstreamVersionError, match=f"source of {target} has hash"):
            patch.check()


def test_a_replacement_gets_the_original_and_undo_restores_it(upstream: ModuleType) -> None:
    original = upstream.answer
    applied = patch_of("answer").apply(
        lambda upstream_answer: lambda question: upstream_answer(question) + " and ours"
    )
    assert upstream.answer("?") == "upstream's and ours"
    undo_all(applied)
    assert upstream.answer is original


def test_undo_runs_backwards(upstream: ModuleType) -> None:
    patch = patch_of("LIMIT")
    first = patch.apply(lambda limit: limit + 1)
    second = patch.apply(lambda limit: limit * 10)
    assert upstream.LIMIT == 40
    undo_all([*first, *second])
    assert upstream.LIMIT == 3


def test_a_replacement_of_the_same_signature_passes(upstream: ModuleType) -> None:
    def answer(question: str, *, times: int = 2) -> str:
        return question * times

    check_signature("some_upstream:answer", answer)


@pytest.mark.parametrize(
    "replacement",
    [
        lambda question: None,
        lambda question, times=1: None,
        lambda query, *, times=1: None,
        lambda question, *, times=1, more=2: None,
        lambda *args, **kwargs: None,
    ],
    ids=["missing", "other kind", "renamed", "one more", "anything"],
)
def test_a_replacement_of_another_signature_is_refused(
    upstream: ModuleType, replacement: object
) -> None:
    with pytest.raises(UpstreamVersionError, match=r"callers pass \(question, times\); port it"):
        check_signature("some_upstream:answer", replacement)  # type: ignore[arg-type]


@pytest.mark.parametrize("has_cuda", [True, False])
def test_fusions_are_not_warmed_up_with_the_longest_sequence(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    warmed_up: list[int] = []
    monkeypatch.setattr(
        initialize, "_warmup_jit_function", lambda tp_size=None: warmed_up.append(tp_size)
    )
    loop = SimpleNamespace(
        **{patch.name: getattr(training, patch.name) for patch in REPLACED},
        **{f"around_{patch.name}": lambda original: original for patch in WRAPPED},
    )
    applied = apply_training_loop(loop, has_cuda=has_cuda)
    try:
        training.set_jit_fusion_options(tp_size=1)
    finally:
        undo_all(applied)
    assert not warmed_up
    training.set_jit_fusion_options(tp_size=1)
    assert warmed_up == [1]


def test_a_fused_function_is_compiled_by_its_first_call_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    JIT_FUSER.check()
    compiled: list[Callable[..., int]] = []

    def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    def compile_now(function: Callable[..., int]) -> Callable[..., int]:
        compiled.append(function)
        return lambda number: function(number) + 1000

    monkeypatch.setattr(torch, "compile", compile_now)
    monkeypatch.setattr(jit, "jit_fuser", compile_now)
    function = compile_at_first_call(double)
    assert (function.__name__, function.__doc__) == ("double", "Twice the number.")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    assert function(1) == 2
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    with monkeypatch.context() as disabled:
        disabled.setattr(jit, "jit_fuser", jit.jit_fuser)  # restored below
        jit.disable_jit_fuser()
        assert function(1) == 2
    assert not compiled
    assert [function(1), function(number=2)] == [1002, 1004]
    assert compiled == [double]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert function(3) == 6


WITHOUT_COMPILER = """
import gc, sys
import megatron.hydraulis.loop.entry
import megatron.training.training
from megatron.core.fusions.fused_bias_swiglu import swiglu
slow = {"torch._dynamo", "matplotlib", "transformers", "scipy", "pandas", "pyarrow", "rich"}
not_wanted = slow & set(sys.modules)
assert not not_wanted, f"training imports {not_wanted} before it needs them"
import torch
assert swiglu.__wrapped__(torch.ones(1, 2)).item() > 0
assert gc.isenabled(), "no garbage is collected after the imports"
assert gc.get_freeze_count() > gc.get_count()[0] + 100_000, "collections visit what was imported"
import megatron.hydraulis, megatron.hydraulis.loop.preflight, megatron.hydraulis.profiler.command
megatron.hydraulis.Engine
assert "torch._dynamo" not in sys.modules
"""


def test_programs_import_no_compiler_and_training_no_tokenizer() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_COMPILER], check=True)


def test_the_tokenizer_is_loaded_when_a_hook_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []

    def build_tokenizer(args: object) -> object:
        loaded.append(args)
        return SimpleNamespace(vocab_size=61)

    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", None)
    monkeypatch.setattr(global_vars, "build_tokenizer", build_tokenizer)
    applied = BUILD_TOKENIZER.apply(lambda original: build_tokenizer_at_first_use)
    try:
        global_vars._build_tokenizer("arguments")
    finally:
        undo_all(applied)
    assert not loaded
    assert global_vars.get_tokenizer().vocab_size == global_vars.get_tokenizer().vocab_size == 61
    assert loaded == ["arguments"]


def test_every_patch_and_every_state_that_is_set_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert list_patches() == 0
    listed = capsys.readouterr().out
    described = (Path(registry.__file__).parent / "README.md").read_text()
    for patch in (CPU_BACKEND, RNG_STATE, DISPATCHED_COUNTS, JIT_FUSER, *ALL):
        assert patch.name in listed
        assert f"`{patch.name}`" in described
    for state in (RNG_TRACKER, MEMORY_BUFFER, MOE_METRICS):
        assert state.name in listed
        assert f"{state.name.split(':')[1]}(" in described


def test_a_function_that_sets_state_must_be_there(upstream: ModuleType) -> None:
    SetState("some_upstream:answer", "a test", "never").check()
    with pytest.raises(UpstreamVersionError, match="some_upstream:question does not exist in mega"):
        SetState("some_upstream:question", "a test", "never").check()
