"""A cost model from first principles: the time terms of training, of ``estimate`` and of layouts.

Forward of one layer on a rank, for a micro-batch of lengths s_i (h hidden size, q width of all
query heads, f width of the MLP, P entries of a layer's matrices; lower-case constants are those of
`KernelConstants`, rates and links those of the device):

    matmul       a product with each matrix by its shape (kernels.py) / product_share; where none
                 was measured 2·P/(tp·cp) · Σ s / matmul rate
    attention    of q/tp channels by length and heads (kernels.py) / cp; where none was measured
                 2·q/(tp·cp) · Σ (s² + half_rate_tokens·s) / attention rate: half of 4·q·s², being
                 causal, at a rate that grows with s
    elementwise  (hidden_passes·h/shares + query_passes·qkv/tp + ffn_passes·f/tp) · bytes/cp · Σ s
                 / memory bandwidth; shares is tp with sequence parallelism and 1 without
    tp           4 collectives of h · bytes/cp · Σ s by ranks and bytes (kernels.py), unmeasured or
                 across nodes of latency + (tp-1)/tp · h · bytes/cp · Σ s / bandwidth: all-gather
                 and reduce-scatter around attention and MLP (arXiv 2205.05198 §4.2.2; an all-reduce
                 without sequence parallelism moves as much as the two); latent attention gathers
                 latents and rotated channels instead of h
    copies       hidden states that copies of tokens for experts move · h · bytes/cp
                 · Σ s / memory bandwidth
    ep           an all-to-all of tokens to whole experts and back; the matrices of
                 experts count by the busiest rank
    cp           a ring or an all-gather of keys and values, or an all-to-all of heads (context.py)
    fs           an all-gather of the weights that cp ranks share
    launch       num_launches · kernel_s: no kernel is shorter (host.py)

The backward takes twice the forward, as matrix products have two gradients (arXiv 2104.04473,
appendix), of frozen matrices one, and nothing in front of all that is trained; attention 2.5 times,
since it recomputes scores (arXiv 2307.08691), or as kernels.py has it;
copies and messages of tp once more and those of cp as context.py has it; twice the launches. It
gathers the weights of fs again and reduce-scatters their gradients. It
moves the weights weight_passes times to accumulate their gradients. Recomputation runs a forward
and its messages once more: of a layer, its core attention (with the exchange of cp), its MLP (with
two of the collectives), its norms or the activation of its experts.

The last stage also computes logits and loss: logit_products · 2·V·h/(tp·cp) · Σ s / matmul rate for
V padded entries, and logit_passes rows of logits through memory. Stages send activations and
gradients to their neighbours.

Everything is linear in Σ s², Σ s and 1, which gives the coefficients a, b and c. Each coefficient
is that of the stage where it is largest, because a replica runs at the pace of its slowest stage.

What runs at the same time does not add up: `overlap` says what is hidden in each form of
`Coefficients`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Annotated, NamedTuple

from megatron.hydraulis.assumed import Assumed, Corner, at_corner
from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.context import Exchange, exchange_of
from megatron.hydraulis.cost_model.host import LOCAL_LAYERS, TE_LAYERS, HostTime
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.kernels import (
    Rates,
    attention_plane,
    collective_line,
    product_line,
)
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.overlap import (
    NUM_TP_COLLECTIVES_FORWARD,
    CostTerm,
    hidden_by_stage,
    shared_weights_s,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts, split_layers
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.cost_model.trained_model import (
    SAFE_EXPERT_LOAD,
    TrainedModel,
    kept_modules,
)
from megatron.hydraulis.frozen import NOTHING_FROZEN, StageLayers
from megatron.hydraulis.lora import Adapter
from megatron.hydraulis.strategy import Scheme, Strategy

_MS_PER_S = 1e3
_SHARED = tuple(each.name for each in fields(TrainedModel))
# A multiplication and an addition per entry of a matrix and token.
_FLOPS_PER_ENTRY = 2
_BACKWARD_FORWARDS = 2.0
_BACKWARD_ATTENTIONS = 2.5
# Of queries' latents, those of keys and values, and rotated channels, one after the other.
_NUM_LATENT_GATHERS = 3
# Tokens go to their experts and come back; their gradients likewise.
_NUM_EXCHANGES_FORWARD = 2
_TO_COPIES, _TO_JOIN, _TO_SORT, _TO_SUMS = 2, 2, 4, 3
# A norm reads a hidden state and writes one.
_NORM_PASSES = 2
# The activation to the next stage and its gradient back.
_NUM_PP_MESSAGES = 2
# Gate, up and down: ffn_passes is for three matrices.
_NUM_GATED_MATRICES = 3


Passes = Annotated[
    float, Assumed(0.7, 1.4, "fitted to kernels of 2022; fused ones move less, other ones more")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConstants:
    """Constants of this program's kernels and of how they are called; the device's are its own.

    ``benchmarks/layout_calibration.py`` fitted them to measured layouts of other software and to a
    measured profile together; docs/cost-model.md has the errors.
    """

    product_share: Annotated[
        float, Assumed(1.1, 0.85, "1.0 is the rate alone; clocks fall by up to a quarter", most=1.0)
    ] = 0.907
    """Rate of matrix products in training over that of the same products measured alone, where the
    device has measured `kernels`: clocks fall under load (assumed cause)."""
    hidden_passes: Passes = 5.91
    """Hidden states that a layer's forward moves through memory outside its matrix products:
    norms, residuals. Without sequence parallelism every tp rank moves all of them. Target of the
    fit: that saved 0.6 of 19.6 ms per layer (arXiv 2205.05198, table 4)."""
    query_passes: Passes = 6.17
    """Rows of queries, keys and values that it moves, divided by tp: rotation, layout."""
    ffn_passes: Passes = 5.11
    """Rows of the MLP's width that it moves, divided by tp, if the MLP is gated."""
    logit_passes: Passes = 21.4
    """Rows of logits that loss and its gradient move, in bf16 rows."""
    logit_products: float = 4.0
    """Products with the output matrix: logits, once more for the backward of a row of several
    chunks (runtime/token_loss.py), and two gradients; not fitted."""
    weight_passes: Passes = 1.78
    """How often the backward of a micro-batch moves the weights to accumulate gradients."""
    half_rate_tokens: float = 512.0
    """Length at which attention that was not measured reaches half of its rate for long sequences;
    after the throughputs in FlashAttention-2 (arXiv 2307.08691, figure 4), not fitted."""
    network_latencies: float = 13.6
    """Constant time of a collective of tensor parallelism over several nodes, in latencies of the
    network; fitted to tp16, whose ring has 15 steps."""
    collective_latencies: float = 2.16
    """The same inside a node, where none was measured (assumption)."""
    attention_backward: Annotated[
        float,
        Assumed(1.15, 0.85, "2.5 × the work at 63 instead of 73 % of the peak (arXiv 2307.08691)"),
    ] = 1.0
    """Time of attention's backward over what the device's constants say."""
    overlap: Annotated[
        float, Assumed(1.0, 0.5, "messages take multiprocessors and memory from compute")
    ] = 1.0
    """Share of what can overlap that does, in a ring of keys and values and with the weights that
    cp ranks share (assumption)."""
    tp_link_share: float = 1.0
    """Rate of collectives of tensor parallelism in a node over that of the same ones measured
    alone; not fitted."""


