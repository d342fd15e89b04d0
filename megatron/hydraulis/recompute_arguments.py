"""Upstream's flags of activation recompute: checked, and as the cost model takes them."""

import argparse

from megatron.hydraulis.cost_model.recompute import SELECTIVE_MODULES, Recompute
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["check_recompute", "recompute_of"]

_WHY_NOT = {
    "layernorm": "upstream recomputes norms by code that needs Transformer Engine",
    "moe_act": "the model has no experts",
    "moe": "the model has no experts",
    "shared_experts": "the model has no experts",
    "mla_up_proj": "the model has no latent projections",
    "gdn_norm_out": "the model has no other attention",
}


def check_recompute(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for flags of recompute that contradict each other or lack one.

    args: as parsed, before upstream's own checks, which turn --recompute-activations into
    --recompute-granularity selective without a word about another granularity.
    """
    granularity = args.recompute_granularity
    if args.recompute_activations and granularity == "full":
        raise ConfigurationError(
            "--recompute-activations stands for --recompute-granularity selective but "
            "--recompute-granularity is full; give one of them"
        )
    if args.recompute_activations:
        granularity = "selective"
    if granularity == "full":
        _check_full(args)
    if args.recompute_modules is not None:
        _check_modules(args, granularity)


def _check_full(args: argparse.Namespace) -> None:
    if args.recompute_method is None:
        raise ConfigurationError(
            "--recompute-granularity full needs to know which layers are recomputed; give "
            "--recompute-method uniform, or block for the first layers of a stage alone"
        )
    num_layers = args.recompute_num_layers
    if num_layers is None or num_layers < 1:
        raise ConfigurationError(
            f"--recompute-method {args.recompute_method} takes a number of layers of at least 1 "
            f"but --recompute-num-layers is {num_layers}; give for example 1"
        )


def _check_modules(args: argparse.Namespace, granularity: str | None) -> None:
    named = " ".join(args.recompute_modules)
    if granularity != "selective":
        raise ConfigurationError(
            f"--recompute-modules {named} has an effect only with --recompute-granularity "
            f"selective; add it or remove --recompute-modules"
        )
    for module in args.recompute_modules:
        if module not in SELECTIVE_MODULES:
            why = _WHY_NOT.get(module, "upstream knows no such module")
            raise ConfigurationError(
                f"--recompute-modules {module} is not honoured: {why}; use "
                f"{' or '.join(SELECTIVE_MODULES)}"
            )
    if "mlp" in args.recompute_modules and args.add_bias_linear:
        raise ConfigurationError(
            "--recompute-modules mlp: upstream recomputes an MLP without biases only, with them "
            "the bias behind it would get no gradient; add --disable-bias-linear or use "
            "--recompute-granularity full"
        )


def recompute_of(args: argparse.Namespace) -> Recompute:
    """What is recomputed.

    args: checked by check_recompute and completed by upstream's own checks.
    """
    if args.recompute_granularity is None:
        return Recompute()
    if args.recompute_granularity == "selective":
        # Upstream's own default.
        modules = args.recompute_modules or ("core_attn",)
        return Recompute(granularity="selective", modules=tuple(modules))
    return Recompute(
        granularity="full", method=args.recompute_method, num_layers=args.recompute_num_layers
    )
