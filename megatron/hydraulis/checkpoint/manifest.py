"""``hydraulis.json``: what a checkpoint has besides tensors, and what its files must be.

It is written last, and has its own checksum, so that damage to it does not go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.checkpoint.folder import replace_file
from megatron.hydraulis.errors import CheckpointError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.model_shape import windowed_layers

MANIFEST_NAME = "hydraulis.json"
METADATA_NAME = ".metadata"
"""Torch's file that says which tensor is in which file."""
FORMAT_NAME = "metadata.json"
"""Megatron's file with the name of the format, which it writes last."""
VERSION = 1
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")

MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "normalization",
    "layernorm_epsilon",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "softmax_type",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
"""Megatron's arguments that change the model's tensors or what it computes."""

OFF_BY_DEFAULT = (
    "activation_func_clamp_value",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "experimental_attention_variant",
    "glu_linear_offset",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_layer_pattern",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "moe_router_enable_expert_bias",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "qk_l2_norm",
    "quick_geglu",
    "softmax_scale",
    "squared_relu",
    "use_mup",
    "window_attn_skip_freq",
    "window_size",
)
"""Arguments that change what the model computes unless they are false, empty or absent. Some have
no flag of this program, but runs of plain Megatron may have them."""

EXPERT_ARGUMENTS = (
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_dtype",
    "moe_router_group_topk",
    "moe_router_num_groups",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_topk_scaling_factor",
    "moe_shared_expert_gate",
    "moe_shared_expert_intermediate_size",
)
"""Further `MODEL_ARGUMENTS` of a model with experts."""

LATENT_ARGUMENTS = (
    "kv_lora_rank",
    "mscale",
    "mscale_all_dim",
    "q_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "v_head_dim",
)
"""Further `MODEL_ARGUMENTS` of a model with latent attention."""

RECURRENT_ARGUMENTS = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
)
"""Further `MODEL_ARGUMENTS` of a model with gated delta nets."""

_OF_YARN = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "yarn_original_max_position_embeddings": 4096,
}
"""What Megatron takes for those that are None."""
YARN_ARGUMENTS = ("mscale", "mscale_all_dim", "rotary_scaling_factor", *_OF_YARN)
"""Further `MODEL_ARGUMENTS` of a model whose positions are stretched by YaRN, latents aside."""

ADAPTER_ARGUMENTS = ("lora_alpha", "lora_rank", "lora_targets")
"""Further `MODEL_ARGUMENTS` of a model with adapters."""

MODEL_SETTINGS = frozenset(
    ("group_query_attention", *MODEL_ARGUMENTS, *OFF_BY_DEFAULT, *EXPERT_ARGUMENTS)
).union(LATENT_ARGUMENTS, RECURRENT_ARGUMENTS, YARN_ARGUMENTS, ADAPTER_ARGUMENTS)
"""All these arguments. `model_differences` compares those that have an effect."""

