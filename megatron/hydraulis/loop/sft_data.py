"""``--sft``: conversations in JSON lines, with tokens and mask of upstream's ``SFTDataset``.

Where a conversation is cut, one label more is trained than upstream, which puts a pad in its place.
A conversation is a sequence here. Upstream concatenates the conversations of a line, and with a
prompt format that trains every token, the last token of one predicts the first of the next.
"""

import argparse
import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core.datasets.utils import get_blend_from_list

from megatron.hydraulis.data.chat import WeightedTokens
from megatron.hydraulis.data.conversations import weight_of
from megatron.hydraulis.data.dataset import idx_path
from megatron.hydraulis.data.documents import RawDocument, read_documents
from megatron.hydraulis.data.tokenizer import DocumentEncoder, build_tokenizer
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.flags.checks import DATA_PATHS
from megatron.hydraulis.loop.startup import made_by_rank_0

_FOLDER = "sft"


def convert_data(args: argparse.Namespace, run_dir: Path, store: dist.Store | None) -> None:
    """Make datasets of the files that the data flags name, and let the flags name those.

    Rank 0 writes those that are not in the run folder yet.

    Args:
        args: upstream's arguments, changed in place.
        run_dir: the run folder, which all ranks see.
        store: of the job; None if there are no other ranks.

    Raises:
        DataError: on rank 0, a file that cannot be read or converted.
        HydraulisError: rank 0 failed.
    """

    def convert() -> str:
        tokenizer = build_tokenizer(copy.copy(args))
        prefixes = {path: _prefix(path, args, tokenizer, run_dir) for path in _files(args)}
        for path, prefix in prefixes.items():
            if not Path(idx_path(prefix)).exists():
                write_dataset(path, prefix, tokenizer)
        return json.dumps(prefixes)

    text = made_by_rank_0(convert, "--sft", "the data", rank=args.rank, store=store)
    prefixes = json.loads(text)
    for dest in DATA_PATHS:
        blend = getattr(args, dest)
        if blend:
            setattr(args, dest, [prefixes.get(word, word) for word in blend])


def _files(args: argparse.Namespace) -> list[str]:
    blends = (getattr(args, dest) for dest in DATA_PATHS)
    return [file for blend in blends if blend for file in get_blend_from_list(blend)[0]]


def _prefix(path: str, args: argparse.Namespace, tokenizer: Any, run_dir: Path) -> str:
    """The prefix of the dataset made of a file with the tokenizer of the arguments."""
    stat = Path(path).stat()
    # Behind Megatron's two wrappers, which cannot list tokens, is the one of transformers.
    hugging_face = tokenizer._tokenizer._tokenizer
    if hugging_face.is_fast:
        content = hugging_face.backend_tokenizer.to_str()
    else:
        content = sorted(hugging_face.get_vocab().items())
    made_from = (
        *(str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns),
        *(content, hugging_face.special_tokens_map, hugging_face.chat_template),
        args.sft_tokenizer_prompt_format,
    )
    digest = hashlib.sha256(repr(made_from).encode()).hexdigest()[:12]
    return str(run_dir / _FOLDER / f"{Path(path).name.split('.')[0]}-{digest}")


def write_dataset(path: str, prefix: str, tokenizer: Any) -> None:
    """Write the conversations of a file as the dataset ``prefix``.

    Raises:
        DataError: a line that upstream refuses, a file that cannot be read, or nothing in it.
    """
    # Only a job that converts needs the module, which takes a tenth of a second to import.
    from megatron.hydraulis.data.preprocess import DatasetWriter

    documents = DocumentEncoder(tokenizer, append_eod=False)
    num_sequences = num_tokens = num_trained = 0
    with DatasetWriter(prefix, documents.token_type, has_weights=True) as writer:
        for document in read_documents(Path(path), json_key=None):
            for sequence in sequences_of(document, documents):
                writer.add_documents(sequence.tokens, [len(sequence.tokens)], sequence.weights)
                num_sequences += 1
                num_tokens += len(sequence.tokens)
                num_trained += int(sequence.weights.sum())
        if num_sequences == 0:
            raise DataError(
                f"{path}: data of --sft has at least 1 conversation but there are 0; check the file"
            )
        writer.commit()
    print(
        f"--sft: {num_sequences:,} conversations of {path}, {num_tokens:,} tokens, "
        f"{num_trained:,} trained, are now {prefix}.bin",
        flush=True,
    )


def sequences_of(document: RawDocument, documents: DocumentEncoder) -> Iterator[WeightedTokens]:
    """The conversations of a line, by upstream's own tokenizer.

    Raises:
        DataError: a line that upstream refuses.
    """
    from megatron.training.datasets.sft_dataset import IGNORE_INDEX, SFTDataset

    value = document.json()
    turns = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(turns, list):
        raise DataError(
            f"{document.origin}: a line of --sft is an object with a list of turns under "
            f"'messages' but here is {type(turns).__name__}; correct the line, or convert the file "
            f"by hydraulis preprocess --chat"
        )
    for number, turn in enumerate(turns, start=1):
        place = f"{document.origin}: turn {number} of {len(turns)}"
        if isinstance(turn, dict) and "role" in turn and weight_of(turn, place) == 0:
            raise DataError(
                f"{place} has weight 0 or train false but --sft trains what its prompt format "
                f"says; convert the file by hydraulis preprocess --chat, which leaves such answers "
                f"out"
            )
    tokenizer = documents.tokenizer
    try:
        for conversation in SFTDataset._split_conversations(None, turns):
            tokens, targets = tokenizer.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
            is_trained = (targets != tokenizer.pad) & (targets != IGNORE_INDEX)
            is_trained[:1] = False  # nothing predicts the first token
            yield WeightedTokens(
                documents.stored(tokens.tolist(), document.origin), is_trained.astype(np.float32)
            )
    except DataError:
        raise
    except Exception as error:  # assertions, and what templates raise
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"{document.origin}: Megatron's SFT tokenizer refuses the conversation ({reason}); its "
            f"roles are system, user, tool and assistant, and an answer follows user or tool: "
            f"correct the line or --sft-tokenizer-prompt-format"
        ) from error
