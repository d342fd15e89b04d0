"""Flags that describe a model and its layers: one table for the commands that build no model, and
what these flags mean, there and in training."""

import argparse
import ast
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.hydraulis.cost_model.context import CP_COMM_TYPES, check_cp_comm_type
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.regrouping import wire_bytes
from megatron.hydraulis.cost_model.trained_model import (
    CORE_ATTENTIONS,
    NO_RECOMPUTE,
    SELECTIVE_MODULES,
    Recompute,
    kept_modules,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lora import DEFAULT_ALPHA, Lora
from megatron.hydraulis.model_shape import (
    ModelShape,
    layers_with_experts,
    windowed_layers,
)

TE_LAYERS = "transformer_engine"
OF_TE = ("moe_grouped_gemm", "moe_permute_fusion")
"""Attributes of options that only layers of Transformer Engine have an implementation of."""
NOT_OF_LATENTS = ("no_rope_freq", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
"""Megatron's arguments of rotary positions that its latent attention ignores."""
LATENT_SIZES_TEXT = "without effect: --qk-head-dim and --qk-pos-emb-head-dim size heads of latents"
"""Why --kv-channels does nothing with latent attention."""
VOCABULARY_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by."""
# Megatron's default of --ffn-hidden-size. With --swiglu, two thirds of it, rounded down.
_FFN_OVER_HIDDEN = 4
_GATED_FFN_MULTIPLE = 64
_ROUTER_BYTES = {"fp32": 4, "fp64": 8}
"""Size of a score by --moe-router-dtype."""
_SEQUENCE_BY_SEQUENCE = ("local", "unfused")
"""Attention backends of upstream that, like our sdpa, need no kernel for packed sequences."""


def _layer_pattern(text: str) -> int | list[int]:
    """Read a number, or a list such as ``[1,0]*12``, in Megatron's notation of layers."""

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
        value = value_of(ast.parse(text, mode="eval").body) if "[" in text else int(text)
        if isinstance(value, int) or all(isinstance(each, int) for each in value):
            return value
        raise ValueError(text)
    except (SyntaxError, TypeError, ValueError):
        wanted = "is no N and no list as in [0]*3+[1]*58"
        raise argparse.ArgumentTypeError(f"{text!r} {wanted}") from None


def _window(text: str) -> tuple[int, ...]:
    """Read ``N,0`` or ``(N,0)``, in Megatron's notation of windows."""
    try:
        return tuple(int(each) for each in text.strip("()").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not N,0") from None


@dataclass(frozen=True, slots=True)
class ModelFlag:
    """A flag of Megatron that describes a model, as commands declare and read it."""

    option: str
    help: str
    size: str = ""
    """Field of `ModelShape` that has the value; empty if none has it as it is."""
    default: Any = None
    """Megatron's default of a size; the namespace has None where the flag is not given."""
    form: Mapping[str, Any] = field(default_factory=lambda: {"type": int, "metavar": "N"})
    """What `add_argument` takes besides."""
    needs: tuple[str, ...] = ()
    """Flags of which one has to be given, as in training, for this one to have an effect."""

    @property
    def dest(self) -> str:
        """Attribute of a namespace."""
        return str(self.form.get("dest") or _attribute(self.option))

    def declare(self, parser: argparse._ActionsContainer) -> None:
        """Add the flag to a parser, with its default in the help."""
        text = f"{self.help} (default: {self.default})" if self.default else self.help
        parser.add_argument(self.option, help=text, **self.form)

    def is_given(self, namespace: argparse.Namespace) -> bool:
        value = getattr(namespace, self.dest)
        return value is not None and value is not False  # 0 is given

    def has_effect(self, namespace: argparse.Namespace) -> bool:
        return not self.needs or any(getattr(namespace, _attribute(f)) for f in self.needs)

    def value(self, namespace: argparse.Namespace) -> Any:
        """The value as given, else the default."""
        value = getattr(namespace, self.dest)
        return self.default if value is None else value


def _attribute(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


_OF_EXPERTS = ("--num-experts",)
_WITH_LATENTS = "with --multi-latent-attention"
_switch = partial(ModelFlag, form={"action": "store_true"})
_number = partial(ModelFlag, form={"type": float, "metavar": "X"})
_pattern = partial(ModelFlag, form={"type": _layer_pattern, "metavar": "N"})
_of_experts = partial(ModelFlag, needs=_OF_EXPERTS)
_of_latents = partial(ModelFlag, needs=("--multi-latent-attention",))
_of_gates = partial(_number, needs=("--swiglu", "--quick-geglu"))

_SHAPE = (
    ModelFlag("--num-layers", "layers of the whole model", "num_layers"),
    ModelFlag("--hidden-size", "size of a hidden state", "hidden_size"),
    ModelFlag("--num-attention-heads", "attention heads of a layer", "num_attention_heads"),
    ModelFlag("--ffn-hidden-size", "width of the MLP (default: 4 × hidden)"),
    ModelFlag("--kv-channels", "size of a head (default: hidden / heads)", "kv_channels"),
    _switch("--group-query-attention", "let heads share keys and values"),
    ModelFlag(
        "--num-query-groups",
        "groups of heads, with --group-query-attention",
        "num_query_groups",
        default=1,
        needs=("--group-query-attention",),
    ),
    _switch("--multi-latent-attention", "keys and values come from latents"),
    _of_latents("--q-lora-rank", f"{_WITH_LATENTS} (default: none)", "q_lora_rank", 0),
    _of_latents("--kv-lora-rank", _WITH_LATENTS, "kv_lora_rank", 32),
    _of_latents("--qk-head-dim", _WITH_LATENTS, "qk_head_dim", 128),
    _of_latents("--qk-pos-emb-head-dim", _WITH_LATENTS, "qk_pos_emb_head_dim", 64),
    _of_latents("--v-head-dim", _WITH_LATENTS, "v_head_dim", 128),
    _switch("--swiglu", "gated MLP"),
    _switch("--quick-geglu", "gated MLP, without fused kernel"),
    _of_gates("--glu-linear-offset", "of a gated MLP"),
    _of_gates("--activation-func-clamp-value", "limit in a gated MLP"),
    _switch("--attention-output-gate", "gate of attention's output", "output_gate"),
    ModelFlag("--num-experts", "experts of a layer", "num_experts", 0),
    _pattern(
        "--moe-layer-freq",
        "every N-th layer has experts; or a list as in [0]*3+[1]*58 (default: all have)",
        needs=_OF_EXPERTS,
    ),
    _of_experts("--moe-router-topk", "experts that a token passes", "experts_per_token", 2),
    _of_experts(
        "--moe-ffn-hidden-size",
        "width of an expert (default: --ffn-hidden-size)",
        "expert_ffn_hidden_size",
    ),
    _of_experts(
        "--moe-shared-expert-intermediate-size",
        "width of the experts that every token passes, together",
        "shared_expert_ffn_hidden_size",
        0,
    ),
    ModelFlag(
        "--window-size",
        "tokens before its own that a token attends to",
        form={"type": _window, "metavar": "N,0"},
    ),
    _pattern(
        "--window-attn-skip-freq",
        "every N-th layer has no window; or a list as in [1,0]*12 (default: all have)",
        needs=("--window-size",),
    ),
    ModelFlag("--padded-vocab-size", "tokens of the vocabulary, padded"),
    ModelFlag(
        "--vocab-size", "tokens of the vocabulary before padding, without --padded-vocab-size"
    ),
    ModelFlag(
        "--make-vocab-size-divisible-by",
        "pad --vocab-size to a multiple of N",
        default=VOCABULARY_MULTIPLE,
    ),
    _switch("--untie-embeddings-and-output-weights", "the output layer has its own weights"),
    ModelFlag("--mtp-num-layers", "layers of multi-token prediction", "num_predictions", 0),
)
"""Flags that describe the shape."""
_PRECISION = (
    _switch("--bf16", "train in bf16"),
    _switch(
        "--fp32",
        "train in fp32 (default: bf16; with further options of a launch script fp32, as in "
        "training)",
    ),
)
_LAYERS = (
    _switch("--grad-reduce-in-bf16", "let gradients travel in bf16"),
    ModelFlag(
        "--transformer-impl",
        "layers, which take different memory (default: local, or transformer_engine if options of "
        "experts need it)",
        form={"choices": ("local", TE_LAYERS)},
    ),
    ModelFlag("--spec", "module and name of own layers", form={"nargs": "*", "metavar": "NAME"}),
    ModelFlag(
        "--core-attention",
        "kernel of core attention (default: auto)",
        form={"choices": ("auto", *CORE_ATTENTIONS)},
    ),
    ModelFlag(
        "--attention-backend",
        "chooses it in Megatron: local and unfused stand for sdpa, others for auto",
        form={"choices": ("flash", "fused", "unfused", "local", "auto")},
    ),
    ModelFlag(
        "--no-rope-fusion",
        "rotate queries and keys by three kernels",
        form={"action": "store_false", "dest": "apply_rope_fusion"},
    ),
    _switch("--qk-layernorm", "norms of queries and keys"),
    ModelFlag(
        "--softmax-type",
        "of core attention, where others take more memory (default: vanilla)",
        form={"choices": ("vanilla", "off-by-one", "learnable"), "default": "vanilla"},
    ),
    ModelFlag(
        "--apply-layernorm-1p",
        "norms around one, which take more memory in local layers",
        form={"action": "store_true", "dest": "layernorm_zero_centered_gamma"},
    ),
    ModelFlag("--loss-chunk-tokens", "tokens whose logits exist at the same time"),
    _switch(
        "--offer-recompute", "estimate tp8r too, where it holds a quarter more tokens than tp8"
    ),
    ModelFlag("--fs-prefetch", "layers gathered ahead where cp ranks share weights", default=1),
    ModelFlag(
        "--frozen",
        "what a model provider freezes: embedding, output, layers such as 0-30 (default: nothing)",
        form={"nargs": "+", "metavar": "PART"},
    ),
    ModelFlag("--lora-rank", "train adapters of this rank, and freeze all else"),
    _number(
        "--lora-alpha",
        f"times which an adapter's output counts, over its rank (default: {DEFAULT_ALPHA:g})",
        needs=("--lora-rank",),
    ),
    ModelFlag(
        "--lora-targets",
        "linear layers with adapters (default: all-linear)",
        form={"nargs": "+", "metavar": "NAME"},
        needs=("--lora-rank",),
    ),
    _switch(
        "--moe-grouped-gemm",
        "products of all experts in one call, by layers of Transformer Engine",
        needs=_OF_EXPERTS,
    ),
    _switch("--moe-permute-fusion", "layers of Transformer Engine for experts", needs=_OF_EXPERTS),
    ModelFlag(
        "--moe-router-dtype",
        "precision of routers, if higher",
        form={"choices": tuple(_ROUTER_BYTES)},
    ),
    ModelFlag(
        "--moe-router-score-function",
        "scores of a router (default: softmax)",
        form={"choices": ("softmax", "sigmoid"), "default": "softmax"},
    ),
    _switch("--moe-router-pre-softmax", "softmax before experts are chosen"),
    ModelFlag(
        "--moe-router-load-balancing-type",
        "aux_loss, seq_aux_loss or none: whether a loss balances experts (default: aux_loss)",
        form={
            "nargs": "+",
            "choices": ("aux_loss", "seq_aux_loss", "none"),
            "default": "aux_loss",
            "metavar": "TYPE",
        },
    ),
    ModelFlag(
        "--moe-aux-loss-coeff",
        "its coefficient (default: 0)",
        form={"type": float, "nargs": "+", "default": 0.0, "metavar": "X"},
    ),
    _number("--moe-z-loss-coeff", "of routers' z-loss"),
)
_ACTIVATIONS = (
    ModelFlag(
        "--sequence-parallel",
        "split activations between layers over the tp ranks (default: on)",
        form={"action": argparse.BooleanOptionalAction, "default": True},
    ),
    ModelFlag(
        "--cp-comm-type",
        f"how cp ranks exchange keys and values, of {', '.join(CP_COMM_TYPES)} (default: auto)",
        form={"nargs": "+", "default": ["auto"], "metavar": "TYPE"},
    ),
    ModelFlag(
        "--recompute-granularity",
        "recompute activations: full, all of a layer; selective, --recompute-modules (default: "
        "none)",
        form={"choices": ("full", "selective")},
    ),
    _switch("--recompute-activations", "as --recompute-granularity selective"),
    ModelFlag(
        "--recompute-method",
        "which layers are recomputed, with full",
        form={"choices": ("uniform", "block")},
    ),
    ModelFlag("--recompute-num-layers", "number of layers that are recomputed, with full"),
    ModelFlag(
        "--recompute-modules",
        f"parts recomputed with selective: {', '.join(SELECTIVE_MODULES)} (default: core_attn)",
        form={"nargs": "+", "metavar": "MODULE"},
    ),
)


def add_model_arguments(parser: argparse.ArgumentParser, *, has_activations: bool = True) -> None:
    """Declare the flags that describe the model and its layers.

    has_activations: false for commands that choose themselves how activations are kept and split.
    """
    parser.set_defaults(launch_options=False, flags_of_folder=())
    model = parser.add_argument_group(
        "model",
        "given by --model FILE, --hf DIR, or --num-layers and so on, as in Megatron; other options "
        "are accepted, so that those of a launch script can be given",
    )
    model.add_argument(
        "--model",
        metavar="FILE",
        help="shape of the model, JSON, for example examples/model_llama32b.json",
    )
    layers = parser.add_argument_group("layers")
    for group, flags in (
        (model, _SHAPE),
        (layers.add_mutually_exclusive_group(), _PRECISION),
        (layers, (*_LAYERS, *(_ACTIVATIONS if has_activations else ()))),
    ):
        for flag in flags:
            flag.declare(group)


def model_words(namespace: argparse.Namespace) -> list[str]:
    """The flags of the model and its layers that were given, with their values."""
    words = [] if namespace.model is None else ["--model", namespace.model]
    of_folder = namespace.flags_of_folder
    if of_folder:
        words = ["--hf", namespace.hf]
    for flag in (*_SHAPE, *_PRECISION, *_LAYERS):
        value = getattr(namespace, flag.dest)
        own = []
        if flag.form.get("action") == "store_false":
            own = [] if value else [flag.option]
        elif flag.is_given(namespace) and value != flag.form.get("default"):
            values = () if value is True else value if "nargs" in flag.form else (value,)
            own = [flag.option, *(str(each).replace(" ", "") for each in values)]
        words += [] if " ".join(own) in of_folder else own
    return words


def given_shape(namespace: argparse.Namespace) -> ModelShape | None:
    """The shape that the flags describe, None without any; raises as `shape_of`."""
    is_given = namespace.model is not None or any(flag.is_given(namespace) for flag in _SHAPE)
    return shape_of(namespace) if is_given else None


def shape_of(namespace: argparse.Namespace) -> ModelShape:
    """The shape that the flags describe; says on stderr which of them have no effect.

    Raises ConfigurationError for an unreadable file, for both a file and flags, and for missing
    or invalid sizes.
    """
    given = [flag.option for flag in _SHAPE if flag.is_given(namespace)]
    if namespace.model is not None:
        if given:
            raise ConfigurationError(
                f"--model {namespace.model} describes the whole model but "
                f"{'--hf' if namespace.flags_of_folder else given[0]} is given too; "
                f"leave one of them out"
            )
        return ModelShape.read(namespace.model)
    needed = ("--num-layers", "--hidden-size", "--num-attention-heads")
    missing = [option for option in needed if option not in given]
    vocabulary = namespace.padded_vocab_size
    if vocabulary is None and namespace.vocab_size is None:
        missing.append("--padded-vocab-size")
    if missing:
        raise ConfigurationError(
            f"the model is described by --model FILE, --hf DIR or flags but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; give one of them"
        )
    hidden, heads = namespace.hidden_size, namespace.num_attention_heads
    if namespace.kv_channels is None and hidden % heads and not namespace.multi_latent_attention:
        raise ConfigurationError(
            f"without --kv-channels the heads share --hidden-size evenly but {hidden} is not a "
            f"multiple of {heads} heads; give --kv-channels"
        )
    idle: dict[tuple[str, ...], list[str]] = {}
    for flag in (*_SHAPE, *_LAYERS):
        if flag.is_given(namespace) and not flag.has_effect(namespace):
            idle.setdefault(flag.needs, []).append(flag.option)
    texts = [
        f"{', '.join(options)}: without effect, as there is no {' or '.join(needs)}"
        for needs, options in idle.items()
    ]
    if namespace.multi_latent_attention and namespace.kv_channels is not None:
        texts.append(f"--kv-channels: {LATENT_SIZES_TEXT}")
    for text in texts:
        print(text, file=sys.stderr, flush=True)
    check_latent_heads(namespace)
    check_layer_patterns(namespace)
    if vocabulary is None:
        multiple = namespace.make_vocab_size_divisible_by or VOCABULARY_MULTIPLE
        vocabulary = math.ceil(namespace.vocab_size / multiple) * multiple
    return model_shape(namespace, vocabulary)


def model_shape(args: argparse.Namespace, vocab_size: int) -> ModelShape:
    """The shape of a model with a padded vocabulary of this size.

    args: checked flags of training, or of `add_model_arguments`.
    """
    sizes: dict[str, Any] = {
        flag.size: flag.value(args) for flag in _SHAPE if flag.size and flag.has_effect(args)
    }
    ffn_hidden_size = args.ffn_hidden_size
    if ffn_hidden_size is None:
        ffn_hidden_size = usual_ffn_hidden_size(args)
    if args.multi_latent_attention:
        sizes["kv_channels"] = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]
    elif args.kv_channels is None:
        sizes["kv_channels"] = args.hidden_size // args.num_attention_heads
    if args.num_experts:
        frequency = 1 if args.moe_layer_freq is None else args.moe_layer_freq
        has_experts = layers_with_experts(args.num_layers, frequency)
        sizes["num_expert_layers"] = sum(has_experts)
        sizes["num_first_mlp_layers"] = (*has_experts, True).index(True)
        if sizes["expert_ffn_hidden_size"] is None:
            sizes["expert_ffn_hidden_size"] = ffn_hidden_size
    if args.window_size is not None and args.window_size[0] >= 0:
        num_windowed = sum(windowed_layers(args.num_layers, args.window_attn_skip_freq))
        if num_windowed:
            sizes["num_windowed_layers"] = num_windowed
            sizes["window_tokens"] = args.window_size[0] + 1
    return ModelShape(
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        gated_mlp=args.swiglu or args.quick_geglu,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        **{"num_query_groups": args.num_attention_heads} | sizes,
    )


def usual_ffn_hidden_size(args: argparse.Namespace) -> int:
    """Megatron's default of --ffn-hidden-size; args: as for `model_shape`."""
    size: int = _FFN_OVER_HIDDEN * args.hidden_size
    if args.swiglu:
        return size * 2 // 3 // _GATED_FFN_MULTIPLE * _GATED_FFN_MULTIPLE
    return size


def check_latent_heads(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for query groups with latent attention; args: as for
    `model_shape`."""
    if args.group_query_attention and args.multi_latent_attention:
        raise ConfigurationError(
            f"--multi-latent-attention makes keys for each of --num-attention-heads "
            f"{args.num_attention_heads} heads but --group-query-attention shares them; "
            f"remove one of the two"
        )


def check_layer_patterns(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a window, or layers that have it or experts, that do not suit
    the model; args: as for `model_shape`."""
    size = args.window_size
    if size is not None and (len(size) != 2 or size[0] < -1 or size[1] != 0):
        typed = ",".join(map(str, size))
        raise ConfigurationError(
            f"--window-size gives the tokens before and after its own that a token attends to, and "
            f"none after it as the model is causal, but is {typed}; write N,0"
        )
    if size is not None:
        check_pattern("--window-attn-skip-freq", args.window_attn_skip_freq, args.num_layers)
    if args.num_experts:
        check_pattern("--moe-layer-freq", args.moe_layer_freq, args.num_layers)
        if isinstance(args.moe_layer_freq, list) and not any(args.moe_layer_freq):
            raise ConfigurationError(
                f"--moe-layer-freq gives experts to at least 1 layer but lists 0 for all "
                f"{args.num_layers}; write a 1 for a layer, or remove --moe-layer-freq and "
                f"--num-experts"
            )


def check_pattern(option: str, value: int | list[int] | None, num_layers: int) -> None:
    """Raise ConfigurationError unless a value is a period of layers, or has a 0 or a 1 for each."""
    if isinstance(value, int) and value < 1:
        raise ConfigurationError(
            f"{option} counts layers from 1 but is {value}; give a positive number or a list"
        )
    if isinstance(value, list) and (len(value) != num_layers or not set(value) <= {0, 1}):
        raise ConfigurationError(
            f"{option} has a 0 or a 1 for each of --num-layers {num_layers} layers but lists "
            f"{len(value)} values, {', '.join(map(str, sorted(set(value))))} among them; correct "
            f"the list"
        )


def job_precision(namespace: argparse.Namespace, of_profile: str | None = None) -> Precision:
    """The precision that is given, else that of the cost profile if it names one.

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
    """The precision of parameters in training."""
    return Precision.BF16 if args.bf16 else Precision.FP32


def gradient_bytes(args: argparse.Namespace) -> int:
    """Size of a gradient on the wire in training."""
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
    args: argparse.Namespace, shape: ModelShape, core_attention: str, frozen: Frozen
) -> dict[str, Any]:
    """Fields of `AnalyticCostModel` about layers, for training.

    args: completed arguments, in which a model without experts has none of their options.
    """
    has_te = args.transformer_impl == TE_LAYERS
    has_te_layers = has_te and frozen.lora is None  # adapters are of local layers
    takes_te = has_te and args.softmax_type == "vanilla"
    return {
        "frozen": frozen,
        "qk_norms": args.qk_layernorm,
        "num_gate_tensors": num_gate_tensors(args),
        "softmax_type": args.softmax_type,
        "has_wide_norms": args.layernorm_zero_centered_gamma and not has_te_layers,
        "router_bytes": _ROUTER_BYTES.get(args.moe_router_dtype, 0),
        "num_score_tensors": _num_score_tensors(args),
        "has_te_layers": has_te_layers,
        "groups_experts": groups_experts(args),
        "fuses_rope": has_te and args.apply_rope_fusion and not shape.v_head_dim,
        "has_te_attention": core_attention == "te" or (core_attention == "auto" and takes_te),
    }


def groups_experts(args: argparse.Namespace) -> bool:
    """Whether products of experts are one call; args: completed arguments, as above."""
    return args.transformer_impl == TE_LAYERS and bool(args.moe_grouped_gemm)


def given_layers(namespace: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """`layer_settings` of the flags of `add_model_arguments`, for devices with the kernels that
    they ask for."""
    args = argparse.Namespace(**vars(namespace))
    if not shape.num_experts:
        for dest in OF_TE:
            setattr(args, dest, False)
    args.transformer_impl = asked_layers(args, args.transformer_impl)
    attention = args.core_attention or core_attention_of(args.attention_backend or "auto")
    frozen = Frozen.parse(namespace.frozen or (), shape)
    if namespace.lora_rank is not None:
        if namespace.frozen:
            raise ConfigurationError(
                "adapters freeze all of the model but --frozen is given with --lora-rank; remove "
                "--frozen"
            )
        alpha = DEFAULT_ALPHA if namespace.lora_alpha is None else namespace.lora_alpha
        lora = Lora.resolve(namespace.lora_rank, alpha, namespace.lora_targets or (), shape)
        frozen = Frozen.around(lora, shape)
    settings = layer_settings(args, shape, attention, frozen)
    others = ("loss_chunk_tokens", "fs_prefetch", "offer_recompute")
    given = {name: getattr(namespace, name) for name in others}
    return settings | {name: value for name, value in given.items() if value is not None}


def given_settings(namespace: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Fields of `AnalyticCostModel` about layers and their activations.

    Says on stderr which modules are not recomputed. Raises ConfigurationError for recomputation
    that is described in part, and for an unknown exchange.
    """
    args = argparse.Namespace(**vars(namespace))
    layers = given_layers(namespace, shape)
    kept = kept_modules(
        has_experts=shape.num_experts > 0,
        has_te_layers=layers["has_te_layers"],
        groups_experts=layers["groups_experts"],
    )
    for option, instead in drop_kept_modules(args, kept):
        print(f"{option}: {instead}", file=sys.stderr, flush=True)
    check_recompute(args)
    check_cp_comm_type(args.cp_comm_type)
    return layers | {
        "sequence_parallel": args.sequence_parallel,
        "recompute": recompute_of(args),
        "cp_comm_type": args.cp_comm_type[0],
    }


def num_gate_tensors(args: argparse.Namespace) -> int:
    """Tensors as wide as the MLP that a gate of several kernels keeps; 0 if one is fused.

    Both halves of the output of fc1, the second with its offset, the activation and the product of
    the two; the first within its limit; a sigmoid.

    args: arguments of training, of which those with a problem may be missing, or flags of
    `add_model_arguments`.
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


def drop_kept_modules(
    args: argparse.Namespace, kept_here: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Remove from ``args.recompute_modules`` those that keep their activations.

    The update is the same. Returns (option with the module, what happens instead) for each.

    kept_here: `kept_modules` of the model's layers.
    """
    modules = args.recompute_modules or []
    kept = [module for module in modules if module in kept_here]
    if kept:
        args.recompute_modules = [module for module in modules if module not in kept] or None
        if args.recompute_modules is None and _granularity(args) == "selective":
            args.recompute_granularity, args.recompute_activations = None, False
    return tuple((f"--recompute-modules {module}", kept_here[module]) for module in kept)


def check_recompute(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for recompute flags that contradict each other or lack one.

    args: before upstream's checks, in which --recompute-activations silently overrides another
    granularity; or flags of `add_model_arguments`.
    """
    granularity = _granularity(args)
    if args.recompute_activations and args.recompute_granularity == "full":
        raise ConfigurationError(
            "--recompute-activations stands for --recompute-granularity selective but "
            "--recompute-granularity is full; give one of them"
        )
    recompute_of(args)
    has_biases = getattr(args, "add_bias_linear", False)  # commands do not ask
    if has_biases and granularity == "selective" and "mlp" in (args.recompute_modules or ()):
        raise ConfigurationError(
            "--recompute-modules mlp: upstream recomputes only an MLP without biases, because its "
            "output bias would get no gradient; add --disable-bias-linear or use "
            "--recompute-granularity full"
        )


def recompute_of(args: argparse.Namespace) -> Recompute:
    """The recomputation of checked arguments, before or after upstream's checks."""
    match _granularity(args):
        case None:
            return NO_RECOMPUTE
        case "selective":
            # Upstream's own default.
            modules = args.recompute_modules or ("core_attn",)
            return Recompute(granularity="selective", modules=tuple(modules))
    return Recompute(
        granularity="full", method=args.recompute_method, num_layers=args.recompute_num_layers or 0
    )


def _granularity(args: argparse.Namespace) -> str | None:
    # Upstream's checks delete the attribute of --recompute-activations.
    is_short = getattr(args, "recompute_activations", False)
    granularity: str | None = args.recompute_granularity
    return "selective" if is_short else granularity
