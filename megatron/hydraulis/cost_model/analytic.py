"""A cost model from first principles, for when nothing has been measured.

Time of a micro-batch of lengths s_i on one stage, forward and backward, on a scheme ⟨tp, cp, pp⟩
with L layers on the stage (h hidden size, q width of all query heads, P entries of a layer's
matrices, V padded vocabulary):

    a  = 3 · 2 · q · L / (tp·cp) / attention rate
         causal attention forward: half of 4·q·s² (scores and their product with the values);
         the backward is twice the forward (arXiv 2104.04473, appendix, counts it alike)
    b  = 3 · 2 · P · L / (tp·cp) / matmul rate                 matrices
       + 3 · 2 · h · V / (tp·cp) / matmul rate                 output layer, on the last stage
       + 8 · (tp-1)/tp · h · bytes · L / cp / bandwidth        TP with or without SP
       + 3 · (cp-1)/cp · 2·kv · bytes · L / tp / bandwidth     CP: keys and values go round
       + 2 · h · bytes / (tp·cp) / bandwidth                   PP: activation and its gradient
    c  = overhead · L + latencies of all messages

TP moves a layer's activations 8 times: an all-gather and a reduce-scatter around attention and
around the MLP, forward and backward (arXiv 2205.05198 §4.2.2; an all-reduce without sequence
parallelism moves as much as the two). CP sends keys and values round the ring in the forward, and
them and their gradients in the backward, hence 3 times. Nothing is taken to overlap. With layers
recomputed the forward of the layers, its messages included, runs once more.

Where stages differ, each coefficient is that of the stage where it is largest, because a replica
runs at the pace of its slowest stage.
"""

from dataclasses import dataclass

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.interface import Coefficients, given_limit
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Strategy

__all__ = ["AnalyticCostModel"]

