"""The resolved configuration as data, for ``RUN_DIR/config.json``, and as text for --dry-run."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.hydraulis.cost_model.device import communicators_text
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.staging import num_communicators
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.defaults import Difference
from megatron.hydraulis.flags.samples import num_iterations, sample_tokens
from megatron.hydraulis.model_shape import ModelShape, layers_with_experts
from megatron.hydraulis.observability.console import model_text
from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from megatron.hydraulis.strategy.notation import ranks_text

_JSON_SCALARS = (str, int, float, bool, type(None))


def num_parameters_of_rank(
    args: argparse.Namespace, shape: ModelShape, replica: Replica, rank: int
) -> int:
    """Parameters of megatron-core's GPTModel that a rank holds in a replica.

    Counts the layers of upstream's own spec: a layer spec of the user may hold more or fewer.
    Raises ValueError for a rank outside the replica.
    """
    position = replica.position_of(rank)
    if position is None:
        raise ValueError(f"rank {rank} is not in the replica on ranks {replica.ranks}")
    tp, last_stage = replica.scheme.tp, replica.scheme.pp - 1
    is_first, is_last = position.stage == 0, position.stage == last_stage
    layers = replica.scheme.layers_per_stage(shape.num_layers)
    first_layer, num_layers = sum(layers[: position.stage]), layers[position.stage]
    num_per_norm_channel = 2 if args.normalization == "LayerNorm" else 1  # weight, bias

    num_parameters = num_layers * _num_layer_parameters(args, shape, tp, num_per_norm_channel)
    num_with_experts = 0
    if shape.num_experts:
        have_experts = layers_with_experts(shape.num_layers, args.moe_layer_freq)
        num_with_experts = sum(have_experts[first_layer : first_layer + num_layers])
    num_parameters += (num_layers - num_with_experts) * _num_mlp_parameters(args, shape, tp)
    num_parameters += num_with_experts * _num_expert_parameters(args, shape, replica.scheme)
    num_embedding = shape.num_embedding_parameters // tp
    if is_first:
        num_parameters += num_embedding
        if args.position_embedding_type == "learned_absolute":
            num_parameters += args.max_position_embeddings * shape.hidden_size
    if is_last:
        num_parameters += num_per_norm_channel * shape.hidden_size
        if not (is_first and shape.tied_embeddings):
            num_parameters += num_embedding
        if shape.num_predictions:
            num_parameters += num_embedding * (not is_first and not shape.tied_embeddings)
            of_layer = _num_layer_parameters(args, shape, tp, num_per_norm_channel)
            if shape.num_experts and have_experts[-1]:
                of_layer += _num_expert_parameters(args, shape, replica.scheme)
            else:
                of_layer += _num_mlp_parameters(args, shape, tp)
            of_layer += 3 * num_per_norm_channel * shape.hidden_size
            num_parameters += shape.num_predictions * (of_layer + 2 * shape.hidden_size**2 // tp)
    return num_parameters


def _num_layer_parameters(
    args: argparse.Namespace, shape: ModelShape, tp: int, num_per_norm_channel: int
) -> int:
    """Parameters of a layer without the matrices of its MLP, and without experts."""
    num_whole = shape.num_whole_attention_entries
    num = num_whole + (shape.num_attention_entries - num_whole) // tp
    num += 2 * num_per_norm_channel * shape.hidden_size
    if args.softmax_type == "learnable":
        num += shape.num_attention_heads // tp
    if args.qk_layernorm:
        latents = shape.q_lora_rank + shape.kv_lora_rank
        num += num_per_norm_channel * (latents or 2 * shape.kv_channels)
    if args.add_qkv_bias and not shape.kv_lora_rank:
        num += (shape.qkv_size + shape.output_gate * shape.query_size) // tp
    if args.add_bias_linear:
        num += shape.hidden_size  # of the projection, on every tp rank
    return num


def _num_mlp_parameters(args: argparse.Namespace, shape: ModelShape, tp: int) -> int:
    return shape.num_mlp_entries // tp + _num_biases(args, shape, shape.ffn_hidden_size, tp)


def _num_biases(args: argparse.Namespace, shape: ModelShape, width: int, tp: int) -> int:
    """Biases of an MLP or an expert; those of the last layer are on every tp rank."""
    if not args.add_bias_linear:
        return 0
    return (2 if shape.gated_mlp else 1) * width // tp + shape.hidden_size


def _num_expert_parameters(args: argparse.Namespace, shape: ModelShape, scheme: Scheme) -> int:
    """Experts of a layer and their router, all of which is on every tp rank."""
    num_router = shape.num_router_entries
    num_gate = shape.hidden_size if args.moe_shared_expert_gate else 0
    num_routed = shape.num_routed_entries
    num_shared = shape.num_expert_entries - num_router - num_routed
    tp = scheme.tp if scheme.ep == 1 else 1
    num_biases = _num_biases(args, shape, shape.expert_ffn_hidden_size, tp)
    if args.add_bias_linear:
        num_router += shape.num_experts
    held = num_routed // tp + shape.num_experts * num_biases
    return held // scheme.ep + num_shared // scheme.tp + num_router + num_gate


def describe(
    resolved: Resolved,
    strategies: Sequence[Strategy],
    limits: Limits,
    *,
    cost_model: str,
    left_out: Sequence[str],
) -> dict[str, Any]:
    """Strategies, replicas with their ranks, parameters and limits, model and all flags, for JSON.

    strategies: those that the run uses; cost_model: where its costs come from, in a few words;
    left_out: one line for each strategy of the pool file that the run skips.
    """
    pool, shape = resolved.pool, resolved.shape
    arguments = {
        key: _to_json(value)
        for key, value in sorted({**vars(resolved.args), **resolved.as_given}.items())
        # Without the rank: this describes the job.
        if not key.startswith("_") and key != "rank"
    }
    return {
        "num_ranks": pool.num_ranks,
        "ranks_per_node": pool.ranks_per_node,
        "cost_model": cost_model,
        "row_quantum_tokens": limits.row_quantum,
        "most_communicators_of_a_rank": num_communicators(pool),
        "strategies": [_describe_strategy(resolved, strategy, limits) for strategy in strategies],
        "pool_changes": list(resolved.pool_changes),
        "left_out": list(left_out),
        "model": dataclasses.asdict(shape)
        | {
            "num_parameters": num_parameters_of(resolved),
            "vocab_size_unpadded": resolved.vocabulary.size,
        },
        "hydraulis": {
            key: _to_json(value) for key, value in dataclasses.asdict(resolved.hydraulis).items()
        }
        | {"sequence_parallel": resolved.hydraulis.sequence_parallel},
        **option_texts(resolved.taken, resolved.unknown, resolved.differences),
        "batch_sizes": {
            "unit": resolved.sizes.unit,
            "steps": [list(step) for step in resolved.sizes.steps],
        },
        "explicit_options": sorted(resolved.explicit),
        "given": list(resolved.given),
        "settings": {key: value for key, value in arguments.items() if key in resolved.settings},
        "upstream_defaults": {
            key: value for key, value in arguments.items() if key not in resolved.settings
        },
    }


def option_texts(
    taken: Sequence[tuple[str, str]],
    unknown: Sequence[tuple[str, str]],
    differences: Sequence[Difference],
) -> dict[str, list[str]]:
    """A line for each option that is not honoured as given, and each default that differs."""
    return {
        "taken": [": ".join(line) for line in taken],
        "unknown": [
            f"{typed}: left out, which may change the model"
            + (f" (Megatron has {equivalent})" if equivalent else "")
            for typed, equivalent in unknown
        ],
        "warnings": [str(each) for each in differences if each.warns],
        "differences": [str(each) for each in differences if not each.warns],
    }


def length_text(resolved: Resolved, mean_length: float) -> str:
    """Length of training by samples or in growing batches, here and in Megatron; else empty.

    mean_length: of the corpus's sequences (tokens).
    """
    args, sizes = resolved.args, resolved.sizes
    if args.train_samples is None and len(sizes.steps) == 1:
        return ""
    if args.train_samples is None:
        num_consumed = sizes.num_consumed_by(args.train_iters)
        samples = num_consumed // sample_tokens(args, sizes)
        return (
            f"{args.train_iters:,} iterations, {'at most ' if sizes.in_tokens else ''}"
            f"{num_consumed:,} {sizes.unit}; the learning rate goes by iterations, and by samples "
            f"with --train-samples {samples}"
        )
    num_samples, num_tokens = args.train_samples, args.train_samples * args.seq_length
    iterations = f"{num_iterations(args, sizes):,} iterations"
    if sizes.in_tokens:
        return (
            f"{num_tokens:,} tokens, the {num_samples:,} samples of Megatron, in at least "
            f"{iterations}"
        )
    return (
        f"{num_samples:,} sequences, about {num_samples * mean_length:,.0f} tokens, in "
        f"{iterations}; Megatron's samples are {num_tokens:,} tokens, which --global-batch-tokens "
        "counts here"
    )


def block_lines(name: str, what: str, lines: Sequence[str]) -> list[str]:
    """A heading and the lines below it; nothing if there are none."""
    return [f"{name:<12} {what}", *(f"  {line}" for line in lines)] if lines else []


def option_lines(description: dict[str, Any]) -> list[str]:
    """Lists options that are not honoured as given, in blocks with an option per line.

    description: of `option_texts`, or more.
    """
    return [
        *block_lines(
            "warning", "Megatron trains otherwise with these options", description["warnings"]
        ),
        *block_lines("unknown", "options that Megatron does not know", description["unknown"]),
        *block_lines("differs", "from Megatron with the same options", description["differences"]),
        *block_lines(
            "taken", "options without effect here, or with the same effect", description["taken"]
        ),
    ]


def _describe_strategy(resolved: Resolved, strategy: Strategy, limits: Limits) -> dict[str, Any]:
    return {
        "name": strategy.name,
        "strategy": str(strategy),
        "overhead_ms": limits.cost_model.overhead_ms(strategy),
        "idle_ranks": list(strategy.idle_ranks),
        "replicas": [
            _describe_replica(resolved, replica)
            | {"max_tokens_per_micro_batch": limits.max_tokens(strategy, replica.scheme)}
            for replica in strategy.replicas
        ],
    }


def num_parameters_of(resolved: Resolved) -> int:
    """Parameters of the model: those of a replica of one rank."""
    replica = Replica(Scheme(), (0,))
    return num_parameters_of_rank(resolved.args, resolved.shape, replica, 0)


def _describe_replica(resolved: Resolved, replica: Replica) -> dict[str, Any]:
    scheme, num_experts = replica.scheme, resolved.shape.num_experts
    return {
        "scheme": str(scheme),
        "ranks": list(replica.ranks),
        "layers_per_stage": list(scheme.layers_per_stage(resolved.shape.num_layers)),
        "num_parameters_per_rank": {
            str(rank): num_parameters_of_rank(resolved.args, resolved.shape, replica, rank)
            for rank in replica.ranks
        },
        **({"experts_per_rank": _experts_text(scheme, num_experts)} if num_experts else {}),
    }


def _experts_text(scheme: Scheme, num_experts: int) -> str:
    if scheme.ep == 1:
        return f"1/{scheme.tp} of each" if scheme.tp > 1 else "all"
    return f"{scheme.experts_per_rank(num_experts)} of {num_experts}"


def _to_json(value: object) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    return value if isinstance(value, _JSON_SCALARS) else str(value)


def format_description(description: dict[str, Any]) -> str:
    """The description as text: a table per strategy, what differs, the model, what was given."""
    hydraulis = description["hydraulis"]
    lines = [f"ranks        {description['num_ranks']} ({description['ranks_per_node']} a node)"]
    for strategy in description["strategies"]:
        lines += _strategy_lines(strategy)
    warnings = (*description["pool_changes"], *description["left_out"])
    lines += [f"warning      {line}" for line in warnings]
    precision = "bf16" if "--bf16" in description["explicit_options"] else "fp32, as no --bf16"
    lines += [
        f"cost model   {description['cost_model']}",
        f"precision    {precision}",
        f"layers       --transformer-impl {description['settings']['transformer_impl']}",
        f"groups       {communicators_text(description['most_communicators_of_a_rank'])}",
        *option_lines(description),
        f"model        {model_text(description['model'])}",
        f"run folder   {hydraulis['run_dir']}",
        *block_lines(
            "settings",
            "as given; config.json in the folder of a run lists all",
            description["given"],
        ),
    ]
    return "\n".join(lines)


def _strategy_lines(strategy: dict[str, Any]) -> list[str]:
    """One line for the strategy, then a table with one row per stage of its replicas."""
    name, text = strategy["name"], strategy["strategy"]
    idle = ranks_text(strategy["idle_ranks"]) or "none"
    has_experts = any("experts_per_rank" in replica for replica in strategy["replicas"])
    of_stage = ("stage", "ranks", "layers", "parameters a rank")
    experts = "experts a rank" if has_experts else ""
    rows = [("replica", "scheme", *of_stage, "most tokens", experts)]
    for index, replica in enumerate(strategy["replicas"]):
        num_layers_of_stages = replica["layers_per_stage"]
        width = len(replica["ranks"]) // len(num_layers_of_stages)
        for stage, num_layers in enumerate(num_layers_of_stages):
            ranks = replica["ranks"][stage * width : (stage + 1) * width]
            num_parameters = replica["num_parameters_per_rank"][str(ranks[0])]
            of_stage = (str(stage), ranks_text(ranks), str(num_layers), f"{num_parameters:,}")
            index_shown, scheme_shown, limit_shown, experts = (
                str(index),
                replica["scheme"],
                f"{replica['max_tokens_per_micro_batch']:,}",
                replica.get("experts_per_rank", ""),
            )
            if stage:
                index_shown = scheme_shown = limit_shown = experts = ""
            rows.append((index_shown, scheme_shown, *of_stage, limit_shown, experts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = text if name == text else f"{name} = {text}"
    return [
        f"strategy     {shown}, idle: {idle}",
        *(
            "  "
            + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ),
        f"  regrouping and optimizer {strategy['overhead_ms']:.1f} ms an iteration, predicted",
    ]
