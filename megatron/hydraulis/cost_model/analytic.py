"""A cost model from first principles, without measurements.

Time of a micro-batch of lengths s_i on one stage, forward and backward, on a scheme ⟨tp, cp, pp⟩
with L layers on the stage (h hidden size, q width of all query heads, P entries of a layer's
matrices, V padded vocabulary):

    a  = 3 · 2 · q · L / (tp·cp) / attention rate
         causal attention forward: half of 4·q·s² (scores and their product with the values);
         the backward is twice the forward (as in arXiv 2104.04473, appendix)
    b  = 3 · 2 · P · L / (tp·cp) / matmul rate                 matrices
       + 3 · 2 · h · V / (tp·cp) / matmul rate                 output layer, on the last stage
       + 8 · (tp-1)/tp · h · bytes · L / cp / bandwidth        TP with or without SP
       + 3 · (cp-1)/cp · 2·kv · bytes · L / tp / bandwidth     CP: a ring of keys and values, or
       | 2 · (cp-1)/cp² · 2·(q + kv') · bytes · L / tp / bandwidth  an all-to-all of heads
       + 2 · h · bytes / (tp·cp) / bandwidth                   PP: activation and its gradient
    c  = overhead · L + latencies of all messages

TP moves a layer's activations 8 times: an all-gather and a reduce-scatter around attention and
around the MLP, forward and backward (arXiv 2205.05198 §4.2.2; an all-reduce without sequence
parallelism moves as much as the two). CP sends keys and values round the ring in the forward, and
them and their gradients in the backward, which makes 3 times; or, depending on --cp-comm-type, it
exchanges attention's inputs and output between tokens and heads, forward and backward, where kv' is
kv with query groups repeated up to cp (context.py). No overlap is assumed. Recomputation runs a
forward and its messages once more: of a layer, its core attention (with the ring) or its MLP (with
two of the collectives).

Each coefficient is that of the stage where it is largest, because a replica runs at the pace of its
slowest stage.
"""

from dataclasses import dataclass, replace
from functools import partial

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.context import Exchange, exchange_of
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.interface import Coefficients, usual_time_ms
from megatron.hydraulis.cost_model.memory import MemoryModel, PoolFootprint
from megatron.hydraulis.cost_model.pipeline import split_layers
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy

