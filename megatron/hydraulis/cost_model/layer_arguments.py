"""Flags for layers and precision: their meaning in training, and their declaration in commands that
build no model."""

import argparse
import sys
from typing import Any

from megatron.hydraulis.cost_model.context import CP_COMM_TYPES, check_cp_comm_type
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.recompute import (
    SELECTIVE_MODULES,
    check_recompute,
    drop_kept_modules,
    recompute_of,
)
from megatron.hydraulis.cost_model.regrouping import wire_bytes
from megatron.hydraulis.cost_model.trained_model import CORE_ATTENTIONS
from megatron.hydraulis.model_shape import ModelShape

TE_LAYERS = "transformer_engine"
OF_TE = ("moe_grouped_gemm", "moe_permute_fusion")
"""Attributes of options that only layers of Transformer Engine have an implementation of."""
_ROUTER_BYTES = {"fp32": 4, "fp64": 8}
"""Of a score, by --moe-router-dtype."""
_SEQUENCE_BY_SEQUENCE = ("local", "unfused")
"""Attention backends of upstream that, like our sdpa, need no kernel for packed sequences."""


def add_layer_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags of given_layers, job_precision and gradient_bytes, as in training."""
    parser.set_defaults(launch_options=False)
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--bf16", action="store_true", help="train in bf16")
    precision.add_argument(
        "--fp32",
        action="store_true",
        help="train in fp32 (default: bf16; with further options of a launch script fp32, as in "
        "training)",
    )
    parser.add_argument(
        "--grad-reduce-in-bf16", action="store_true", help="let gradients travel in bf16"
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("local", TE_LAYERS),
        help="layers, which take different memory (default: local, or transformer_engine if "
        "options of experts need it)",
    )
    parser.add_argument("--spec", nargs="*", metavar="NAME", help="module and name of own layers")
    parser.add_argument(
        "--core-attention",
        choices=("auto", *CORE_ATTENTIONS),
        help="kernel of core attention (default: auto)",
    )
    parser.add_argument(
        "--attention-backend",
        choices=("flash", "fused", "unfused", "local", "auto"),
        help="chooses it in Megatron: local and unfused stand for sdpa, others for auto",
    )
    parser.add_argument(
        "--no-rope-fusion",
        action="store_false",
        dest="apply_rope_fusion",
        help="rotate queries and keys by three kernels",
    )
    parser.add_argument("--qk-layernorm", action="store_true", help="norms of queries and keys")
    parser.add_argument(
        "--softmax-type",
        choices=("vanilla", "off-by-one", "learnable"),
        default="vanilla",
        help="of core attention, where others take more memory (default: vanilla)",
    )
    parser.add_argument(
        "--apply-layernorm-1p",
        action="store_true",
        dest="layernorm_zero_centered_gamma",
        help="norms around one, which take more memory in local layers",
    )
    parser.add_argument(
        "--loss-chunk-tokens",
        type=int,
        metavar="N",
        help="tokens whose logits exist at the same time",
    )
    parser.add_argument(
        "--moe-grouped-gemm",
        action="store_true",
        help="products of all experts in one call, by layers of Transformer Engine",
    )
    parser.add_argument(
        "--moe-permute-fusion", action="store_true", help="layers of Transformer Engine for experts"
    )
    parser.add_argument(
        "--moe-router-dtype", choices=tuple(_ROUTER_BYTES), help="precision of routers, if higher"
    )
    parser.add_argument(
        "--moe-router-score-function",
        choices=("softmax", "sigmoid"),
        default="softmax",
        help="scores of a router (default: softmax)",
    )
    parser.add_argument(
        "--moe-router-pre-softmax", action="store_true", help="softmax before experts are chosen"
    )
    parser.add_argument(
        "--moe-router-load-balancing-type",
        nargs="+",
        choices=("aux_loss", "seq_aux_loss", "none"),
        default="aux_loss",
        metavar="TYPE",
        help="aux_loss, seq_aux_loss or none: whether a loss balances experts (default: aux_loss)",
    )
    parser.add_argument(
        "--moe-aux-loss-coeff",
        type=float,
        nargs="+",
        default=0.0,
        metavar="X",
        help="its coefficient (default: 0)",
    )
    parser.add_argument("--moe-z-loss-coeff", type=float, metavar="X", help="of routers' z-loss")


def add_activation_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags that given_activations reads, as in training."""
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="split activations between layers over the tp ranks (default: on)",
    )
    parser.add_argument(
        "--cp-comm-type",
        nargs="+",
        default=["auto"],
        metavar="TYPE",
        help=f"how cp ranks exchange keys and values, of {', '.join(CP_COMM_TYPES)} "
        "(default: auto)",
    )
    parser.add_argument(
        "--recompute-granularity",
        choices=("full", "selective"),
        help="recompute activations: full, all of a layer; selective, --recompute-modules "
        "(default: none)",
    )
    parser.add_argument(
        "--recompute-activations",
        action="store_true",
        help="as --recompute-granularity selective",
    )
    parser.add_argument(
        "--recompute-method",
        choices=("uniform", "block"),
        help="which layers are recomputed, with full",
    )
    parser.add_argument(
        "--recompute-num-layers",
        type=int,
        metavar="N",
        help="number of layers that are recomputed, with full",
    )
    parser.add_argument(
        "--recompute-modules",
        nargs="+",
        metavar="MODULE",
        help=f"parts recomputed with selective: {', '.join(SELECTIVE_MODULES)} "
        "(default: core_attn)",
    )


