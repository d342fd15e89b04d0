"""``python -m megatron.hydraulis export-hf``: a checkpoint as a Hugging Face folder."""

import argparse
from pathlib import Path

from megatron.hydraulis.checkpoint.byte_progress import size_text
from megatron.hydraulis.data.preprocess_command import import_megatron_quietly
from megatron.hydraulis.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_BYTES_PER_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of a checkpoint (iter_…, torch_dist), of this program or of plain Megatron, "
        "or what --save named, of which the latest is taken",
    )
    parser.add_argument(
        "output", type=Path, metavar="DIR", help="new folder: config.json and safetensors"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="tokens of the vocabulary without padding (default: as the checkpoint says)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder, such as the imported one, whose tokenizer is taken: its files "
        "and the ids of special tokens (default: none)",
    )
    parser.add_argument(
        "--max-file-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="tensors in one file at most (default: %(default)g)",
    )
    parser.add_argument(
        "--no-checksums",
        dest="checks_content",
        action="store_false",
        help="check only the sizes of the checkpoint's files, not their content, which with the "
        "optimizer's state is much more than what is exported",
    )


def run(namespace: argparse.Namespace) -> int:
    """Export as the flags say.

    Raises:
        CheckpointError, ConfigurationError: as `export_checkpoint`.
    """
    limit_gb: float = namespace.max_file_gb
    if not limit_gb > 0:
        raise ConfigurationError(
            f"--max-file-gb must be more than 0 but is {limit_gb:g}; give a larger one"
        )
    import_megatron_quietly()
    from megatron.hydraulis.checkpoint.hugging_face.exporting import export_checkpoint

    done = export_checkpoint(
        namespace.checkpoint,
        namespace.output,
        vocab_size=namespace.vocab_size,
        max_file_bytes=int(min(limit_gb * _BYTES_PER_GB, 2**62)),
        checks_content=namespace.checks_content,
        like=namespace.like,
    )
    print(
        f"exported {done.source} to {namespace.output}: {done.model.family}, "
        f"{done.model.num_layers} layers, {done.model.vocab_size} tokens, "
        f"{size_text(done.num_bytes)} of {str(done.dtype).removeprefix('torch.')}"
    )
    if namespace.like is None:
        print("put the tokenizer's files beside it: a checkpoint does not have them (--like)")
    return 0