_MS_PER_S = 1e3
# A multiplication and an addition per entry of a matrix and token.
_FLOPS_PER_ENTRY = 2
# Forward, gradient of the input, gradient of the weight.
_NUM_PASSES = 3
# Collectives of a layer's forward over the TP ranks; the backward mirrors them.
_NUM_TP_COLLECTIVES_FORWARD = 4
# Rounds of keys and values over the CP ring: one forward, two backward.
_NUM_CP_ROUNDS_FORWARD = 1
_NUM_CP_ROUNDS_BACKWARD = 2
# The activation to the next stage and its gradient back.
_NUM_PP_MESSAGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AnalyticCostModel:
    """CostModel out of the model's shape, device constants and cluster.

    Raises ConfigurationError for a limit below 1 token and a size of parameters that is not
    2 or 4 bytes.
    """

    shape: ModelShape
    device: DeviceConstants
    cluster: Cluster
    parameter_bytes: int = 2
    """Bytes of a parameter and of an activation: 2 for bf16, 4 for fp32."""
    sequence_parallel: bool = True
    recomputes_layers: bool = False
    max_tokens_per_micro_batch: int | None = None
    """Takes the place of what the memory model says, for every scheme."""

    def __post_init__(self) -> None:
        if self.parameter_bytes not in (2, 4):
            raise ConfigurationError(
                f"cost model: parameters have 2 or 4 bytes but {self.parameter_bytes} are given; "
                f"give 2 for bf16 or 4 for fp32"
            )
        limit = self.max_tokens_per_micro_batch
        if limit is not None and limit < 1:
            raise ConfigurationError(
                f"cost model: a micro-batch holds at least 1 token but the limit is {limit}; "
                f"give a positive limit or none"
            )

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch; see MemoryModel, or given_limit where one was given.

        Raises StrategyError when the scheme cannot hold the model's layers.
        """
        limit = self.max_tokens_per_micro_batch
        if limit is not None:
            return given_limit(limit, scheme)
        return self.memory.max_tokens(scheme)

    def overhead_ms(self, strategy: Strategy) -> float:
        """0.0: regrouping and optimizer take about the same time under every strategy of a job,
        each rank receiving nearly all parameters of its role whatever the strategy."""
        return 0.0

    @property
    def memory(self) -> MemoryModel:
        """The memory model of the same job."""
        return MemoryModel(
            shape=self.shape,
            device=self.device,
            num_ranks=self.cluster.num_ranks,
            parameter_bytes=self.parameter_bytes,
            sequence_parallel=self.sequence_parallel,
            recomputes_layers=self.recomputes_layers,
        )

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Time of a micro-batch on the slowest stage; the formulas are those of the module.

        Raises StrategyError when the scheme cannot hold the model's layers.
        """
        layers = scheme.layers_per_stage(self.shape.num_layers)
        output_s = self._output_layer_s_per_token(scheme)
        layer_s = self._layer_s_per_token(scheme)
        boundary_s, boundary_latency_s = self._boundary(scheme)
        most = max(layers)
        per_token_s = max(most * layer_s, layers[-1] * layer_s + output_s) + boundary_s
        return Coefficients(
            a_ms_per_token2=most * self._attention_s_per_token2(scheme) * _MS_PER_S,
            b_ms_per_token=per_token_s * _MS_PER_S,
            c_ms=(most * self._layer_overhead_s(scheme) + boundary_latency_s) * _MS_PER_S,
        )

    @property
    def _num_forwards_again(self) -> int:
        return 1 if self.recomputes_layers else 0

    @property
    def _num_layer_passes(self) -> int:
        return _NUM_PASSES + self._num_forwards_again

    @property
    def _num_tp_collectives(self) -> int:
        return _NUM_TP_COLLECTIVES_FORWARD * (2 + self._num_forwards_again)

    @property
    def _num_cp_rounds(self) -> int:
        rounds = _NUM_CP_ROUNDS_FORWARD * (1 + self._num_forwards_again)
        return rounds + _NUM_CP_ROUNDS_BACKWARD

    def _attention_s_per_token2(self, scheme: Scheme) -> float:
        causal_flops = _FLOPS_PER_ENTRY * self.shape.query_size
        rate = self.device.peak_flops_per_s * self.device.attention_fraction
        return self._num_layer_passes * causal_flops / (scheme.tp * scheme.cp) / rate

    def _matmul_s_per_token(self, num_entries: int, num_passes: int, scheme: Scheme) -> float:
        rate = self.device.peak_flops_per_s * self.device.matmul_fraction
        return num_passes * _FLOPS_PER_ENTRY * num_entries / (scheme.tp * scheme.cp) / rate

    def _output_layer_s_per_token(self, scheme: Scheme) -> float:
        return self._matmul_s_per_token(self.shape.num_embedding_parameters, _NUM_PASSES, scheme)

    def _layer_s_per_token(self, scheme: Scheme) -> float:
        """Matrices and messages of one layer."""
        shape, tp, cp = self.shape, scheme.tp, scheme.cp
        compute_s = self._matmul_s_per_token(
            shape.num_matrix_parameters_per_layer, self._num_layer_passes, scheme
        )
        tp_bytes = (tp - 1) / tp * shape.hidden_size * self.parameter_bytes / cp
        tp_s = self._num_tp_collectives * tp_bytes / self._bandwidth(self._tp_link(scheme))
        key_value_size = 2 * shape.num_query_groups * shape.kv_channels
        cp_bytes = (cp - 1) / cp * key_value_size * self.parameter_bytes / tp
        cp_s = self._num_cp_rounds * cp_bytes / self._bandwidth(self._cp_link(scheme))
        return compute_s + tp_s + cp_s

    def _layer_overhead_s(self, scheme: Scheme) -> float:
        """What a layer costs without tokens: launches and latencies."""
        tp_s = self._num_tp_collectives * (scheme.tp > 1) * self._tp_link(scheme).latency_s
        cp_s = self._num_cp_rounds * (scheme.cp - 1) * self._cp_link(scheme).latency_s
        return self.device.layer_overhead_s + tp_s + cp_s

    def _boundary(self, scheme: Scheme) -> tuple[float, float]:
        """Seconds per token and of latency that the messages between two stages cost a stage."""
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
