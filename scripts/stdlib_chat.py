"""Makes conversations and a model for fine-tuning out of Python's standard library.

A conversation is about a function, or a class and its methods: the questions are names, the answers
their documentation. Nothing is downloaded; the model has random weights. Writes

    DIR/model/                 a small Qwen3 and its tokenizer, with a chat template
    DIR/conversations.jsonl    {"messages": [{"role": …, "content": …}, …]} a line
    DIR/complete.json          what they were made from; a later run that agrees keeps them
"""

import argparse
import ast
import hashlib
import inspect
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.hydraulis.errors import DataError, HydraulisError
from scripts.stdlib_corpus import source_files

RECIPE = 1
"""Raise it when the same files must give other conversations or another model."""
VOCABULARY_SIZE = 2048
MAX_ANSWER_CHARACTERS = 600
START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{%- for message in messages %}"
    f"{{{{- '{START}' + message.role + '\\n' }}}}"
    "{%- if message.role == 'assistant' %}"
    f"{{% generation %}}{{{{- message.content + '{END}' }}}}{{% endgeneration %}}"
    f"{{%- else %}}{{{{- message.content + '{END}' }}}}{{%- endif %}}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    f"{{%- if add_generation_prompt %}}{{{{- '{START}assistant\\n' }}}}{{%- endif %}}"
)
"""ChatML, as Qwen's, with marks around what the assistant writes."""

_MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_SEED = 1234
_EXIT_BAD_INPUT = 2

Turns = list[dict[str, str]]
Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def conversations(files: Sequence[Path], root: Path) -> Iterator[Turns]:
    """Conversations about the public functions and classes of each file, file by file."""
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(file.read_bytes())
        for node in _documented(tree.body):
            turns = _turns(f"What is {module}.{node.name}?", node)
            if isinstance(node, ast.ClassDef):
                for method in _documented(node.body):
                    turns += _turns(f"And what does {method.name} do?", method)
            yield turns


def _documented(body: Sequence[ast.stmt]) -> Iterator[Named]:
    for node in body:
        if isinstance(node, Named) and not node.name.startswith("_") and ast.get_docstring(node):
            yield node


def _turns(question: str, node: Named) -> Turns:
    """A question and the first paragraphs of the documentation, as many as the answer may hold."""
    paragraphs = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")
    answer = " ".join(paragraphs[0].split())[:MAX_ANSWER_CHARACTERS]
    for paragraph in paragraphs[1:]:
        longer = f"{answer}\n\n{paragraph}"
        if len(longer) > MAX_ANSWER_CHARACTERS:
            break
        answer = longer
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write_model(folder: Path, texts: Iterator[str], vocab_size: int) -> None:
    """A Qwen3 with random weights, and a byte-level BPE that is trained on the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END_OF_TEXT, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(_SEED)
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), **_MODEL}
    config = Qwen3Config(eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def build(folder: Path, root: Path, *, vocab_size: int = VOCABULARY_SIZE) -> bool:
    """Make conversations and model unless they are there.

    Returns:
        True if they were made, False if they were kept.

    Raises:
        DataError: no documentation, or the folder cannot be written.
    """
    lines = [json.dumps({"messages": turns}) for turns in conversations(source_files(root), root)]
    if not lines:
        raise DataError(
            f"conversations are made of the documentation in {root} but it has none; install a "
            f"Python that comes with its source"
        )
    text = "\n".join(lines) + "\n"
    made_from: dict[str, Any] = {
        "python": platform.python_version(),
        "recipe": RECIPE,
        "vocabulary_size": vocab_size,
        "conversations": hashlib.sha256(text.encode()).hexdigest(),
    }
    marker = folder / "complete.json"
    if marker.is_file() and json.loads(marker.read_text()) == made_from:
        print(f"{folder} is complete and is kept")
        return False
    print(f"{len(lines):,} conversations about Python {made_from['python']}", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.unlink(missing_ok=True)
        (folder / "conversations.jsonl").write_text(text)
        contents = (turn["content"] for line in lines for turn in json.loads(line)["messages"])
        write_model(folder / "model", contents, vocab_size)
        marker.write_text(json.dumps(made_from, indent=2) + "\n")
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}; choose another --output-dir"
        ) from error
    return True


def answer(folder: Path, question: str) -> str:
    """The answer of the model in a Hugging Face folder, without sampling."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=60, do_sample=False)
    new = output[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="make everything there")
    parser.add_argument("--ask", nargs=2, metavar=("MODEL", "QUESTION"), help="print an answer")
    namespace = parser.parse_args(argv)
    try:
        if namespace.output_dir is not None:
            build(namespace.output_dir.absolute(), Path(sysconfig.get_paths()["stdlib"]))
        if namespace.ask is not None:
            folder, question = namespace.ask
            print(f"question: {question}\nanswer: {answer(Path(folder).absolute(), question)}")
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
