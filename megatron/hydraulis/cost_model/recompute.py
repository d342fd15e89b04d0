"""Which activations the backward recomputes, for time and memory.

The settings and their meaning are upstream's (megatron-core 0.19.2, ``recompute.py``,
``transformer_layer.py`` and ``attention.py``):

- ``full``, ``uniform``: a stage is cut into chunks of num_layers layers (the last may be shorter);
  the input of each is kept, and the chunk's forward runs again before its backward.
- ``full``, ``block``: the same for the first num_layers layers of a stage, one by one; the others
  keep everything.
- ``selective``: recomputes the named modules of every layer, ``core_attn`` (scores and their
  product with the values) and ``mlp``; their inputs are kept.
"""

import argparse
import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron.hydraulis.errors import ConfigurationError

SELECTIVE_MODULES = ("core_attn", "mlp")
"""Modules that selective recompute can name."""
KEPT_WITH_EXPERTS = ("mlp",)
"""Of them those that keep their activations in models with experts. Upstream recomputes the MLPs of
layers without experts; here all layers keep the same modules."""
_KEPT_MODULES = ("layernorm", "moe_act", "moe", "shared_experts", "mla_up_proj", "gdn_norm_out")
"""Modules of upstream's selective recompute that are not recomputed here."""
KEPT_TEXT = "its activations are kept, which takes more memory"
"""What happens instead to a module that selective recompute names in vain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """Upstream's settings of activation recompute; none by default.

    Raises ConfigurationError for full recompute without method or number of layers, and for
    selective recompute of no modules or of any outside SELECTIVE_MODULES.
    """

    granularity: Literal["full", "selective"] | None = None
    method: Literal["uniform", "block"] | None = None
    """Of full recompute."""
    num_layers: int = 0
    """Of full recompute: layers of a chunk (uniform), or recomputed layers of a stage (block)."""
    modules: tuple[str, ...] = ()
    """Of selective recompute."""

    def __post_init__(self) -> None:
        if self.granularity == "full" and (self.method is None or self.num_layers < 1):
            raise ConfigurationError(
                f"full recompute needs a method and a number of layers of at least 1 but has "
                f"{self.method} and {self.num_layers}; give --recompute-method uniform or block, "
                f"and --recompute-num-layers"
            )
        if self.granularity == "selective" and (
            not self.modules or not set(self.modules) <= set(SELECTIVE_MODULES)
        ):
            raise ConfigurationError(
                f"selective recompute is of some of {', '.join(SELECTIVE_MODULES)} but names "
                f"{', '.join(self.modules) or 'none'}; give --recompute-modules of these"
            )

    def __str__(self) -> str:
        parts = (self.granularity, self.method, self.num_layers or None, *self.modules)
        return " ".join(str(part) for part in parts if part is not None) or "none"

    @property
    def with_experts(self) -> "Recompute":
        """The same, without what models with experts keep."""
        if self.granularity != "selective":
            return self
        modules = tuple(module for module in self.modules if module not in KEPT_WITH_EXPERTS)
        return replace(self, modules=modules) if modules else NO_RECOMPUTE

    def num_layers_again(self, num_layers: int) -> int:
        """Layers of a stage of num_layers that are fully recomputed."""
        if self.granularity != "full":
            return 0
        return num_layers if self.method == "uniform" else min(self.num_layers, num_layers)

    def num_attentions_again(self, num_layers: int) -> int:
        """Layers of a stage whose core attention is recomputed."""
        return self._num_again(num_layers, "core_attn")

    def num_mlps_again(self, num_layers: int) -> int:
        """Layers of a stage whose MLP is recomputed."""
        return self._num_again(num_layers, "mlp")

    def num_inputs_kept(self, num_layers: int) -> int:
        """Hidden states that full recompute keeps of a micro-batch on a stage."""
        num_again = self.num_layers_again(num_layers)
        if self.method == "uniform" and num_again:
            return math.ceil(num_again / self.num_layers)
        return num_again

    def num_layers_at_once(self, num_layers: int) -> int:
        """Layers whose activations exist again while one chunk runs backward."""
        num_again = self.num_layers_again(num_layers)
        return min(self.num_layers, num_again) if self.method == "uniform" else min(1, num_again)

    @property
    def drops_mlp(self) -> bool:
        return self.granularity == "selective" and "mlp" in self.modules

    @property
    def drops_core_attention(self) -> bool:
        return self.granularity == "selective" and "core_attn" in self.modules

    def _num_again(self, num_layers: int, module: str) -> int:
        if self.granularity == "selective":
            return num_layers if module in self.modules else 0
        return self.num_layers_again(num_layers)


EVERY_LAYER = Recompute(granularity="full", method="uniform", num_layers=1)
NO_RECOMPUTE = Recompute()
"""All activations are kept."""


def drop_kept_modules(
    args: argparse.Namespace, *, has_experts: bool
) -> tuple[tuple[str, str], ...]:
    """Remove from ``args.recompute_modules`` those that keep their activations here.

    The update is the same. Returns (option with the module, what happens instead) for each.
    """
    modules = args.recompute_modules or []
    not_recomputed = (*_KEPT_MODULES, *(KEPT_WITH_EXPERTS if has_experts else ()))
    kept = [module for module in modules if module in not_recomputed]
    if kept:
        args.recompute_modules = [module for module in modules if module not in kept] or None
        if args.recompute_modules is None and _granularity(args) == "selective":
            args.recompute_granularity, args.recompute_activations = None, False
    return tuple((f"--recompute-modules {module}", KEPT_TEXT) for module in kept)


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
    if granularity == "full" and args.recompute_method is None:
        raise ConfigurationError(
            "--recompute-granularity full needs the layers to recompute; give --recompute-method "
            "uniform, or block for only the first layers of a stage"
        )
    if granularity == "full" and args.recompute_num_layers is None:
        raise ConfigurationError(
            f"--recompute-method {args.recompute_method} takes a number of layers, which is "
            "missing; give --recompute-num-layers, for example 1"
        )
    for module in args.recompute_modules or () if granularity == "selective" else ():
        if module not in SELECTIVE_MODULES:
            raise ConfigurationError(
                f"--recompute-modules {module} is not honoured: upstream knows no such module; use "
                f"{' or '.join(SELECTIVE_MODULES)}"
            )
        if module == "mlp" and getattr(args, "add_bias_linear", False):
            raise ConfigurationError(
                "--recompute-modules mlp: upstream recomputes only an MLP without biases, because "
                "its output bias would get no gradient; add --disable-bias-linear or use "
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
        granularity="full", method=args.recompute_method, num_layers=args.recompute_num_layers
    )


def _granularity(args: argparse.Namespace) -> str | None:
    # Upstream's checks delete the attribute of --recompute-activations.
    is_short = getattr(args, "recompute_activations", False)
    granularity: str | None = args.recompute_granularity
    return "selective" if is_short else granularity