def job_precision(namespace: argparse.Namespace, of_profile: str | None = None) -> Precision:
    """As given, else that of the cost profile if it names one.

    Without both it is that of training; a line on stderr says which, or that training with these
    options has another than the profile.
    """
    if namespace.bf16 or namespace.fp32:
        return training_precision(namespace)
    if of_profile is not None:
        precision = Precision.of(of_profile)
        text = "as the cost profile; training without --bf16 is fp32"
        is_said = namespace.launch_options and precision is not Precision.FP32
    elif namespace.launch_options:
        precision, text = Precision.FP32, "as in training with these options, which have no --bf16"
        is_said = True
    else:
        precision, text, is_said = Precision.BF16, "assumed; --bf16 or --fp32 gives it", True
    if is_said:
        print(f"precision: {precision}, {text}", file=sys.stderr, flush=True)
    return precision


def training_precision(args: argparse.Namespace) -> Precision:
    """Of parameters in training."""
    return Precision.BF16 if args.bf16 else Precision.FP32


def gradient_bytes(args: argparse.Namespace) -> int:
    """Bytes of a gradient on the wire in training."""
    return wire_bytes(training_precision(args), reduces_in_bf16=args.grad_reduce_in_bf16)


def asked_layers(args: argparse.Namespace, given: str | None) -> str:
    """The value of --transformer-impl: as given, else Transformer Engine's layers if an option
    needs them."""
    if given is not None:
        return given
    return TE_LAYERS if args.spec is None and any(getattr(args, d) for d in OF_TE) else "local"


def core_attention_of(attention_backend: str) -> str:
    """The --core-attention that a value of upstream's --attention-backend stands for."""
    return "sdpa" if attention_backend in _SEQUENCE_BY_SEQUENCE else "auto"


def layer_settings(
    args: argparse.Namespace, shape: ModelShape, core_attention: str
) -> dict[str, Any]:
    """Fields of `AnalyticCostModel` about layers, for training.

    args: completed arguments, in which a model without experts has none of their options.
    """
    has_te_layers = args.transformer_impl == TE_LAYERS
    takes_te = has_te_layers and args.softmax_type == "vanilla"
    return {
        "qk_norms": args.qk_layernorm,
        "num_gate_tensors": num_gate_tensors(args),
        "softmax_type": args.softmax_type,
        "has_wide_norms": args.layernorm_zero_centered_gamma and not has_te_layers,
        "router_bytes": _ROUTER_BYTES.get(args.moe_router_dtype, 0),
        "num_score_tensors": _num_score_tensors(args),
        "has_te_layers": has_te_layers,
        "groups_experts": groups_experts(args),
        "fuses_rope": has_te_layers and args.apply_rope_fusion and not shape.v_head_dim,
        "has_te_attention": core_attention == "te" or (core_attention == "auto" and takes_te),
    }


def groups_experts(args: argparse.Namespace) -> bool:
    """Whether products of experts are one call; args: completed arguments, as above."""
    return args.transformer_impl == TE_LAYERS and bool(args.moe_grouped_gemm)


def given_layers(namespace: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """`layer_settings` of the flags of `add_layer_arguments`, for devices with the kernels that
    they ask for."""
    args = argparse.Namespace(**vars(namespace))
    if not shape.num_experts:
        for dest in OF_TE:
            setattr(args, dest, False)
    args.transformer_impl = asked_layers(args, args.transformer_impl)
    attention = args.core_attention or core_attention_of(args.attention_backend or "auto")
    settings = layer_settings(args, shape, attention)
    return settings | {"loss_chunk_tokens": namespace.loss_chunk_tokens}


def given_activations(namespace: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Fields of `AnalyticCostModel` about activations, by the flags of `add_activation_arguments`.

    Says on stderr which modules are not recomputed. Raises ConfigurationError for recomputation
    that is described in part, and for an unknown exchange.
    """
    args = argparse.Namespace(**vars(namespace))
    for option, instead in drop_kept_modules(args, has_experts=shape.num_experts > 0):
        print(f"{option}: {instead}", file=sys.stderr, flush=True)
    check_recompute(args)
    check_cp_comm_type(args.cp_comm_type)
    return {
        "sequence_parallel": args.sequence_parallel,
        "recompute": recompute_of(args),
        "cp_comm_type": args.cp_comm_type[0],
    }


def num_gate_tensors(args: argparse.Namespace) -> int:
    """Tensors as wide as the MLP that a gate of several kernels keeps; 0 if one is fused.

    Both halves of the output of fc1, the second with its offset, the activation and the product of
    the two; the first within its limit; a sigmoid.

    args: arguments of training, of which those with a problem may be missing, or flags of
    `add_shape_arguments`.
    """
    has_limit = getattr(args, "activation_func_clamp_value", None) is not None
    has_settings = bool(getattr(args, "glu_linear_offset", None)) or has_limit
    if not (args.quick_geglu or (args.swiglu and has_settings)):
        return 0
    return 5 + has_limit + bool(args.quick_geglu)


def balances_by_a_loss(args: argparse.Namespace) -> bool:
    """Whether routers, if there are any, balance the load of experts by a loss."""
    # Upstream takes lists, which its checks replace by their only value.
    is_zero = args.moe_aux_loss_coeff in (0, [0])
    return not is_zero and args.moe_router_load_balancing_type not in ("none", ["none"])


def _num_score_tensors(args: argparse.Namespace) -> int:
    """What a router keeps of scores, see `MOST_SCORE_TENSORS`."""
    has_scores_of_all = args.moe_router_pre_softmax or args.moe_router_score_function != "softmax"
    return sum((bool(has_scores_of_all), 2 * balances_by_a_loss(args), bool(args.moe_z_loss_coeff)))