KERNELS = KernelConstants()


def _of_context_rank(scheme: Scheme, per_token_s: float, constant_s: float) -> CostTerm:
    """Of a micro-batch, from seconds per token of a cp rank."""
    return CostTerm(0.0, per_token_s / scheme.cp, constant_s)


class _Matrices(NamedTuple):
    """Equal matrices of a layer on a rank, and the rows that a product with one of them takes."""

    number: float
    """Mean over the layers."""
    rows_per_token: float
    """For every token of the cp rank."""
    outputs: float
    inputs: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCostModel(TrainedModel):
    """CostModel from the model's shape, device constants and cluster.

    The activations of `kept_modules` are kept, whatever it is to recompute.
    """

    cluster: Cluster
    kernels: KernelConstants = KERNELS
    regroup: RegroupCosts | None = None
    """Affects the overhead of strategies only."""

    def __post_init__(self) -> None:
        kept = kept_modules(
            has_experts=self.shape.num_experts > 0,
            has_te_layers=self.has_te_layers,
            groups_experts=self.groups_experts,
        )
        object.__setattr__(self, "recompute", self.recompute.without(tuple(kept)))

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of the device in the training precision."""
        return self.device.peak(self.precision)

    @property
    def rates(self) -> Rates:
        """Of this job: its links may differ from the device's usual ones."""
        link_bytes_per_s = self.cluster.intra_node.bytes_per_s
        return replace(self.device.rates(self.precision), link_bytes_per_s=link_bytes_per_s)

    @property
    def backward_attentions(self) -> float:
        """Time of attention's backward in forwards."""
        kernels = self.device.kernels
        forwards = kernels.attention.backward_forwards if kernels else _BACKWARD_ATTENTIONS
        return self.kernels.attention_backward * forwards

    def at_corner(self, corner: Corner) -> "AnalyticCostModel":
        """The model with assumed constants in a corner."""
        return replace(
            self,
            device=at_corner(self.device, corner),
            kernels=at_corner(self.kernels, corner),
            cluster=self.cluster.at_corner(corner),
        )

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch that fit in memory; see MemoryModel.

        Raises StrategyError when the scheme cannot hold the model's layers.
        """
        return self.memory.max_tokens(scheme)

    def overhead_ms(self, strategy: Strategy) -> float:
        """Computed if `regroup` is known, else 0.0; raises as `RegroupCosts.exposed_ms`."""
        if self.regroup is None:
            return 0.0
        return self.regroup.exposed_ms(strategy, StageCosts(self, self.shape).usual_times_ms)

    @property
    def memory(self) -> MemoryModel:
        """The memory model of the same job, whose limits allow for `SAFE_EXPERT_LOAD` at least."""
        shared = {name: getattr(self, name) for name in _SHARED}
        return MemoryModel(
            **shared | {"expert_load": max(self.expert_load, SAFE_EXPERT_LOAD)},
            num_ranks=self.cluster.num_ranks,
            ranks_per_node=self.cluster.ranks_per_node,
        )

    def regroup_costs(
        self,
        tp_degrees: Iterable[int],
        *,
        overlaps: bool = True,
    ) -> RegroupCosts:
        """Costs of regrouping in this job, with schemes of these tp degrees; see
        `RegroupCosts.of`."""
        return RegroupCosts.of(
            self.shape,
            self.device,
            self.cluster,
            num_atoms=math.lcm(*tp_degrees),
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            overlaps=overlaps,
            frozen=self.frozen,
        )

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Time of a micro-batch on the slowest stage; formulas in the module's docstring.

        Raises StrategyError when the scheme cannot hold the model's layers.
        """
        stages = [sum(stage.values(), CostTerm()) for stage in self.terms_by_stage(scheme)]
        share = self._forward_share(scheme)
        hidden = hidden_by_stage(self, scheme)
        first, *others = dict.fromkeys(
            Coefficients(
                a_ms_per_token2=_MS_PER_S * max(0.0, *(each.per_token2_s for each in totals)),
                b_ms_per_token=_MS_PER_S * max(0.0, *(each.per_token_s for each in totals)),
                c_ms=_MS_PER_S * max(0.0, *(each.constant_s for each in totals)),
                window=self.shape.window,
                forward_share=share,
            )
            for of_form in hidden
            if (totals := [s + -1.0 * less for s, less in zip(stages, of_form, strict=True)])
        )
        return replace(first, others=tuple(others), host_ms=self._host_ms(scheme))

    def _forward_share(self, scheme: Scheme) -> float:
        """Share of the forward in the time per token of a stage's layers, rounded so that schemes
        have shares in common, for which the planner prepares bounds."""
        stages = (self.stage_layers(scheme, stage) for stage in range(scheme.pp))
        layers = max(stages, key=lambda each: each.flops_per_entry)
        terms = self.stage_terms(scheme, layers, is_last=False)
        both_s = sum(term.per_token_s for cause, term in terms.items() if cause != "boundary")
        forward = sum(self.forward_terms(scheme).values(), CostTerm())
        return round(layers.number * forward.per_token_s / both_s, 2)

    def balanced_scheme(self, scheme: Scheme, *, min_tokens: int) -> Scheme:
        """The scheme with the layers that minimise b: embedding and output layer are balanced.

        A stage's time is that of a micro-batch of many short sequences; with long ones, attention
        in the layers makes the output layer weigh less. A micro-batch of min_tokens must fit in
        memory, or as many tokens as fit with any layers. The scheme is unchanged if the even split
        is as fast and holds min_tokens.

        Raises StrategyError when there are more stages than layers.
        """
        even = scheme.layers_per_stage(self.shape.num_layers)

        def with_predictions(stage: int, num_layers: int) -> int:
            return num_layers + (stage == scheme.pp - 1) * self.shape.num_predictions

        def time(stage: int, num_layers: int) -> float:
            is_last = stage == scheme.pp - 1
            layers = self.usual_layers(with_predictions(stage, num_layers))
            terms = self.stage_terms(scheme, layers, is_last=is_last)
            return sum(terms.values(), CostTerm()).per_token_s

        # With what a model provider freezes, layers of a stage would not be alike.
        memory = self.memory if self.lora else replace(self.memory, frozen=NOTHING_FROZEN)

        def tokens(stage: int, num_layers: int) -> int:
            return memory.stage_tokens(scheme, stage, with_predictions(stage, num_layers))

        layers = split_layers(
            self.shape.num_layers, scheme.pp, time=time, tokens=tokens, min_tokens=min_tokens
        )
        slowest = max(time(stage, num) for stage, num in enumerate(layers))
        is_even_as_fast = max(time(stage, num) for stage, num in enumerate(even)) <= slowest
        if is_even_as_fast and self.memory.max_tokens(scheme) >= min_tokens:
            return scheme
        return replace(scheme, layers=layers)

    def terms_by_stage(self, scheme: Scheme) -> list[dict[str, CostTerm]]:
        """`stage_terms` of every stage; raises as `coefficients`."""
        *before, last = (self.stage_layers(scheme, stage) for stage in range(scheme.pp))
        inner = {each: self.stage_terms(scheme, each, is_last=False) for each in set(before)}
        return [*(inner[each] for each in before), self.stage_terms(scheme, last, is_last=True)]

    def stage_terms(
        self, scheme: Scheme, layers: StageLayers, *, is_last: bool
    ) -> dict[str, CostTerm]:
        """Forward and backward of a micro-batch on a stage of these layers, by cause.

        Messages to the neighbours and, on the last stage, output layer and loss included. The
        embedding's lookup is free.
        """
        forward = self.forward_terms(scheme)
        num_layers = layers.number
        num_backwards = num_layers - layers.idle
        # Mean over the layers that have a backward.
        share_frozen = layers.frozen / max(1, num_backwards)
        share_trained = 1.0 if self.lora else 1.0 - share_frozen
        weights_s = share_trained * self.kernels.weight_passes * self._trained_bytes(scheme)
        frozen = share_frozen * self._products(scheme, *self._layer_matrices(scheme))
        backward = {
            "matmul": _BACKWARD_FORWARDS * forward["matmul"] + -1.0 * frozen,
            "attention": self.backward_attentions * forward["attention"],
            "elementwise": _BACKWARD_FORWARDS * forward["elementwise"]
            + CostTerm(constant_s=weights_s / self.device.memory_bytes_per_s),
            "launch": _BACKWARD_FORWARDS * forward["launch"],
            "tensor_parallel": forward["tensor_parallel"],
            "expert_copies": forward["expert_copies"],
            "expert_parallel": forward["expert_parallel"],
            "context_parallel": self.context_terms(scheme)[1],
        }
        terms = {
            cause: num_layers * term + num_backwards * backward[cause]
            for cause, term in forward.items()
        }
        again = self.recompute_of(scheme)
        terms["recompute"] = (
            again.num_layers_again(num_backwards) * sum(forward.values(), CostTerm())
            if again.granularity == "full"
            else num_backwards * self._selected_again(scheme, forward)
        )
        if scheme.shares_weights:
            terms["shared_weights"] = CostTerm(constant_s=sum(shared_weights_s(self, scheme)))
        terms["logits"] = self._logits(scheme) if is_last else CostTerm()
        terms["boundary"] = self.boundary(scheme)
        return terms

    def _selected_again(self, scheme: Scheme, forward: dict[str, CostTerm]) -> CostTerm:
        """What selective recomputation takes for a layer, mean over the layers."""
        again, shape, share = self.recompute_of(scheme), self.shape, self._share_with_experts
        of_dense, with_experts = self.num_norms_apart
        norms = (1.0 - share) * of_dense + share * with_experts
        norms *= _NORM_PASSES / (scheme.tp if self.sequence_parallel else 1)
        width = share * shape.experts_per_token * shape.expert_ffn_hidden_size / scheme.tp
        return (
            again.drops("core_attn") * (forward["attention"] + forward["context_parallel"])
            + again.drops("mlp") * self._mlp_forward(scheme)
            + again.drops("layernorm") * self._moved(norms * shape.hidden_size / scheme.cp)
            + again.drops("moe_act") * self._activation(scheme, width)
        )

    def forward_terms(self, scheme: Scheme) -> dict[str, CostTerm]:
        """Forward of one layer by cause."""
        shape, kernels = self.shape, self.kernels
        num_shares = scheme.tp if self.sequence_parallel else 1
        row = (
            kernels.hidden_passes * shape.hidden_size / num_shares
            + kernels.query_passes * shape.qkv_size / scheme.tp
        ) / scheme.cp
        adapters = list(self._adapter_matrices(scheme))
        # Half of the products add to the outputs of their layers.
        added = sum(each.number * each.rows_per_token * each.outputs for each in adapters[1::2])
        return {
            "matmul": self._products(scheme, *self._layer_matrices(scheme), *adapters),
            "attention": self.attention(scheme),
            "elementwise": self._moved(row + added / scheme.cp)
            + self._activation(scheme, shape.mlp_width / scheme.tp),
            "launch": CostTerm(constant_s=self._launches_s(scheme) / (1.0 + _BACKWARD_FORWARDS)),
            "tensor_parallel": self._tp_messages(scheme) + self._adapter_messages(scheme),
            "expert_copies": self._expert_copies(scheme),
            "expert_parallel": self._expert_exchange(scheme),
            "context_parallel": self.context_terms(scheme)[0],
        }

    def _launches_s(self, scheme: Scheme) -> float:
        """What the kernels of a layer take at least, forward and backward."""
        num_launches = sum(num * part.num_launches for num, part in self._host_times(scheme))
        return num_launches * self.device.kernel_s

    def _host_ms(self, scheme: Scheme) -> float:
        """Time of the host for a micro-batch on the stage of most layers; 0 if the device is the
        host."""
        core_factor = self.device.core_factor
        if core_factor is None:
            return 0.0
        stages = (self.stage_layers(scheme, stage) for stage in range(scheme.pp))
        num_layers = max(each.number for each in stages)
        num_forwards = 1.0 + self.recompute_of(scheme).num_layers_again(num_layers) / num_layers
        return (
            _MS_PER_S
            * num_layers
            * sum(
                num * part.seconds(core_factor, num_forwards)
                for num, part in self._host_times(scheme)
            )
        )

    def _host_times(self, scheme: Scheme) -> Iterator[tuple[float, HostTime]]:
        """What the host does for a layer, mean over the layers, and how often."""
        layer = TE_LAYERS if self.has_te_layers else LOCAL_LAYERS
        yield 1.0, layer.dense
        if scheme.tp > 1:
            yield 1.0, layer.tensor_parallel
        if self.shape.kv_lora_rank:
            yield 1.0, layer.latents
        if self.shape.num_experts:
            yield self._share_with_experts, layer.experts
            expert = (TE_LAYERS if self.groups_experts else LOCAL_LAYERS).expert
            yield self._share_with_experts * self.shape.num_experts / scheme.ep, expert

    def _trained_bytes(self, scheme: Scheme) -> float:
        """Bytes of a layer's trained matrices on a rank, mean over the layers, with all experts."""
        num_layers, norms = self.shape.num_layers, 2 * self.shape.hidden_size
        if self.lora is not None:
            return self.num_adapter_parameters(num_layers) / num_layers * self.parameter_bytes
        num_entries = self.num_layer_parameters(scheme, num_layers) / num_layers - norms
        return num_entries * self.parameter_bytes

    def _layer_matrices(self, scheme: Scheme) -> Iterator[_Matrices]:
        """Those of a layer without adapters on a rank, mean over the layers."""
        yield from self._attention_matrices(scheme)
        yield from self._mlp_matrices(scheme)

    def _adapted_linears(self) -> Iterator[tuple[float, list[Adapter], int]]:
        """Adapters of one of Megatron's linear layers each, with the share of the layers that have
        them and the channels between their products."""
        rank = 0 if self.lora is None else self.lora.rank
        for has_experts, number in self.kinds_of_layers.items():
            for parts in self.adapted_linears(has_experts=has_experts):
                yield number / self.shape.num_layers, parts, rank * len(parts)

    def _adapter_matrices(self, scheme: Scheme) -> Iterator[_Matrices]:
        """Those of a layer's adapters on a rank, mean over the layers. Where several are of one of
        Megatron's layers they are two products together (runtime/adapters.py)."""
        tp, num_shares = scheme.tp, scheme.tp if self.sequence_parallel else 1
        for share, parts, width in self._adapted_linears():
            inputs, of_a, of_b = float(parts[0].num_inputs), 1.0, 1.0
            outputs = float(sum(each.num_outputs for each in parts))
            match parts[0].tp_cuts:
                case "inputs":
                    inputs /= tp
                case "outputs":
                    outputs, of_a = outputs / tp, 1 / num_shares
                case None:
                    of_a = of_b = 1 / num_shares
            yield _Matrices(share, of_a, width, inputs)
            yield _Matrices(share, of_b, outputs, width)

    def _attention_matrices(self, scheme: Scheme) -> Iterator[_Matrices]:
        """Those of a layer's attention on a rank."""
        shape, tp = self.shape, scheme.tp
        yield _Matrices(1.0, 1.0, shape.hidden_size, shape.output_size / tp)
        if shape.kv_lora_rank:
            latent_size = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_pos_emb_head_dim
            # Every tp rank has these whole, for its part of the tokens.
            yield _Matrices(1.0, 1.0 / tp, latent_size, shape.hidden_size)
            keys_and_values = shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim)
            yield _Matrices(1.0, 1.0, keys_and_values / tp, shape.kv_lora_rank)
            query_inputs = shape.q_lora_rank or shape.hidden_size
            yield _Matrices(1.0, 1.0, shape.query_size / tp, query_inputs)
        else:
            gate_size = shape.query_size if shape.output_gate else 0
            yield _Matrices(1.0, 1.0, (shape.qkv_size + gate_size) / tp, shape.hidden_size)

    def _mlp_matrices(self, scheme: Scheme) -> Iterator[_Matrices]:
        """Those of a layer's MLP, or router and experts, on the busiest rank of a stage, for which
        the others wait; mean over the layers."""
        shape, tp, share = self.shape, scheme.tp, self._share_with_experts
        yield from self._mlp(1.0 - share, 1.0, shape.ffn_hidden_size / tp)
        if share:
            yield _Matrices(share, 1.0 / tp, shape.num_experts, shape.hidden_size)
            yield from self._mlp(share, 1.0, shape.shared_expert_ffn_hidden_size / tp)
            # Rows of grouped products fill tiles as those of one product do.
            number = 1.0 if self.groups_experts else shape.num_experts / scheme.ep
            width = shape.expert_ffn_hidden_size / (tp if scheme.ep == 1 else 1)
            yield from self._mlp(share * number, self.num_copies(scheme) / number, width)

    def _mlp(self, number: float, rows_per_token: float, width: float) -> Iterator[_Matrices]:
        if number and width:
            num_inputs = 2 if self.shape.gated_mlp else 1
            yield _Matrices(number, rows_per_token, num_inputs * width, self.shape.hidden_size)
            yield _Matrices(number, rows_per_token, self.shape.hidden_size, width)

    @property
    def _share_with_experts(self) -> float:
        """Share of the layers that have experts."""
        return self.shape.num_expert_layers / self.shape.num_layers

    def _expert_copies(self, scheme: Scheme) -> CostTerm:
        """Copies of tokens for experts in the forward, mean over the layers; the backward moves as
        many.

        A token is read and written once per copy (2), outputs of experts are joined (2), and each
        is read and added to its token's sum, which is read and written (3). With ep the first and
        the last are of the tp rank's own tokens, and the copies that arrive are sorted by expert,
        and their outputs back (2 + 2). Source: operations of megatron-core's dispatchers and
        ``SequentialMLP``.
        """
        copies, own = self.num_copies(scheme), self.shape.experts_per_token / scheme.tp
        num_states = (_TO_COPIES + _TO_JOIN + _TO_SUMS) * copies
        if scheme.ep > 1:
            num_states = (_TO_COPIES + _TO_SUMS) * own + (_TO_JOIN + _TO_SORT) * copies
        num_states *= self._share_with_experts
        return self._moved(num_states * self.shape.hidden_size / scheme.cp)

    def _expert_exchange(self, scheme: Scheme) -> CostTerm:
        """Tokens to whole experts and back, mean over the layers: a copy for each expert that a
        token passes on another rank. Messages to all ranks of a group travel together."""
        if scheme.ep == 1:
            return CostTerm()
        cluster, kernels = self.cluster, self.device.kernels
        num_bytes: float = self.shape.hidden_size * self.parameter_bytes
        num_bytes *= self.shape.experts_per_token / scheme.tp
        if kernels is not None and not cluster.uses_network(scheme.ep):
            per_token_s, constant_s = collective_line(
                kernels, self.rates, "alltoall", scheme.ep, num_bytes
            )
        else:
            num_inside = min(scheme.ep, cluster.linked_ranks) - 1
            s_per_byte = num_inside / cluster.intra_node.bytes_per_s
            s_per_byte += (scheme.ep - 1 - num_inside) / cluster.inter_node.bytes_per_s
            per_token_s = num_bytes / scheme.ep * s_per_byte / self.device.link_fraction
            constant_s = cluster.point_to_point(scheme.ep).latency_s
        exchange = _of_context_rank(scheme, self.rank_load(scheme) * per_token_s, constant_s)
        return _NUM_EXCHANGES_FORWARD * self._share_with_experts * exchange

    def _num_tp_collectives(self, scheme: Scheme) -> float:
        """Collectives in the forward of a layer, mean over the layers: whole experts take the
        tokens of their own tp rank, but not the experts that all tokens pass."""
        shape = self.shape
        if scheme.ep == 1 or shape.shared_expert_ffn_hidden_size:
            return NUM_TP_COLLECTIVES_FORWARD
        return NUM_TP_COLLECTIVES_FORWARD * (1.0 - self._share_with_experts / 2)

    def _tp_messages(self, scheme: Scheme) -> CostTerm:
        """Messages in the forward of a layer. With sequence parallelism, latent attention gathers
        what its projections take: both latents and the rotated channels of keys, or a whole hidden
        state where one matrix makes the queries (runtime/model_building.py)."""
        shape, number = self.shape, self._num_tp_collectives(scheme)
        if not (shape.kv_lora_rank and self.sequence_parallel):
            return self.tp_collectives(scheme, number)
        num_gathered = shape.q_lora_rank or shape.hidden_size
        num_gathered += shape.kv_lora_rank + shape.qk_pos_emb_head_dim
        num_channels = num_gathered / _NUM_LATENT_GATHERS
        others = self.tp_collectives(scheme, number - 1)
        return others + self.tp_collectives(scheme, _NUM_LATENT_GATHERS, num_channels)

    def _adapter_messages(self, scheme: Scheme) -> CostTerm:
        """What a layer's adapters gather in the forward with sequence parallelism: between both
        products, where tp ranks have a part of the outputs."""
        total = CostTerm()
        for share, parts, width in self._adapted_linears() if self.sequence_parallel else ():
            if parts[0].tp_cuts == "outputs":
                total += share * self.tp_collectives(scheme, 1, width)
        return total

    def _products(self, scheme: Scheme, *matrices: _Matrices) -> CostTerm:
        """One product with each of the matrices."""
        total = CostTerm()
        for each in matrices:
            sizes = each.rows_per_token, each.outputs, each.inputs
            if self.device.kernels is not None:
                line = product_line(self.device.kernels, self.rates, *sizes)
                share = self.kernels.product_share
            else:
                flops = _FLOPS_PER_ENTRY * math.prod(sizes)
                line, share = (flops / self.peak_flops_per_s, 0.0), self.device.matmul_fraction
            total += each.number / share * _of_context_rank(scheme, *line)
        return total

    def _moved(self, num_elements: float) -> CostTerm:
        """Elements of activations that a token moves through memory."""
        num_bytes = num_elements * self.parameter_bytes
        return CostTerm(per_token_s=num_bytes / self.device.memory_bytes_per_s)

    def _activation(self, scheme: Scheme, width: float) -> CostTerm:
        """Elementwise work inside the MLP, for so many of its columns on a rank."""
        num_matrices = _NUM_GATED_MATRICES if self.shape.gated_mlp else _NUM_GATED_MATRICES - 1
        passes = self.kernels.ffn_passes * num_matrices / _NUM_GATED_MATRICES
        return self._moved(passes * width / scheme.cp)

    def _mlp_forward(self, scheme: Scheme) -> CostTerm:
        return (
            self._products(scheme, *self._mlp_matrices(scheme))
            + self._activation(scheme, self.shape.mlp_width / scheme.tp)
            + self.tp_collectives(scheme, NUM_TP_COLLECTIVES_FORWARD // 2)
        )

    def attention(self, scheme: Scheme) -> CostTerm:
        """Forward of a layer: scores and their product with the values."""
        shape, kernels = self.shape, self.device.kernels
        if kernels is not None:
            heads, groups = (
                n / scheme.tp for n in (shape.num_attention_heads, shape.num_query_groups)
            )
            head_size = shape.score_size / shape.num_attention_heads
            per_token2_s, per_token_s, constant_s = attention_plane(
                kernels, self.rates, heads, groups, head_size
            )
            return CostTerm(per_token2_s / scheme.cp, per_token_s / scheme.cp, constant_s)
        causal_flops = _FLOPS_PER_ENTRY * shape.score_size / (scheme.tp * scheme.cp)
        per_token2_s = causal_flops / (self.peak_flops_per_s * self.device.attention_fraction)
        return CostTerm(per_token2_s, per_token2_s * self.kernels.half_rate_tokens)

    def _logits(self, scheme: Scheme) -> CostTerm:
        """Output layer and loss, forward and backward; once more for each layer of multi-token
        prediction, with its projection."""
        shape = self.shape
        output = _Matrices(1.0, 1.0, shape.vocab_size / scheme.tp, shape.hidden_size)
        product = self._products(scheme, output)
        num_moved = self.kernels.logit_passes * self.shape.vocab_size / (scheme.tp * scheme.cp)
        # Frozen, its weight needs no gradient; an adapter's products are neglected.
        num_products = self.kernels.logit_products - self.frozen.has_output_matrix(shape)
        once = num_products * product + self._moved(num_moved)
        hidden = shape.hidden_size
        projection = self._products(scheme, _Matrices(1.0, 1.0, hidden / scheme.tp, 2 * hidden))
        of_prediction = once + (1.0 + _BACKWARD_FORWARDS) * projection
        return once + shape.num_predictions * of_prediction

    def tp_collectives(
        self, scheme: Scheme, number: float, num_channels: float | None = None
    ) -> CostTerm:
        """All-gathers or reduce-scatters over the tp ranks, of a hidden state or num_channels."""
        tp, device = scheme.tp, self.device
        if tp == 1:
            return CostTerm()
        num_bytes = (num_channels or self.shape.hidden_size) * self.parameter_bytes
        if device.kernels is not None and not self.cluster.uses_network(tp):
            line = collective_line(device.kernels, self.rates, "all_gather", tp, num_bytes)
            return number / self.kernels.tp_link_share * _of_context_rank(scheme, *line)
        link = self.collective_link(tp)
        share = 1.0 if self.cluster.uses_network(tp) else self.kernels.tp_link_share
        num_bytes *= (tp - 1) / tp / scheme.cp
        return number * CostTerm(0.0, num_bytes / (link.bytes_per_s * share), link.latency_s)

    def collective_link(self, num_ranks: int, stride: int = 1) -> Link:
        """What collectives that were not measured reach of `Cluster.collective`."""
        device, latencies = self.device, self.kernels.collective_latencies
        link, share = self.cluster.collective(num_ranks, stride), device.link_fraction
        if self.cluster.uses_network(num_ranks):
            share, latencies = device.network_fraction, self.kernels.network_latencies
        return replace(
            link, bytes_per_s=link.bytes_per_s * share, latency_s=latencies * link.latency_s
        )

    def exchange(self, scheme: Scheme) -> Exchange:
        """How cp ranks exchange keys and values in a layer."""
        return exchange_of(
            self.shape,
            scheme,
            self.parameter_bytes,
            self.cp_comm_type,
            has_te=self.has_te_attention,
        )

    def context_terms(self, scheme: Scheme) -> tuple[CostTerm, CostTerm]:
        """Messages between the cp ranks in the forward of a layer, and in its backward."""
        moved = self.exchange(scheme)
        link = self.cluster.point_to_point(scheme.tp * scheme.cp)
        bandwidth = link.bytes_per_s * self.device.link_fraction
        backward_bytes = moved.total_bytes - moved.forward_bytes
        backward_messages = moved.total_messages - moved.forward_messages
        return (
            CostTerm(0.0, moved.forward_bytes / bandwidth, moved.forward_messages * link.latency_s),
            CostTerm(0.0, backward_bytes / bandwidth, backward_messages * link.latency_s),
        )

    def boundary(self, scheme: Scheme) -> CostTerm:
        """A stage's messages to its neighbours."""
        if scheme.pp == 1:
            return CostTerm()
        link = self.cluster.point_to_point(scheme.num_ranks)
        num_shares = scheme.cp * (scheme.tp if self.sequence_parallel else 1)
        num_bytes = self.shape.hidden_size * self.parameter_bytes / num_shares
        return _NUM_PP_MESSAGES * CostTerm(
            0.0, num_bytes / (link.bytes_per_s * self.device.link_fraction), link.latency_s
        )