_EARLIER_NAMES = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
}
"""Name in earlier versions of Megatron -> name today."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum that a file must have."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it is. Raises OSError."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(file.tell(), digest.hexdigest())

    def problem(self, path: Path, *, checks_content: bool) -> str | None:
        """Says what is wrong with the file; None if nothing is."""
        try:
            size = path.stat().st_size
            if size != self.num_bytes:
                return f"{path.name} has {size} bytes instead of {self.num_bytes}"
            if checks_content and FileRecord.of(path) != self:
                return f"{path.name} is damaged: its SHA-256 is not that of what was written"
        except FileNotFoundError:
            return f"{path.name} is missing"
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror}"
        return None


@dataclass(frozen=True)
class Manifest:
    """The description of a complete checkpoint."""

    iteration: int
    num_ranks: int
    """Number of ranks that wrote it."""
    model: Mapping[str, Any]
    """Result of `model_of`, and the vocabulary: a run that loads it must have the same."""
    state: Mapping[str, Any]
    """State of the run: counters, sampler, planner."""
    configuration: Mapping[str, Any]
    """Settings of the run that wrote it, for people."""
    files: Mapping[str, FileRecord]

    @property
    def num_bytes(self) -> int:
        """Size of all files but the manifest itself."""
        return sum(record.num_bytes for record in self.files.values())

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "version": VERSION,
            "iteration": self.iteration,
            "num_ranks": self.num_ranks,
            "model": dict(self.model),
            "state": dict(self.state),
            "configuration": dict(self.configuration),
            "files": {
                name: {"bytes": record.num_bytes, "sha256": record.sha256}
                for name, record in sorted(self.files.items())
            },
        }
        return content | {"sha256": _digest(content)}

    def write(self, folder: Path) -> None:
        """Write it into the folder, completely or not at all. Raises OSError."""
        text = json.dumps(self.to_json(), indent=1) + "\n"
        replace_file(folder / MANIFEST_NAME, folder / f".{MANIFEST_NAME}", text)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint. Raises CheckpointError, FileNotFoundError."""
        path = folder / MANIFEST_NAME
        try:
            raw = read_json(path, "manifest", CheckpointError)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise error.__cause__ from None
            raise
        content = JsonObject(raw, str(path), CheckpointError)
        content.check_version(VERSION)
        rest = {key: content.value(key) for key in content.keys if key != "sha256"}
        if content.text("sha256") != _digest(rest):
            raise CheckpointError(
                f"{path}: its own SHA-256 does not match its content, so it is damaged; load "
                "another checkpoint"
            )
        files = content.nested(content.value("files"), f"{path}, files")
        return cls(
            iteration=content.integer("iteration"),
            num_ranks=content.integer("num_ranks"),
            model=_mapping(content, "model"),
            state=_mapping(content, "state"),
            configuration=_mapping(content, "configuration"),
            files={
                name: _record(files.nested(files.value(name), f"{path}, file {name}"), name)
                for name in files.keys
            },
        )

    def problems(
        self,
        folder: Path,
        *,
        share: int = 0,
        num_shares: int = 1,
        checks_content: bool = True,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> list[str]:
        """Returns what is wrong with the files.

        Args:
            share: which of ``num_shares`` parts of the files to check.
            num_shares: number of callers that share the work.
            checks_content: compare checksums as well as sizes.
            advance: called with the size of each file that was checked.
        """
        largest_first = sorted(self.files, key=lambda name: (-self.files[name].num_bytes, name))
        problems = []
        for name in largest_first[share::num_shares]:
            problem = self.files[name].problem(folder / name, checks_content=checks_content)
            if problem is not None:
                problems.append(problem)
            advance(self.files[name].num_bytes)
        return problems


def is_checkpoint(folder: Path) -> bool:
    """True if a folder is a checkpoint of this program or, in the same format, of Megatron."""
    return (folder / MANIFEST_NAME).is_file() or (folder / FORMAT_NAME).is_file()


def records_of(
    folder: Path, known: Mapping[str, FileRecord] | None = None
) -> dict[str, FileRecord]:
    """Records of all files that a manifest lists. Raises OSError.

    Args:
        known: records of files that need not be read again.
    """
    records = dict(known or {})
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != MANIFEST_NAME and path.name not in records:
            records[path.name] = FileRecord.of(path)
    return records


def known_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Megatron, earlier versions of it included, by their names today."""
    given = dict(arguments)
    for earlier, name in _EARLIER_NAMES.items():
        if earlier in given:
            given.setdefault(name, given[earlier])
    return given


def model_of(args: Any, vocab_size: int | None = None) -> dict[str, Any]:
    """The arguments of Megatron that make the model; of `OFF_BY_DEFAULT` those that are on.

    vocab_size: tokens that exist, in place of the argument, which may be a default.
    """
    given = known_settings(vars(args))
    names = [
        *MODEL_ARGUMENTS,
        *(EXPERT_ARGUMENTS if given.get("num_experts") else ()),
        *(LATENT_ARGUMENTS if given.get("multi_latent_attention") else ()),
        *(RECURRENT_ARGUMENTS if given.get("hybrid_layer_pattern") else ()),
        *(YARN_ARGUMENTS if given.get("position_embedding_type") == "yarn" else ()),
        *(ADAPTER_ARGUMENTS if given.get("lora_rank") else ()),
    ]
    model = {name: given[name] for name in names if name in given}
    if not given.get("group_query_attention", True):
        model["num_query_groups"] = given["num_attention_heads"]
    if not model.get("use_rope_scaling", True):
        model.pop("rope_scaling_factor", None)  # without effect
    if vocab_size is not None:
        model["vocab_size"] = vocab_size
    on = {name: given[name] for name in OFF_BY_DEFAULT if given.get(name)}
    # As JSON returns them.
    return model | {n: list(v) if isinstance(v, tuple) else v for n, v in on.items()}


def model_differences(
    saved: Mapping[str, Any], here: Mapping[str, Any], *, of: Collection[str] = OFF_BY_DEFAULT
) -> list[str]:
    """List the differences of two models, as `model_of` returns them, possibly with more entries.

    An entry that only one of them has is no difference, since a checkpoint of another program may
    have fewer, unless it is one of `OFF_BY_DEFAULT`. Those that are on here only are differences if
    ``of`` holds them: the settings that the checkpoint knows, in one of this program all.
    """
    saved, here = _with_defaults(saved), _with_defaults(here)
    differences = [
        f"{name} is {saved[name]} there and {value} here"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]
    return differences + [
        f"{name} is {saved.get(name, 'off')} there and {here.get(name, 'off')} here"
        for name in OFF_BY_DEFAULT
        if (name in saved) != (name in here) and (name in saved or name in of)
    ]


def _with_defaults(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model in one of several forms that say the same: YaRN's settings without None, windows by
    layer instead of a period, and layers without stages."""
    found = dict(model)
    if found.get("position_embedding_type") == "yarn":
        found |= {name: each for name, each in _OF_YARN.items() if found.get(name) is None}
    if "hybrid_layer_pattern" in found:  # in Megatron with the borders of stages
        found["hybrid_layer_pattern"] = found["hybrid_layer_pattern"].replace("|", "")
        found.pop("moe_layer_freq", None)  # the pattern says it
    frequency = found.get("window_attn_skip_freq")
    if isinstance(frequency, int) and frequency:
        found["window_attn_skip_freq"] = list(windowed_layers(found["num_layers"], frequency))
    return found


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _mapping(content: JsonObject, key: str) -> dict[str, Any]:
    value = content.value(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{content.what}: {key} must be an object; load another checkpoint")
    return value


def _record(content: JsonObject, name: str) -> FileRecord:
    record = FileRecord(content.integer("bytes"), content.text("sha256"))
    if not _HEX_SHA256.fullmatch(record.sha256) or Path(name).name != name:
        raise CheckpointError(
            f"{content.what}: a file has a plain name and a SHA-256 of 64 hex digits; load another "
            "checkpoint"
        )
    return record
