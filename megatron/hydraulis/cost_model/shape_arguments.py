"""Flags of a model's shape, named as upstream names them, for commands that build no model."""

import argparse
import math

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape

__all__ = ["add_shape_arguments", "shape_of"]

# Upstream's defaults of the same flags.
_FFN_OVER_HIDDEN = 4
_VOCABULARY_MULTIPLE = 128


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; shape_of reads them."""
    group = parser.add_argument_group("model, by upstream's names")
    group.add_argument("--num-layers", type=int, required=True, metavar="N")
    group.add_argument("--hidden-size", type=int, required=True, metavar="N")
    group.add_argument("--num-attention-heads", type=int, required=True, metavar="N")
    group.add_argument(
        "--ffn-hidden-size", type=int, metavar="N", help="width of the MLP (default: 4 x hidden)"
    )
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument(
        "--num-query-groups", type=int, metavar="N", help="with --group-query-attention"
    )
    group.add_argument(
        "--kv-channels", type=int, metavar="N", help="size of a head (default: hidden / heads)"
    )
    group.add_argument("--swiglu", action="store_true", help="gated MLP")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    vocabulary = group.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--padded-vocab-size", type=int, metavar="N", help="entries as padded")
    vocabulary.add_argument("--vocab-size", type=int, metavar="N", help="entries before padding")
    group.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=_VOCABULARY_MULTIPLE,
        metavar="N",
        help="pads --vocab-size (default: %(default)s)",
    )


def shape_of(namespace: argparse.Namespace) -> ModelShape:
    """The shape that the flags describe.

    Raises ConfigurationError for sizes that are not positive or do not fit together.
    """
    hidden, heads = namespace.hidden_size, namespace.num_attention_heads
    multiple = namespace.make_vocab_size_divisible_by
    for flag, value in (
        ("--hidden-size", hidden),
        ("--num-attention-heads", heads),
        ("--make-vocab-size-divisible-by", multiple),
    ):
        if value < 1:
            raise ConfigurationError(f"{flag} is at least 1 but is {value}; give a positive number")
    if namespace.kv_channels is None and hidden % heads:
        raise ConfigurationError(
            f"without --kv-channels the heads share --hidden-size evenly but {hidden} is not a "
            f"multiple of {heads} heads; give --kv-channels"
        )
    if namespace.group_query_attention != (namespace.num_query_groups is not None):
        raise ConfigurationError(
            "--group-query-attention and --num-query-groups come together but one of them is "
            "missing; give both or neither"
        )
    vocabulary = namespace.padded_vocab_size
    if vocabulary is None:
        vocabulary = math.ceil(namespace.vocab_size / multiple) * multiple
    return ModelShape(
        num_layers=namespace.num_layers,
        hidden_size=hidden,
        ffn_hidden_size=(
            _FFN_OVER_HIDDEN * hidden
            if namespace.ffn_hidden_size is None
            else namespace.ffn_hidden_size
        ),
        num_attention_heads=heads,
        num_query_groups=namespace.num_query_groups if namespace.group_query_attention else heads,
        kv_channels=hidden // heads if namespace.kv_channels is None else namespace.kv_channels,
        vocab_size=vocabulary,
        gated_mlp=namespace.swiglu,
        tied_embeddings=not namespace.untie_embeddings_and_output_weights,
    )
