"""The engine for Python programs: plan, forward, backward, update, and the model's tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.loading import find_checkpoints, load_checkpoint
from megatron.hydraulis.checkpoint.manifest import model_of
from megatron.hydraulis.checkpoint.saving import CheckpointSaver, SavedState, upstream_entries
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.packed_batch import PackedBatch, token_places
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, HydraulisError
from megatron.hydraulis.library.batches import (
    Batch,
    RankShare,
    TokenSequence,
    as_sequences,
    check_same,
    checked_plan,
    digest_of,
)
from megatron.hydraulis.library.checks import (
    agreed,
    agreed_parts,
    check_inputs,
    checked_divisor,
    checked_list,
    checked_lr,
    checked_mini_batches,
    checked_number,
    checked_outputs,
    plans_of,
)
from megatron.hydraulis.library.hugging_face import (
    BuiltEngine,
    HfContent,
    HfShard,
    build_from_folder,
    checked_path,
    hf_shards,
    hf_tensors,
)
from megatron.hydraulis.library.plans import PoolLike, ProfileLike
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.plan import Planner, PlanText
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.runtime.adapters import without_adapters
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import at_least_fp32
from megatron.hydraulis.runtime.memory import SharedOutOfMemoryError, release_cached_memory
from megatron.hydraulis.runtime.outcome import LossTotal, StepOutcome
from megatron.hydraulis.runtime.process_groups import of_all_ranks, on_all_ranks, on_rank_0
from megatron.hydraulis.runtime.token_loss import (
    OUTPUTS,
    TOKEN_IDS,
    VALUES,
    TokenLoss,
    check_token_loss,
    loss_forward_step,
    output_forward_step,
)

BatchLoss = Callable[[Mapping[str, list[Tensor]]], Tensor]
"""``loss(outputs)``: one number from the outputs of the sequences that this rank gave, as `forward`
returns them; their lists are empty where it gave none."""


class Engine:
    """Trains on sequences of any lengths, each batch in the strategy that its plan chooses.

    All methods are collective: every rank calls them in the same order, with the same arguments
    unless a method says otherwise. Wrong arguments raise one error on every rank, and so do all
    methods but `close` after it.

    Args:
        runtime: model, shards and optimizer.
        planner: used on rank 0.
        limits: of the tokens of a micro-batch, as the planner has them.
        built: how it was built from a Hugging Face folder; None without one.
    """

    def __init__(
        self,
        runtime: RuntimeEngine,
        planner: Planner,
        limits: Limits,
        built: BuiltEngine | None = None,
    ) -> None:
        self._runtime: RuntimeEngine | None = runtime
        self._planner = planner
        self._limits = limits
        self._built = built
        self._num_planned = 0

    @property
    def runtime(self) -> RuntimeEngine:
        """Model, shards and optimizer. Raises HydraulisError after `close`."""
        if self._runtime is None:
            raise HydraulisError(
                "an engine is used until close but this one is closed; make another one"
            )
        return self._runtime

    @classmethod
    def from_hf(
        cls,
        folder: str | Path,
        *,
        pool: PoolLike,
        optimizer: AdamWSettings | None,
        cost_profile: ProfileLike | None = None,
        dtype: torch.dtype | None = None,
        max_tokens_per_micro_batch: int | None = None,
        lora: Lora | None = None,
        value_head: bool = False,
        options: Sequence[str] = (),
    ) -> Engine:
        """The model of a Hugging Face folder, with its weights.

        The process group is made of torchrun's variables unless there is one. No rank holds the
        model.

        Three settings outlive the call, for the whole process: FutureWarnings of torch and Megatron
        are ignored; some loggers of Megatron get level ERROR or WARNING, as does
        ``megatron.hydraulis`` on all ranks but 0; and without CUDA, or with
        ``--disable-jit-fuser``, Megatron compiles no fused functions.

        Args:
            folder: has config.json and safetensors; every rank reads it.
            pool: a strategy such as ``"tp2+2*tp1"``, several, the path of a pool file, a `Pool`, or
                what `propose` returned.
            optimizer: its settings; None for an engine that does not train or save, such as a
                reference policy: it holds parameters alone, without gradients and moments.
            cost_profile: of the machine, or its path; without one, times follow from what is known
                of it.
            dtype: of parameters, bf16 or fp32; None for that of the folder's tensors. The
                optimizer works in fp32.
            max_tokens_per_micro_batch: as the flag; None for what fits in memory.
            lora: adapters that are trained instead of the model, such as ``Lora(rank=16)``; a
                value head is trained with them.
            value_head: whether a value of each token replaces logits, as in a critic: "score" in
                the folder, or a new one. Plans count the output layer that is not there.
            options: further options of the training program, such as
                ``["--recompute-granularity", "full"]``.

        Raises:
            ConfigurationError: options contradict each other, the model has no counterpart, or
                ranks have given different arguments.
            CheckpointError: the folder is damaged.
        """
        built = build_from_folder(
            folder,
            pool=pool,
            cost_profile=cost_profile,
            optimizer=optimizer,
            dtype=dtype,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            lora=lora,
            value_head=value_head,
            options=options,
        )
        planning = built.planning
        planner = CertifiedPlanner(
            planning.pool, planning.cost_model, planning.limits, is_in_line=True
        )
        return cls(built.engine, planner, planning.limits, built)

    def plan(
        self, sequences: Sequence[Any], *, mini_batches: int = 1, scatter: bool = False
    ) -> Batch:
        """Plan a batch, for any number of passes over it.

        Args:
            sequences: `TokenSequence`s, or rows of token ids. The same on every rank.
            mini_batches: number of consecutive parts, each with a plan, for an update each.
            scatter: every rank gives its share of the sequences instead, possibly none; the
                batch has those of rank 0 first.

        Raises:
            ConfigurationError: the ranks have different sequences, or fewer than mini-batches.
            DataError: a sequence is wrong.
            PlanError: a sequence is longer than any strategy holds.
        """
        vocab_size = self.runtime.definition.vocab_size
        max_length = None if self._built is None else self._built.model.max_position_embeddings
        what = "sequences cannot be planned"
        mini_batches, scatter = agreed(
            lambda: (checked_mini_batches(mini_batches), bool(scatter)), "mini_batches and scatter"
        )
        given = on_all_ranks(lambda: checked_list(sequences), what)
        own = range(len(given))
        if scatter:
            shares = of_all_ranks(given)
            first = sum(map(len, shares[: self.runtime.rank]))
            own = range(first, first + len(given))
            given = [each for share in shares for each in share]
        checked = on_all_ranks(lambda: as_sequences(given, vocab_size, max_length), what)
        check_same(
            of_all_ranks(digest_of(checked)),
            "sequences",
            "give the same to all, or each its share of the sequences with scatter=True",
        )
        if mini_batches > len(checked):
            raise ConfigurationError(
                f"each mini-batch has at least 1 sequence but there are {len(checked)} sequences "
                f"for {mini_batches} mini-batches; ask for 1 to {len(checked)}"
            )
        borders = [len(checked) * i // mini_batches for i in range(mini_batches + 1)]
        lengths = [
            [each.length for each in checked[start:stop]] for start, stop in pairwise(borders)
        ]
        first_number = self._num_planned
        self._num_planned += mini_batches
        texts = on_rank_0(
            lambda: [
                PlanText.of(self._planner.plan(part, iteration=first_number + i))
                for i, part in enumerate(lengths)
            ],
            what,
        )
        plans = tuple(
            checked_plan(text, part, self.runtime.pool, self._limits)
            for text, part in zip(texts, lengths, strict=True)
        )
        return Batch(checked, plans, own, scatter)

    def forward(
        self,
        batch: Batch,
        outputs: str | Sequence[str] = ("log_probs",),
        *,
        temperature: float = 1.0,
        adapters: bool = True,
    ) -> dict[str, list[Tensor]]:
        """Outputs of each sequence that this rank gave, in its order.

        Args:
            batch: from `plan`.
            outputs: of `OUTPUTS`, one or several.
            temperature: by which all logits are divided.
            adapters: whether they are used; without them the model is its own reference policy.

        Returns:
            By output a tensor (n,) for each sequence, on the job's device: at t what belongs to
            predicting token t, and 0 at the first token. "token_log_probs" are (n, k), of the
            sequences' input `TOKEN_IDS`. A model with a value head has "values" alone.

        Raises:
            ConfigurationError: there is no such output, or one is given twice, or none, or
                `TOKEN_IDS` are wrong or missing.
        """
        self.runtime.require_onloaded()
        _, names, temperature, adapters = agreed(
            lambda: (
                plans_of(batch),
                checked_outputs(outputs, batch, self.runtime.definition),
                checked_number(temperature, "temperature"),
                bool(adapters),
            ),
            "batch, outputs, temperature and adapters",
        )
        found: list[list[Tensor]] = [[] for _ in names]
        for part in batch:
            flats = self._flat_outputs(part, names, temperature, adapters)
            for kept, flat in zip(found, flats, strict=True):
                tensors = flat.split([len(each.tokens) for each in part.sequences])
                kept += [tensors[i].clone() for i in part.own]  # not views of the whole batch
        return dict(zip(names, found, strict=True))

    def forward_backward(
        self,
        batch: Batch,
        loss: TokenLoss,
        *,
        divisor: float | None = None,
        entropy: bool = True,
        temperature: float = 1.0,
    ) -> LossTotal:
        """Add the gradient of Σ weight · loss over the tokens of a batch.

        An error while the model runs drops the gradients of this call and of all others since the
        last update, as they may be incomplete. Wrong arguments leave them.

        Args:
            batch: from `plan`; its mini-batches are added up.
            loss: see `runtime.token_loss.TokenLoss`.
            divisor: of this call's sum; None leaves the division to `optim_step`.
            entropy: whether the loss gets entropies, which take time; None in their place without.
            temperature: by which all logits are divided.

        Returns:
            Undivided sums over the batch, equal on every rank. Every call adds them up by a
            small all-reduce, for which the host waits. They leave out replicas of one rank on which
            memory ran out; `optim_step` and `discard_gradients` then raise OutOfMemoryError.

        Raises:
            ConfigurationError: the loss returns anything but one number per token, reads inputs
                that the sequences lack, or depends on no output; or the engine has no optimizer.
        """
        self.runtime.require_optimizer()
        self.runtime.require_onloaded()
        _, divisor, entropy, temperature = agreed(
            lambda: (
                plans_of(batch),
                checked_divisor(divisor),
                bool(entropy),
                checked_number(temperature, "temperature"),
            ),
            "batch, divisor, entropy and temperature",
        )
        self._add_gradients(batch, loss, divisor, entropy=entropy, temperature=temperature)
        return self.runtime.loss_of_last(len(batch.plans))

    def batch_loss(
        self,
        batch: Batch,
        loss: BatchLoss,
        outputs: str | Sequence[str] = ("log_probs",),
        *,
        temperature: float = 1.0,
        is_linear: bool = False,
    ) -> float:
        """Add the gradient of a loss that couples sequences, such as DPO's of pairs.

        `forward` gives the loss its outputs; a second pass of the same plans trains the sum of
        output times derivative, whose gradient is that of the loss. Weights of tokens play no part.

        Args:
            batch: from `plan`; with mini-batches the loss is of all of them.
            loss: called once on every rank, see `BatchLoss`. With ``scatter`` each rank has the
                loss of its share, and their sum is trained.
            outputs: that the loss gets, as for `forward`.
            temperature: by which all logits are divided.
            is_linear: whether the loss is a sum of outputs times constants. It is called with
                zeros then, which saves the first pass.

        Returns:
            The loss, which `optim_step` does not divide.

        Raises:
            ConfigurationError: the loss returns anything but one number that depends on its
                outputs; or the engine has no optimizer.
            CheckpointError: the loss raises another error.
        """
        self.runtime.require_optimizer()
        self.runtime.require_onloaded()
        _, names, temperature, is_linear = agreed(
            lambda: (
                plans_of(batch),
                checked_outputs(outputs, batch, self.runtime.definition),
                checked_number(temperature, "temperature"),
                bool(is_linear),
            ),
            "batch, outputs, temperature and is_linear",
        )
        if is_linear:
            lengths = [len(batch.sequences[i].tokens) for i in batch.own]
            found = {
                name: [self._zeros(length, *_entry_shape(name, batch)) for length in lengths]
                for name in names
            }
        else:
            found = self.forward(batch, names, temperature=temperature)
        value, derivatives = on_all_ranks(
            lambda: _derivatives(loss, found), "the loss of a batch cannot be computed"
        )
        plain = [
            TokenSequence(
                each.tokens, inputs={k: v for k, v in each.inputs.items() if k == TOKEN_IDS}
            )
            for each in batch.sequences
        ]
        second = replace(batch, sequences=tuple(plain)).with_inputs(**derivatives)
        self._add_gradients(
            second, _linear_loss, 1.0, entropy="entropy" in names, temperature=temperature
        )
        if is_linear:
            return self.runtime.loss_of_last(len(batch.plans)).loss_sum
        if batch.is_scattered:
            value = sum(of_all_ranks(value))
        return value

    def _zeros(self, *shape: int) -> Tensor:
        """As outputs are."""
        dtype = at_least_fp32(self.runtime.dtype)
        return torch.zeros(*shape, dtype=dtype, device=self.runtime.device)

    def _add_gradients(
        self,
        batch: Batch,
        loss: TokenLoss,
        divisor: float | None = None,
        *,
        entropy: bool,
        temperature: float = 1.0,
    ) -> None:
        """See `forward_backward`; the sums stay on the ranks."""
        step = loss_forward_step(
            loss,
            divisor=1.0 if divisor is None else divisor,
            entropy=entropy,
            temperature=temperature,
        )
        first = batch.sequences[0]
        on_all_ranks(lambda: check_inputs(batch, self.runtime.definition), "inputs cannot be read")
        on_all_ranks(
            lambda: check_token_loss(
                loss,
                {name: value[1:].to(self.runtime.device) for name, value in first.inputs.items()},
                first.length,
                self.runtime.device,
                entropy=entropy,
                has_value_head=self.runtime.definition.has_value_head,
            ),
            "the loss cannot be called",
        )
        try:
            for part in batch:
                share = self._share(part)
                self.runtime.forward_backward(
                    share.strategy, share.micro_batches, step, is_divided=divisor is not None
                )
        except BaseException:
            self.runtime.abandon_gradients()
            raise

    def discard_gradients(self) -> None:
        """Forget the gradients of all calls since the last update, if there are any.

        Raises OutOfMemoryError on every rank, where memory ran out on one.
        """
        self.runtime.discard_gradients()

    def optim_step(self, *, lr: float | None = None, divisor: float | None = None) -> float | None:
        """Update the parameters by the gradients of all calls since the last update.

        Args:
            lr: learning rate of this and later updates; None for the last one. Embedding and
                output layer keep a ``decoupled_lr``.
            divisor: of the summed gradients; None for the sum of the weights of all calls, or 1
                where each call has a divisor.

        Returns:
            Norm of the gradient, after division and before clipping; None where no token has a
            weight or the loss is not finite. Without a finite loss and norm nothing is updated,
            and rank 0 warns.

        Raises:
            ConfigurationError: there was no call, both have a divisor, or the engine has no
                optimizer.
            OutOfMemoryError: on every rank, where memory ran out on one.
        """
        self.runtime.require_optimizer()
        self.runtime.require_onloaded(optimizer=True)
        lr, divisor = agreed(lambda: (checked_lr(lr), checked_divisor(divisor)), "lr and divisor")
        return self._step(lr, divisor).gradient_norm

    def train_step(
        self,
        sequences: Sequence[Any],
        loss: TokenLoss,
        *,
        lr: float | None = None,
        entropy: bool = True,
        scatter: bool = False,
    ) -> StepOutcome:
        """`plan`, `forward_backward` and `optim_step`; raises what they raise."""
        self.runtime.require_optimizer()
        self.runtime.require_onloaded(optimizer=True)
        lr, entropy = agreed(lambda: (checked_lr(lr), bool(entropy)), "lr and entropy")
        self._add_gradients(self.plan(sequences, scatter=scatter), loss, entropy=entropy)
        return self._step(lr, None)

    def hf_tensors(self, content: str = "merged") -> Iterator[tuple[str, Tensor]]:
        """Every tensor by Hugging Face's name, whole, on every rank, one after another.

        For a rollout engine. With adapters it is the model "merged" with them, the "base" model
        below them, or the "adapters" alone, by peft's names. Every rank exhausts the iterator; none
        holds the model. All tensors are of one update: after another update, a load, an offload or
        `close` the iterator raises HydraulisError. Raises ConfigurationError unless the engine
        comes from `from_hf`, and for adapters that it has not.
        """
        lora, source = self.runtime.definition.lora, self._source
        if content not in get_args(HfContent) or (content == "adapters" and lora is None):
            raise ConfigurationError(
                f"tensors are of {', '.join(get_args(HfContent))}, the last with lora alone, but "
                f"content is {content!r:.60} and lora {lora}; correct it"
            )
        tensors = hf_tensors(self.runtime, source.model, source.places, cast(HfContent, content))
        return self._while_unchanged(tensors)

    def hf_shards(self) -> Iterator[HfShard]:
        """This rank's part of every tensor of `hf_tensors`, without communication.

        For a rollout engine that gets weights from all ranks, or only those that changed. Ranks
        have the same tensors in the same order, and each element is in one rank's part. Raises what
        `hf_tensors` does, also with adapters, which are merged as a whole.
        """
        lora, source = self.runtime.definition.lora, self._source
        if lora is not None:
            raise ConfigurationError(
                f"shards are those of a model without adapters but lora is {lora}; take hf_tensors"
            )
        return self._while_unchanged(hf_shards(self.runtime, source.model, source.places))

    def _while_unchanged[Item](self, items: Iterator[Item]) -> Iterator[Item]:
        """The items, as long as the parameters are those of the first one."""
        before = self.runtime.num_changes
        for number, item in enumerate(items, start=1):
            yield item
            self.runtime.require_onloaded()
            if self.runtime.num_changes != before:
                raise HydraulisError(
                    "all exported tensors are of one update but the parameters changed after "
                    f"the first {number}; take all of them before optim_step or load, or begin "
                    "again"
                )

    def save(self, folder: str | Path) -> None:
        """Save parameters and optimizer in the format of the training program.

        The checkpoint is named after the number of updates. ``export-hf`` converts it, and
        ``--load DIR --finetune`` starts from it. Raises CheckpointError, and ConfigurationError
        unless the engine comes from `from_hf`.
        """
        self.runtime.require_onloaded(optimizer=True)
        args = self._source.resolved.args
        path = agreed(lambda: checked_path(folder), "path")
        num_steps = int(self.runtime.optimizer.num_steps.item())
        saver = CheckpointSaver(CheckpointFolder(path), self.runtime, log=lambda message: None)
        saver.save(
            SavedState(
                iteration=num_steps,
                model=self._model,
                state={},
                configuration={},
                upstream=upstream_entries(
                    args, num_steps, self.runtime.optimizer, self.runtime.pool
                ),
            )
        )
        saver.finish()

    def load(self, folder: str | Path) -> None:
        """Load parameters and optimizer of the latest checkpoint in a folder that `save` wrote.

        Pool and number of ranks may be others. Without an optimizer only parameters are loaded.
        Raises CheckpointError, ConfigurationError for another model, and HydraulisError while
        there are gradients that no update has used.
        """
        self.runtime.require_no_gradients("a load")
        self.runtime.require_onloaded(optimizer=True)
        path = agreed(lambda: checked_path(folder), "path")
        paths = find_checkpoints(CheckpointFolder(path))
        if not paths:
            raise CheckpointError(f"{folder}: there is no checkpoint; correct the path")
        load_checkpoint(
            paths[0], self.runtime, self._model, with_optimizer=self.runtime.has_optimizer
        )

    def offload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Move to the host, until `onload`, what is not there.

        Forward and backward passes and `hf_tensors` need parameters; `optim_step`, `save` and
        `load` need both.

        Args:
            parameters: with the memory of gradients.
            optimizer: the optimizer's state.

        Raises HydraulisError while there are gradients that no update has used, if parameters move.
        """
        self.runtime.offload(**agreed_parts(parameters, optimizer))

    def onload(self, *, parameters: bool = True, optimizer: bool = True) -> None:
        """Move back what `offload` moved."""
        self.runtime.onload(**agreed_parts(parameters, optimizer))

    def close(self) -> None:
        """Release memory and process groups; the second call does nothing.

        To be called before the default process group is destroyed.
        """
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = self._built = None
            release_cached_memory()  # as models and their hooks refer to each other

    @property
    def _source(self) -> BuiltEngine:
        if self._built is None:
            raise ConfigurationError(
                "the engine must know the model's Hugging Face form but was built of parts; make "
                "it by Engine.from_hf"
            )
        return self._built

    @property
    def _model(self) -> dict[str, Any]:
        resolved = self._source.resolved
        return model_of(resolved.args, resolved.vocabulary.size)

    def _step(self, lr: float | None, divisor: float | None) -> StepOutcome:
        self.runtime.check_divisor(divisor)  # before lr changes
        if lr is not None:
            for group in self.runtime.optimizer.param_groups:
                if group["default_config"]:
                    group["lr"] = lr
        outcome = self.runtime.optim_step(divisor=divisor)
        if outcome.num_ranks_without_memory:
            raise SharedOutOfMemoryError(outcome.out_of_memory, outcome.num_ranks_without_memory)
        if outcome.loss.weight_sum and not outcome.updated and self.runtime.rank == 0:
            warnings.warn(
                "an update needs a finite loss and gradient norm but the loss is "
                f"{outcome.loss.mean} and the norm {outcome.gradient_norm}: nothing is updated; "
                "look at the inputs of the loss, or lower lr",
                RuntimeWarning,
                stacklevel=3,
            )
        return outcome

    def _share(self, part: Batch) -> RankShare:
        """This rank's share of a batch with one plan."""
        (plan,) = part.plans
        sequences = part.sequences
        none = {name: value[:0] for name, value in sequences[0].inputs.items()}
        return RankShare.of(
            plan, self.runtime.rank, self.runtime.device, sequences.__getitem__, none
        )

    def _flat_outputs(
        self, part: Batch, outputs: Sequence[str], temperature: float, adapters: bool
    ) -> list[Tensor]:
        """By output (tokens of all sequences, …), on every rank; each value is made by one rank."""
        share = self._share(part)
        step = output_forward_step(entropy="entropy" in outputs, temperature=temperature)
        if not adapters:
            step = without_adapters(step)
        reports = self.runtime.forward(share.strategy, share.micro_batches, step)
        ends = torch.tensor([len(each.tokens) for each in part.sequences]).cumsum(0)
        flat = [self._zeros(int(ends[-1]), *_entry_shape(name, part)) for name in outputs]
        model = self.runtime.runtime_of(share.strategy).model
        if model is not None and model.reports_loss:
            for batch, places, report in zip(
                share.micro_batches, share.places, reports, strict=True
            ):
                index = _places_of_outputs(batch, places, part.sequences, ends)
                for row, name in zip(flat, outputs, strict=True):
                    row[index.to(row.device)] = report[name].to(row.dtype)
        for values in flat:
            dist.all_reduce(values)
        return flat


