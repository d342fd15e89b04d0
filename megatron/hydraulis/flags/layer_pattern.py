"""--hybrid-layer-pattern: the kind of every layer, and what such a model can have."""

import argparse
import math

from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, parse_hybrid_pattern

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import option_of, typed
from megatron.hydraulis.strategy import Pool

_KINDS = (Symbols.ATTENTION, Symbols.MLA, Symbols.MLP, Symbols.MOE, Symbols.GDN)
NOT_IN_HYBRIDS = ("mtp_num_layers", "spec", "use_rope_scaling")
"""Settings that a model by --hybrid-layer-pattern cannot have yet."""


def take_layer_pattern(args: argparse.Namespace) -> None:
    """Take --hybrid-layer-pattern: it gives the number of layers, and keeps their kinds alone.

    Raises ConfigurationError for a pattern that upstream does not read, or of kinds that are not
    built.
    """
    given = args.hybrid_layer_pattern
    if given is None:
        return
    try:
        parsed = parse_hybrid_pattern(given)
    except ValueError as error:
        raise ConfigurationError(f"--hybrid-layer-pattern {given}: {error}; correct it") from None
    kinds = (parsed.main_pattern or "").replace(Symbols.PIPE, "")
    others = sorted({*given} - {*_KINDS, Symbols.PIPE})
    if others or not kinds:
        raise ConfigurationError(
            f"--hybrid-layer-pattern has layers of the kinds {', '.join(_KINDS)} but {given!r} has "
            f"{', '.join(others) or 'none'}; use these"
        )
    if args.num_layers not in (None, len(kinds)):
        raise ConfigurationError(
            f"--hybrid-layer-pattern {given} has {len(kinds)} layers but --num-layers is "
            f"{args.num_layers}; remove --num-layers"
        )
    if args.moe_layer_freq != 1:
        raise ConfigurationError(
            f"--hybrid-layer-pattern {given} says which layers have experts but --moe-layer-freq "
            f"is given, too; remove --moe-layer-freq"
        )
    args.hybrid_layer_pattern, args.num_layers = kinds, len(kinds)
    if Symbols.MOE in kinds:
        args.moe_layer_freq = [int(kind == Symbols.MOE) for kind in kinds]


def check_hybrid(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for settings that layers by --hybrid-layer-pattern do not have."""
    kinds = args.hybrid_layer_pattern
    if kinds is None:
        return
    for dest in NOT_IN_HYBRIDS:
        if getattr(args, dest):
            raise ConfigurationError(
                "--hybrid-layer-pattern builds Megatron's own layers, without Llama 3's positions, "
                f"but {typed(args, dest)} is given; remove one of the two"
            )
    for kind, dest in ((Symbols.MOE, "num_experts"), (Symbols.MLA, "multi_latent_attention")):
        if (kind in kinds) != bool(getattr(args, dest)):
            raise ConfigurationError(
                f"layers of kind {kind} are those of {option_of(dest)} but --hybrid-layer-pattern "
                f"is {kinds} and {option_of(dest)} {getattr(args, dest) or 'is not given'}; give "
                "both or neither"
            )
    if Symbols.GDN not in kinds:
        return
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    if values % keys:
        raise ConfigurationError(
            f"heads of values share those of keys evenly but --linear-num-value-heads {values} is "
            f"not a multiple of --linear-num-key-heads {keys}; use {math.gcd(values, keys)} heads "
            "of keys"
        )
    if not args.swiglu:
        raise ConfigurationError(
            "gated delta nets have SiLU, as the MLPs of their model, but --swiglu is missing; add "
            "it"
        )


def check_recurrent_heads(args: argparse.Namespace, pool: Pool) -> None:
    """Raise ConfigurationError unless tp and cp ranks divide the heads of gated delta nets."""
    heads = args.linear_num_key_heads
    if Symbols.GDN not in (args.hybrid_layer_pattern or ""):
        return
    for scheme in sorted({s for strategy in pool.strategies for s in strategy.schemes}, key=str):
        for group in scheme.group_schemes:
            if heads % (scheme.tp * group.cp):
                raise ConfigurationError(
                    f"tp and cp ranks divide the heads of a gated delta net evenly but scheme "
                    f"{scheme} has groups of tp {scheme.tp} and cp {group.cp} and "
                    f"--linear-num-key-heads is {heads}; use degrees whose product divides {heads}"
                )


def planning_notes(args: argparse.Namespace) -> tuple[str, ...]:
    """A line about the figures that do not know the kinds of layers yet."""
    if args.hybrid_layer_pattern is None:
        return ()
    return (
        "layers by --hybrid-layer-pattern: parameters, limits of tokens and predicted times count "
        "each of them as attention and an MLP or experts, so they are no estimates of this model",
    )
