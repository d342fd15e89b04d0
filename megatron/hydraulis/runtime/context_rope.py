"""Attention by the context-parallel group of the micro-batch, not of the model.

Upstream's attention rotates queries and keys of a packed row by the chunks that a rank holds in
``self.pg_collection.cp``, the group that the model was built with, whatever group
``packed_seq_params`` names. A micro-batch that runs in another group would get the positions of
other tokens; its fused kernels would not notice.

`follow_context_groups` hands each attention, before it runs, a collection whose ``cp`` is the
micro-batch's. Both of upstream's ways read it there: the unfused one, and the fused kernel of
Transformer Engine, which takes the group's size and this rank's place. A hook on the built module
reaches a user's own layers as well and needs no patch. A core attention that would take a part of a
row for the row itself is refused there, too.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import Attention

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.process_groups import LocalGroup

MARK = "takes_context_group"
"""Attribute by which a core attention says that it attends over ``packed_seq_params.cp_group``."""


def follow_context_groups(model: torch.nn.Module) -> None:
    """Have every attention of a model take its context-parallel group from each micro-batch.

    Rows without a group, and unpacked ones, are whole: the group is this rank alone.

    Args:
        model: holds upstream's attentions, or subclasses of them; called once when it is built.
    """
    take_group = partial(_take_group, LocalGroup())
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(take_group, with_kwargs=True)


def _take_group(
    alone: LocalGroup, attention: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> None:
    packed_seq_params = named.get("packed_seq_params")
    group = None if packed_seq_params is None else packed_seq_params.cp_group
    if group is None:
        size = None if packed_seq_params is None else packed_seq_params.local_cp_size
        if size not in (None, 1):
            raise ConfigurationError(
                f"a packed row says it is shared by {size} ranks but names no context-parallel "
                "group; set PackedSeqParams.cp_group"
            )
        group = alone
    if group.size() > 1 and not getattr(attention.core_attention, MARK, False):
        raise ConfigurationError(
            f"core attention {type(attention.core_attention).__name__} was given the part of a row "
            f"that {group.size()} ranks share but is not known to attend to the others' parts; use "
            f"strategies without cp, or let it attend over packed_seq_params.cp_group and set "
            f"{MARK} = True on it"
        )
    if attention.pg_collection.cp is not group:
        # A copy: modules of one model share the collection, and the schedule reads it too.
        attention.pg_collection = copy.copy(attention.pg_collection)
        attention.pg_collection.cp = group
