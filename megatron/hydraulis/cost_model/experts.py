"""How the ranks of a stage share the experts of a layer, and what that costs.

Without ep, tp cuts every expert like an MLP: all ranks have equal work. With ep a rank has whole
experts and works for the tokens that choose them, whose number differs from rank to rank.
"""

import math

from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

EXPERT_LOAD = 1.5
"""Tokens of a layer's busiest expert over the mean of its experts, where no profile has measured
it: an assumption. The log of a run has its own."""
SAFE_EXPERT_LOAD = 2.6
"""Least that limits of memory allow for. Logs of runs had 1.8 to 2.6; a profile measures random
tokens on fresh routers, whose loads are nearly equal, so it must not lower the limit's load."""
NUM_EXCHANGES_FORWARD = 2
"""Tokens go to their experts and come back; their gradients likewise."""
_TO_COPIES, _TO_JOIN, _TO_SORT, _TO_SUMS = 2, 2, 4, 3
MOST_SCORE_TENSORS = 4
"""What a router may keep of scores, in fp32 tensors of all experts: those by which it chooses
(sigmoid, or softmax before the choice), two of the balancing loss and one of the z-loss."""
_FP32_BYTES = 4
# Per token and expert: a place (int64) and a choice (bool).
_ROUTING_BYTES_PER_EXPERT = 8 + 1
# Per token and expert that it passes: the expert's number and the token's place (int64), two
# weights (fp32).
_ROUTING_BYTES_PER_CHOICE = 2 * 8 + 2 * _FP32_BYTES


def rank_load(shape: ModelShape, scheme: Scheme, expert_load: float) -> float:
    """Tokens of the busiest ep rank over the mean of the ranks; 1 without ep.

    Loads of experts are assumed to be independent, so that the excess of n experts together is
    1/√n of that of one.
    """
    if scheme.ep == 1:
        return 1.0
    return 1.0 + (expert_load - 1.0) / math.sqrt(shape.num_experts / scheme.ep)


def num_copies(shape: ModelShape, scheme: Scheme, expert_load: float) -> float:
    """Experts that a token passes on the busiest rank, for every token of its cp rank.

    Every tp rank works for all tokens of the tp ranks on its parts of experts, or on whole ones for
    those that choose them.
    """
    if scheme.ep == 1:
        return shape.experts_per_token
    return rank_load(shape, scheme, expert_load) * shape.experts_per_token / scheme.tp


def copies_at_once(shape: ModelShape, scheme: Scheme, expert_load: float, width: float) -> float:
    """Hidden states that exist for every token of the cp rank when its experts have run, besides
    the experts' inputs, which a layer keeps: see "outputs of experts" in memory.py.

    width: of the precision in which tp ranks add up outputs, over that of the model, at least 1.
    """
    copies, own = num_copies(shape, scheme, expert_load), shape.experts_per_token / scheme.tp
    if 1 < scheme.ep == shape.num_experts:
        return copies + 2 * own
    if scheme.ep > 1:
        return 3 * copies + own
    if scheme.tp == 1:
        return 3 * copies
    in_wide = 0.0
    if width > 1.0:  # the outputs again, and their flat copy and its sum
        in_wide = width * copies + (width - 1) * (copies + own)
    return 3 * copies + 2 * own + in_wide


def routing_bytes(shape: ModelShape, num_score_tensors: int) -> float:
    """What a router keeps of a token that is on its rank."""
    per_expert = _ROUTING_BYTES_PER_EXPERT + num_score_tensors * _FP32_BYTES
    of_choices = _ROUTING_BYTES_PER_CHOICE * shape.experts_per_token
    return float(per_expert * shape.num_experts + of_choices)


def moved_copies(shape: ModelShape, scheme: Scheme, expert_load: float) -> float:
    """Hidden states that the copies of a token move through memory in the forward of a layer with
    experts, for every token of the rank's cp rank; the backward moves as many.

    Each token is read and written once per copy (2), outputs of experts are joined (2), and each
    is read and added to its token's sum, which is read and written (3). With ep the first and the
    last are of the tp rank's own tokens, and the copies that arrive are sorted by expert, and their
    outputs back (2 + 2). Source: operations of megatron-core's dispatchers and ``SequentialMLP``.
    """
    copies = num_copies(shape, scheme, expert_load)
    if scheme.ep == 1:
        return (_TO_COPIES + _TO_JOIN + _TO_SUMS) * copies
    own = shape.experts_per_token / scheme.tp
    return (_TO_COPIES + _TO_SUMS) * own + (_TO_JOIN + _TO_SORT) * copies


def num_local_experts(shape: ModelShape, scheme: Scheme) -> float:
    """Experts of a layer of which a rank has a part or all."""
    return shape.num_experts / scheme.ep


def num_layer_parameters(
    shape: ModelShape, scheme: Scheme, num_layers: int, *, are_first: bool = False
) -> float:
    """Parameters of so many layers on a rank; are_first: of the model."""
    num_with_experts = shape.num_with_experts(num_layers, are_first=are_first)
    routed = num_with_experts * shape.num_routed_entries
    whole = num_layers * (2 * shape.hidden_size + shape.num_whole_attention_entries)
    whole += num_with_experts * shape.num_router_entries
    others = shape.num_parameters_of_layers(num_layers, are_first=are_first) - routed - whole
    num_routed = routed / (scheme.tp if scheme.ep == 1 else scheme.ep)
    return whole + others / scheme.tp + num_routed


def exchanged_bytes_per_token(shape: ModelShape, scheme: Scheme, parameter_bytes: int) -> float:
    """What a rank sends in the forward of a layer, mean over the layers, for every token of the
    row: a copy for each expert that the token passes on another rank, there and back."""
    copies = shape.experts_per_token * (scheme.ep - 1) / scheme.ep
    share_of_layers = shape.num_expert_layers / shape.num_layers
    num_bytes = copies * share_of_layers * shape.hidden_size * parameter_bytes
    return NUM_EXCHANGES_FORWARD * num_bytes / (scheme.tp * scheme.cp)
