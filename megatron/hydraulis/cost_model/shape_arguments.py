"""Flags for a model's shape, a device and its links in commands that build no model."""

import argparse
import ast
import math
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from megatron.hydraulis.cost_model.device import DEVICE_NAMES, device_constants
from megatron.hydraulis.cost_model.interface import usual_times_ms
from megatron.hydraulis.cost_model.job_costs import JobOptions
from megatron.hydraulis.cost_model.layer_arguments import (
    add_activation_arguments,
    add_layer_arguments,
    given_activations,
    given_layers,
    job_precision,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import (
    ModelShape,
    count_windowed_layers,
    layers_with_experts,
)
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE, ranks_of_node

# Upstream's defaults of the same flags. With --swiglu, two thirds of the size of an MLP, rounded
# down to a multiple.
_FFN_OVER_HIDDEN = 4
_GATED_FFN_MULTIPLE = 64
_EXPERTS_PER_TOKEN = 2
VOCABULARY_MULTIPLE = 128

_BYTES_PER_GB = 1e9
_LINK_FLAGS = {
    "intra_node": "--intra-node-gb-per-s",
    "inter_node": "--inter-node-gb-per-s",
}

_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads")
# Sizes of latent attention, with upstream's defaults; None if one matrix makes the queries.
_LATENTS = {
    "--q-lora-rank": None,
    "--kv-lora-rank": 32,
    "--qk-head-dim": 128,
    "--qk-pos-emb-head-dim": 64,
    "--v-head-dim": 128,
}
LATENT_SIZES_TEXT = "without effect: --qk-head-dim and --qk-pos-emb-head-dim size heads of latents"
"""Of --kv-channels with latent attention."""
NOT_OF_LATENTS = ("no_rope_freq", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
"""Megatron's arguments of rotary positions that its latent attention ignores."""
_EXPERTS = (
    "--moe-layer-freq",
    "--moe-ffn-hidden-size",
    "--moe-router-topk",
    "--moe-shared-expert-intermediate-size",
)
_NEEDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--num-experts",): (*_EXPERTS, "--moe-grouped-gemm", "--moe-permute-fusion"),
    ("--multi-latent-attention",): tuple(_LATENTS),
    ("--group-query-attention",): ("--num-query-groups",),
    ("--window-size",): ("--window-attn-skip-freq",),
    ("--swiglu", "--quick-geglu"): ("--glu-linear-offset", "--activation-func-clamp-value"),
}
"""Flags of which one has to be given -> those without effect otherwise, as in training."""
_PADDING = "--make-vocab-size-divisible-by"
_SIZES = {
    "--num-layers": "layers of the whole model",
    "--hidden-size": "size of a hidden state",
    "--num-attention-heads": "attention heads of a layer",
    "--ffn-hidden-size": "width of the MLP (default: 4 × hidden)",
    "--num-query-groups": "groups of heads, with --group-query-attention",
    "--kv-channels": "size of a head (default: hidden / heads)",
    **{
        flag: f"with --multi-latent-attention (default: {default or 'one matrix for queries'})"
        for flag, default in _LATENTS.items()
    },
    "--num-experts": "experts of a layer",
    "--moe-ffn-hidden-size": "width of an expert (default: --ffn-hidden-size)",
    "--moe-router-topk": f"experts that a token passes (default: {_EXPERTS_PER_TOKEN})",
    "--moe-shared-expert-intermediate-size": "width of the experts that every token passes, "
    "together",
    "--padded-vocab-size": "tokens of the vocabulary, padded",
    "--vocab-size": "tokens of the vocabulary before padding, without --padded-vocab-size",
    _PADDING: f"pad --vocab-size to a multiple of N (default: {VOCABULARY_MULTIPLE})",
}
_SWITCHES = {
    "--group-query-attention": "let heads share keys and values",
    "--multi-latent-attention": "keys and values come from latents",
    "--swiglu": "gated MLP",
    "--quick-geglu": "gated MLP, without fused kernel",
    "--attention-output-gate": "gate of attention's output",
    "--untie-embeddings-and-output-weights": "the output layer has its own weights",
}
_NUMBERS = {
    "--glu-linear-offset": "of a gated MLP",
    "--activation-func-clamp-value": "limit in a gated MLP",
}
_PATTERNS = {
    "--moe-layer-freq": "every N-th layer has experts; or a list as in [0]*3+[1]*58 (default: all "
    "have)",
    "--window-attn-skip-freq": "every N-th layer has no window; or a list as in [1,0]*12 (default: "
    "all have)",
}
_FLAGS = (*_SIZES, *_SWITCHES, *_NUMBERS, *_PATTERNS, "--window-size")
"""All that describe the shape."""


def add_model_arguments(parser: argparse.ArgumentParser, *, has_activations: bool = True) -> None:
    """Declare the flags that describe the model and its layers.

    has_activations: false for commands that choose themselves how activations are kept and split.
    """
    add_shape_arguments(parser)
    layers = parser.add_argument_group("layers")
    add_layer_arguments(layers)
    if has_activations:
        add_activation_arguments(layers)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that shape_of and given_shape read."""
    group = parser.add_argument_group(
        "model",
        "given by --model FILE, or by --num-layers and so on, as in Megatron; its other options "
        "are accepted, so that those of a launch script can be given",
    )
    group.add_argument(
        "--model",
        metavar="FILE",
        help="shape of the model, JSON, for example examples/model_llama32b.json",
    )
    for flag, text in _SIZES.items():
        group.add_argument(flag, type=int, metavar="N", help=text)
    for flag, text in _SWITCHES.items():
        group.add_argument(flag, action="store_true", help=text)
    for flag, text in _NUMBERS.items():
        group.add_argument(flag, type=float, metavar="X", help=text)
    for flag, text in _PATTERNS.items():
        group.add_argument(flag, type=_pattern, metavar="N", help=text)
    group.add_argument(
        "--window-size", metavar="N,0", help="tokens before its own that a token attends to"
    )


def add_job_arguments(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare the flags that job_ranks reads, with a note on when they are needed."""
    parser.add_argument(
        "--num-ranks", type=int, required=required, metavar="N", help=f"ranks of the job{note}"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help=f"ranks of a node{note} (default: {RANKS_PER_NODE}, or all of a smaller job)",
    )


def job_ranks(namespace: argparse.Namespace) -> tuple[int, int]:
    """Ranks of the job and of a node; StrategyError as `ranks_of_node`."""
    num_ranks, what = namespace.num_ranks, "--num-ranks, --ranks-per-node"
    return num_ranks, ranks_of_node(num_ranks, namespace.ranks_per_node, what)


def add_device_argument(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare --device, with a note on what it is used for."""
    parser.add_argument(
        "--device", required=required, metavar="NAME", help=f"one of {DEVICE_NAMES}{note}"
    )


def add_regroup_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that job_options reads."""
    add_model_arguments(parser)
    links = parser.add_argument_group(
        "regrouping",
        "Regrouping and update of strategies that the profile did not measure are computed from "
        "bytes and links if device and model are known",
    )
    add_device_argument(
        links,
        "; gives links and memory bandwidth (default: the profile's, if it is one of these)",
        required=False,
    )
    for name, flag in _LINK_FLAGS.items():
        where = "inside its node" if name == "intra_node" else "across nodes"
        links.add_argument(
            flag,
            type=float,
            metavar="X",
            help=f"bandwidth of a rank {where}, one direction, in GB/s (default: the device's)",
        )
    links.add_argument(
        "--no-regroup-overlap",
        action="store_true",
        help="regroup before and after compute instead of during it",
    )


def job_options(namespace: argparse.Namespace) -> JobOptions:
    """What the flags of `add_regroup_arguments` say; raises as shape_of does, and for an unknown
    device."""
    return JobOptions(
        shape=given_shape(namespace),
        device=None if namespace.device is None else device_constants(namespace.device),
        link_bytes_per_s={
            name: gb_per_s * _BYTES_PER_GB
            for name, flag in _LINK_FLAGS.items()
            if (gb_per_s := vars(namespace)[_destination(flag)]) is not None
        },
        grad_reduce_in_bf16=namespace.grad_reduce_in_bf16,
        overlaps=not namespace.no_regroup_overlap,
        precision=partial(job_precision, namespace),
        layers=partial(given_settings, namespace),
    )


def given_settings(namespace: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Fields of `AnalyticCostModel` about layers and their activations; raises as
    `given_activations`."""
    return given_layers(namespace, shape) | given_activations(namespace, shape)


def print_bf16_advice(
    profile: ProfileCostModel, shares: Mapping[Strategy, float], iteration_s: float
) -> None:
    """Print what --grad-reduce-in-bf16 would save, if that is worth it; see `bf16_advice`."""
    if profile.regroup is not None:
        times = partial(usual_times_ms, profile)
        advice = profile.regroup.bf16_advice(shares, times, 1e3 * iteration_s)
        if advice is not None:
            print(advice)


def warn_of_unknown_overheads(
    profile: ProfileCostModel, strategies: Iterable[Strategy] | None = None
) -> None:
    """Say on stderr that strategies have no overhead; without strategies if none is computed."""
    if profile.regroup is not None:
        return
    if strategies is not None and all(
        profile.measured_overhead_ms(strategy) is not None for strategy in strategies
    ):
        return
    print(
        "warning: regrouping and optimizer count 0 where the cost profile has no time of a "
        "strategy, because the model or its device is unknown; give --model and --device",
        file=sys.stderr,
        flush=True,
    )


def given_shape(namespace: argparse.Namespace) -> ModelShape | None:
    """The shape that the flags describe, None without any; raises as shape_of does."""
    is_given = namespace.model is not None or _given_flags(namespace)
    return shape_of(namespace) if is_given else None


def model_words(namespace: argparse.Namespace) -> list[str]:
    """The flags of the model and its layers that were given, with their values."""
    parser = argparse.ArgumentParser(add_help=False)
    add_model_arguments(parser, has_activations=False)
    words: list[str] = []
    for action in parser._actions:
        value = vars(namespace)[action.dest]
        if value != action.default:
            values = value if action.nargs in ("+", "*") else [value]
            words += [action.option_strings[0], *map(str, [] if action.nargs == 0 else values)]
    return words


def shape_of(namespace: argparse.Namespace) -> ModelShape:
    """The shape that the flags describe.

    Raises ConfigurationError for an unreadable file, for both a file and flags, and for missing
    or invalid sizes.
    """
    flags = _given_flags(namespace)
    if namespace.model is not None:
        if flags:
            raise ConfigurationError(
                f"--model {namespace.model} describes the whole model but {flags[0]} is given too; "
                f"leave one of them out"
            )
        return ModelShape.read(namespace.model)
    missing = [flag for flag in _NEEDED if flag not in flags]
    if "--padded-vocab-size" not in flags and "--vocab-size" not in flags:
        missing.append("--padded-vocab-size")
    if missing:
        raise ConfigurationError(
            f"the model is described by --model FILE or by flags but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; give either"
        )
    hidden, heads = namespace.hidden_size, namespace.num_attention_heads
    multiple = namespace.make_vocab_size_divisible_by
    if multiple is None:
        multiple = VOCABULARY_MULTIPLE
    is_latent = namespace.multi_latent_attention
    if namespace.kv_channels is None and hidden % heads and not is_latent:
        raise ConfigurationError(
            f"without --kv-channels the heads share --hidden-size evenly but {hidden} is not a "
            f"multiple of {heads} heads; give --kv-channels"
        )
    for needed, others in _NEEDS.items():
        given = [flag for flag in others if _is_given(namespace, flag)]
        if given and not any(vars(namespace)[_destination(flag)] for flag in needed):
            alone = f"{', '.join(given)}: without effect, as there is no {' or '.join(needed)}"
            print(alone, file=sys.stderr, flush=True)
    check_latent_heads(namespace)
    if is_latent and namespace.kv_channels is not None:
        print(f"--kv-channels: {LATENT_SIZES_TEXT}", file=sys.stderr, flush=True)
    window_tokens, num_windowed = _window_of(namespace)
    vocabulary = namespace.padded_vocab_size
    if vocabulary is None:
        vocabulary = math.ceil(namespace.vocab_size / multiple) * multiple
    ffn_hidden_size = namespace.ffn_hidden_size
    if ffn_hidden_size is None:
        ffn_hidden_size = usual_ffn_hidden_size(namespace)
    return ModelShape(
        num_layers=namespace.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden_size,
        num_attention_heads=heads,
        num_query_groups=(
            # Megatron's default.
            (namespace.num_query_groups or 1) if namespace.group_query_attention else heads
        ),
        vocab_size=vocabulary,
        gated_mlp=namespace.swiglu or namespace.quick_geglu,
        tied_embeddings=not namespace.untie_embeddings_and_output_weights,
        output_gate=namespace.attention_output_gate,
        num_windowed_layers=num_windowed,
        window_tokens=window_tokens,
        **head_sizes(namespace),
        **expert_sizes(namespace, ffn_hidden_size),
    )


def usual_ffn_hidden_size(namespace: argparse.Namespace) -> int:
    """Megatron's default of --ffn-hidden-size.

    namespace: flags of training, or of `add_shape_arguments`.
    """
    size: int = _FFN_OVER_HIDDEN * namespace.hidden_size
    if namespace.swiglu:
        return size * 2 // 3 // _GATED_FFN_MULTIPLE * _GATED_FFN_MULTIPLE
    return size


def check_latent_heads(namespace: argparse.Namespace) -> None:
    """Raise ConfigurationError for query groups with latent attention.

    namespace: flags of training, or of `add_shape_arguments`.
    """
    if namespace.group_query_attention and namespace.multi_latent_attention:
        raise ConfigurationError(
            f"--multi-latent-attention makes keys for each of --num-attention-heads "
            f"{namespace.num_attention_heads} heads but --group-query-attention shares them; "
            f"remove one of the two"
        )


def head_sizes(namespace: argparse.Namespace) -> dict[str, int]:
    """Fields of `ModelShape` about sizes of heads and, with latent attention, of latents.

    namespace: flags of training, or of `add_shape_arguments`.
    """
    if not namespace.multi_latent_attention:
        channels = namespace.kv_channels
        usual = namespace.hidden_size // namespace.num_attention_heads
        return {"kv_channels": usual if channels is None else channels}
    sizes = {}
    for flag, default in _LATENTS.items():
        size = getattr(namespace, _destination(flag))
        sizes[_destination(flag)] = (default or 0) if size is None else size
    return sizes | {"kv_channels": sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]}


def expert_sizes(namespace: argparse.Namespace, ffn_hidden_size: int) -> dict[str, int]:
    """Fields of `ModelShape` about experts; none in a model without them.

    Raises ConfigurationError for a wrong --moe-layer-freq.

    Args:
        namespace: flags of training, or of `add_shape_arguments`.
        ffn_hidden_size: of an MLP.
    """
    num_experts, num_layers = namespace.num_experts, namespace.num_layers
    if not num_experts:
        return {}
    frequency = 1 if namespace.moe_layer_freq is None else namespace.moe_layer_freq
    if not _is_layer_pattern(frequency, num_layers):
        raise ConfigurationError(
            f"--moe-layer-freq is at least 1, or a list with a 0 or a 1 for each of {num_layers} "
            f"layers, but is {frequency}; correct it"
        )
    layers = layers_with_experts(num_layers, frequency)
    width, topk = namespace.moe_ffn_hidden_size, namespace.moe_router_topk
    return {
        "num_experts": num_experts,
        "num_expert_layers": sum(layers),
        "num_first_mlp_layers": (*layers, True).index(True),
        "experts_per_token": _EXPERTS_PER_TOKEN if topk is None else topk,
        "expert_ffn_hidden_size": ffn_hidden_size if width is None else width,
        "shared_expert_ffn_hidden_size": namespace.moe_shared_expert_intermediate_size or 0,
    }


def _is_layer_pattern(frequency: int | list[int], num_layers: int) -> bool:
    if isinstance(frequency, int):
        return frequency >= 1
    return len(frequency) == num_layers and set(frequency) <= {0, 1}


def _window_of(namespace: argparse.Namespace) -> tuple[int, int]:
    """Tokens that a token of a windowed layer attends to, and how many layers these are."""
    text, frequency = namespace.window_size, namespace.window_attn_skip_freq
    if text is None:
        return 0, 0
    match = re.fullmatch(r"\(?(-1|\d+),0\)?", text)
    is_right = frequency is None or _is_layer_pattern(frequency, namespace.num_layers)
    if match is None or not is_right:
        raise ConfigurationError(
            f"windows of layers are given by --window-size N,0, and --window-attn-skip-freq of at "
            f"least 1 or a list with a 0 or a 1 for each of {namespace.num_layers} layers, but "
            f"these are {text} and {frequency}; correct them"
        )
    num_tokens = int(match[1]) + 1
    num_layers = count_windowed_layers(namespace.num_layers, frequency) if num_tokens else 0
    return (num_tokens, num_layers) if num_layers else (0, 0)


def _pattern(text: str) -> int | list[int]:
    """A number, or a list such as ``[1,0]*12``, in Megatron's notation of layers.

    Raises ValueError for other text.
    """
    if "[" not in text:
        return int(text)

    def value_of(node: ast.expr) -> Any:
        match node:
            case ast.List(elts=elements):
                return [value_of(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value_of(left) + value_of(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value_of(left) * value_of(right)
            case ast.Constant(value=int(number)):
                return number
        raise ValueError(text)

    try:
        value = value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(text) from error
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise ValueError(text)
    return value


def _given_flags(namespace: argparse.Namespace) -> list[str]:
    return [flag for flag in _FLAGS if _is_given(namespace, flag)]


def _is_given(namespace: argparse.Namespace, flag: str) -> bool:
    value = vars(namespace).get(_destination(flag))
    return value is not None and value is not False


def _destination(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