_MS_PER_S = 1e3
# A multiplication and an addition per entry of a matrix and token.
_FLOPS_PER_ENTRY = 2
# Forward, gradient of the input, gradient of the weight.
_NUM_PASSES = 3
# Collectives of the forward over the TP ranks around a layer's attention, and as many around its
# MLP; the backward has as many.
_NUM_TP_COLLECTIVES_FORWARD = 2
_NUM_TP_COLLECTIVES = 8
# The activation to the next stage and its gradient back.
_NUM_PP_MESSAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCostModel:
    """CostModel from the model's shape, device constants and cluster.

    Raises ConfigurationError for a size of parameters that is not 2 or 4 bytes.
    """

    shape: ModelShape
    device: DeviceConstants
    cluster: Cluster
    parameter_bytes: int = 2
    """Bytes of a parameter and of an activation: 2 for bf16, 4 for fp32."""
    sequence_parallel: bool = True
    recompute: Recompute = NO_RECOMPUTE
    """Which activations the backward recomputes."""
    cp_comm_type: str = "p2p"
    """How cp ranks exchange keys and values, one of `context.CP_COMM_TYPES`."""
    qk_norms: bool = False
    """Whether queries and keys are normalised; affects memory only."""
    keeps_gate: bool = False
    """Whether a gated activation runs as several kernels; affects memory only."""
    softmax_type: str = "vanilla"
    """Of core attention, as in Megatron; affects memory only."""
    has_wide_norms: bool = False
    """Whether norms keep their inputs in fp32; affects memory only."""
    has_te_layers: bool = False
    """Whether layers are those of Transformer Engine; affects memory only."""
    pool: PoolFootprint | None = None
    """Of the job; affects memory only."""
    regroup: RegroupCosts | None = None
    """Affects the overhead of strategies only."""

    def __post_init__(self) -> None:
        if self.parameter_bytes not in (2, 4):
            raise ConfigurationError(
                f"cost model: parameters have 2 or 4 bytes but {self.parameter_bytes} are given; "
                f"give 2 for bf16 or 4 for fp32"
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
        return self.regroup.exposed_ms(strategy, partial(usual_time_ms, self))

    @property
    def memory(self) -> MemoryModel:
        """The memory model of the same job."""
        return MemoryModel(
            shape=self.shape,
            device=self.device,
            num_ranks=self.cluster.num_ranks,
            parameter_bytes=self.parameter_bytes,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            cp_comm_type=self.cp_comm_type,
            qk_norms=self.qk_norms,
            keeps_gate=self.keeps_gate,
            softmax_type=self.softmax_type,
            has_wide_norms=self.has_wide_norms,
            has_te_layers=self.has_te_layers,
            ranks_per_node=self.cluster.ranks_per_node,
            pool=self.pool,
        )

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Time of a micro-batch on the slowest stage; formulas in the module's docstring.

        Raises StrategyError when the scheme cannot hold the model's layers.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        longest = max(layers)
        per_token_s = max(
            self.stage_s_per_token(scheme, longest, is_last=False),
            self.stage_s_per_token(scheme, layers[-1], is_last=True),
        )
        boundary_s, boundary_latency_s = self._boundary(scheme)
        return Coefficients(
            a_ms_per_token2=self._stage_s_per_token2(scheme, longest) * _MS_PER_S,
            b_ms_per_token=(per_token_s + boundary_s) * _MS_PER_S,
            c_ms=(self._stage_overhead_s(scheme, longest) + boundary_latency_s) * _MS_PER_S,
            window=self.shape.window,
        )

    def balanced_scheme(self, scheme: Scheme, *, min_tokens: int) -> Scheme:
        """The scheme with the layers that minimise b: embedding and output layer are balanced.

        A stage's time is stage_s_per_token, that of a micro-batch of many short sequences; with
        long ones, attention in the layers makes the output layer weigh less. A micro-batch of
        min_tokens must fit in memory, or as many tokens as fit with any layers. The scheme is
        unchanged if the even split is as fast and holds min_tokens.

        Raises StrategyError when there are more stages than layers.
        """
        even = scheme.layers_per_stage(self.shape.num_layers)

        def time(stage: int, num_layers: int) -> float:
            return self.stage_s_per_token(scheme, num_layers, is_last=stage == scheme.pp - 1)

        def tokens(stage: int, num_layers: int) -> int:
            return self.memory.stage_tokens(scheme, stage, num_layers)

        layers = split_layers(
            self.shape.num_layers, scheme.pp, time=time, tokens=tokens, min_tokens=min_tokens
        )
        slowest = max(time(stage, num) for stage, num in enumerate(layers))
        is_even_as_fast = max(time(stage, num) for stage, num in enumerate(even)) <= slowest
        if is_even_as_fast and self.memory.max_tokens(scheme) >= min_tokens:
            return scheme
        return replace(scheme, layers=layers)

    def stage_s_per_token(self, scheme: Scheme, num_layers: int, *, is_last: bool) -> float:
        """Seconds per token on a stage of num_layers layers, without attention's quadratic part.

        Matrices and messages of the layers and, on the last stage, the output layer; without the
        messages between stages. The embedding's lookup is free.
        """
        again = self.recompute
        seconds = num_layers * self._layer_s_per_token(scheme)
        seconds += again.num_layers_again(num_layers) * self._projections_again_s(scheme)
        seconds += again.num_mlps_again(num_layers) * self._mlp_again_s(scheme)
        exchange_s = self._cp_seconds(scheme, self._exchange(scheme).forward_bytes)
        seconds += again.num_attentions_again(num_layers) * exchange_s
        return seconds + self._output_layer_s_per_token(scheme) if is_last else seconds

    def _stage_s_per_token2(self, scheme: Scheme, num_layers: int) -> float:
        """Core attention of a stage."""
        causal_flops = _FLOPS_PER_ENTRY * self.shape.query_size
        rate = self.device.peak_flops_per_s * self.device.attention_fraction
        num_passes = _NUM_PASSES * num_layers + self.recompute.num_attentions_again(num_layers)
        return num_passes * causal_flops / (scheme.tp * scheme.cp) / rate

    def _stage_overhead_s(self, scheme: Scheme, num_layers: int) -> float:
        """Constant cost of a stage: launches and latencies."""
        again = self.recompute
        tp_s = (scheme.tp > 1) * self._tp_link(scheme).latency_s
        cp_s = self._cp_link(scheme).latency_s
        num_halves_again = again.num_layers_again(num_layers) + again.num_mlps_again(num_layers)
        num_collectives = (
            _NUM_TP_COLLECTIVES * num_layers + _NUM_TP_COLLECTIVES_FORWARD * num_halves_again
        )
        exchange = self._exchange(scheme)
        num_messages = (
            exchange.total_messages * num_layers
            + exchange.forward_messages * again.num_attentions_again(num_layers)
        )
        overhead_s = self.device.layer_overhead_s * num_layers
        return overhead_s + num_collectives * tp_s + num_messages * cp_s

    def _projections_again_s(self, scheme: Scheme) -> float:
        """Forward of a layer's matrices around core attention, per token."""
        shape = self.shape
        num_entries = shape.num_matrix_parameters_per_layer - shape.num_mlp_parameters_per_layer
        messages_s = _NUM_TP_COLLECTIVES_FORWARD * self._tp_collective_s(scheme)
        return self._matmul_s_per_token(num_entries, 1, scheme) + messages_s

    def _mlp_again_s(self, scheme: Scheme) -> float:
        """Forward of a layer's MLP, per token."""
        messages_s = _NUM_TP_COLLECTIVES_FORWARD * self._tp_collective_s(scheme)
        num_entries = self.shape.num_mlp_parameters_per_layer
        return self._matmul_s_per_token(num_entries, 1, scheme) + messages_s

    def _matmul_s_per_token(self, num_entries: int, num_passes: int, scheme: Scheme) -> float:
        rate = self.device.peak_flops_per_s * self.device.matmul_fraction
        return num_passes * _FLOPS_PER_ENTRY * num_entries / (scheme.tp * scheme.cp) / rate

    def _output_layer_s_per_token(self, scheme: Scheme) -> float:
        return self._matmul_s_per_token(self.shape.num_embedding_parameters, _NUM_PASSES, scheme)

    def _layer_s_per_token(self, scheme: Scheme) -> float:
        """Matrices and messages of one layer without recomputation."""
        num_entries = self.shape.num_matrix_parameters_per_layer
        compute_s = self._matmul_s_per_token(num_entries, _NUM_PASSES, scheme)
        tp_s = _NUM_TP_COLLECTIVES * self._tp_collective_s(scheme)
        return compute_s + tp_s + self._cp_seconds(scheme, self._exchange(scheme).total_bytes)

    def _tp_collective_s(self, scheme: Scheme) -> float:
        """An all-gather or reduce-scatter of a hidden state over the TP ranks, per token."""
        tp, cp = scheme.tp, scheme.cp
        num_bytes = (tp - 1) / tp * self.shape.hidden_size * self.parameter_bytes / cp
        link = self._tp_link(scheme)
        if self.cluster.crosses_nodes(scheme.tp):
            return num_bytes / (link.bytes_per_s * self.device.network_fraction)
        return num_bytes / self._bandwidth(link)

    def _exchange(self, scheme: Scheme) -> Exchange:
        return exchange_of(self.shape, scheme, self.parameter_bytes, self.cp_comm_type)

    def _cp_seconds(self, scheme: Scheme, num_bytes: float) -> float:
        """Time in which the CP ranks exchange num_bytes."""
        return num_bytes / self._bandwidth(self._cp_link(scheme))

    def _boundary(self, scheme: Scheme) -> tuple[float, float]:
        """Seconds per token, and of latency, for a stage's messages to the next one."""
        if scheme.pp == 1:
            return 0.0, 0.0
        link = self.cluster.point_to_point(scheme.num_ranks)
        num_shares = scheme.cp * (scheme.tp if self.sequence_parallel else 1)
        num_bytes = self.shape.hidden_size * self.parameter_bytes / num_shares
        return (
            _NUM_PP_MESSAGES * num_bytes / self._bandwidth(link),
            _NUM_PP_MESSAGES * link.latency_s,
        )

    def _tp_link(self, scheme: Scheme) -> Link:
        return self.cluster.collective(scheme.tp)

    def _cp_link(self, scheme: Scheme) -> Link:
        return self.cluster.point_to_point(scheme.tp * scheme.cp)

    def _bandwidth(self, link: Link) -> float:
        return link.bytes_per_s * self.device.link_fraction
