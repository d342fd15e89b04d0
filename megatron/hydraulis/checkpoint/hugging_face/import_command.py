"""``python -m megatron.hydraulis import-hf``: a checkpoint from a Hugging Face folder."""

import argparse
from pathlib import Path

from megatron.hydraulis.checkpoint.byte_progress import size_text
from megatron.hydraulis.checkpoint.hugging_face.model import model_flags
from megatron.hydraulis.data.preprocess_command import import_megatron_quietly
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_LINE_WIDTH = 96


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with config.json and safetensors"
    )
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT",
        help="folder without checkpoints, for --load: gets one of parameters alone, 'release'",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        dest="vocab_divisor",
        type=int,
        default=128,
        metavar="N",
        help="the vocabulary is padded to a multiple of it (default: %(default)s, as in training)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Import as the flags say.

    Raises:
        CheckpointError, ConfigurationError: as `import_folder`.
    """
    if namespace.vocab_divisor < 1:
        raise ConfigurationError(
            f"--make-vocab-size-divisible-by is at least 1 but is {namespace.vocab_divisor}; "
            "raise it"
        )
    import_megatron_quietly()
    from megatron.hydraulis.checkpoint.hugging_face.importing import import_folder

    done = import_folder(namespace.folder, namespace.output, vocab_divisor=namespace.vocab_divisor)
    dtype = str(done.dtype).removeprefix("torch.")
    print(
        f"imported {namespace.folder} to {done.path}: {done.model.family}, "
        f"{done.model.num_layers} layers, {done.model.vocab_size} tokens, "
        f"{size_text(done.num_bytes)} of {dtype}"
    )
    print(
        "PARAMETERS ONLY: a run that loads it begins with iteration 1, a new optimizer and the "
        "first sequence"
    )
    flags = model_flags(done.model)
    flags += {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(dtype, [])
    print("flags of such a run:")
    lines = [""]
    for flag in [f"--load {namespace.output}", *flags]:
        if len(lines[-1]) + len(flag) > _LINE_WIDTH:
            lines.append("")
        lines[-1] += f" {flag}"
    print(" \\\n".join(f" {line}" for line in lines))
    return 0