def _derivatives(
    loss: BatchLoss, outputs: Mapping[str, list[Tensor]]
) -> tuple[float, dict[str, list[Tensor]]]:
    """A loss, and its derivatives by the outputs, as inputs of `_linear_loss`."""
    rows = [each.requires_grad_() for tensors in outputs.values() for each in tensors]
    with torch.enable_grad():
        value = loss(outputs)
    if not isinstance(value, Tensor) or value.numel() != 1 or (rows and not value.requires_grad):
        raise ConfigurationError(
            "the loss of a batch is one number that depends on its outputs but is "
            f"{value!r:.60}; sum it up, without detach()"
        )
    if rows:
        value.backward()  # type: ignore[no-untyped-call]
    return value.item(), {
        f"by_{name}": [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        for name, tensors in outputs.items()
    }


def _entry_shape(output: str, batch: Batch) -> tuple[int, ...]:
    """Shape of an output of one token."""
    return batch.sequences[0].inputs[TOKEN_IDS].shape[1:] if output == "token_log_probs" else ()


def _linear_loss(
    log_probs: Tensor | None, entropy: Tensor | None, inputs: Mapping[str, Tensor], segments: Any
) -> Tensor:
    values: dict[str, Any] = {"log_probs": log_probs, "entropy": entropy, **inputs}
    products = [
        values[name] * inputs[f"by_{name}"] for name in (*OUTPUTS, VALUES) if f"by_{name}" in inputs
    ]
    return sum(each if each.dim() == 1 else each.sum(dim=1) for each in products)  # type: ignore[return-value]


def _places_of_outputs(
    batch: PackedBatch, places: Sequence[int], sequences: Sequence[TokenSequence], ends: Tensor
) -> Tensor:
    """(labels,) places of a row's outputs among the tokens of all sequences."""
    _, numbers, positions = (torch.from_numpy(each) for each in token_places(batch))
    sequence = torch.tensor(places, dtype=torch.int64)[numbers]
    starts = ends - torch.tensor([len(each.tokens) for each in sequences])
    return starts[sequence] + positions + 1
