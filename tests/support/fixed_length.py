"""Llamas and layouts for tests of the layout model."""

from benchmarks.inputs import llama_shape
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.layouts import (
    FixedLengthJob,
    Layout,
    LayoutPrediction,
    predict_layout,
)
from megatron.hydraulis.model_shape import ModelShape

A100 = device_constants("a100-80g")
TOKENS_PER_STEP = 2**22
# Layers, hidden size, MLP width of the Llamas (arXiv 2302.13971).
LLAMAS = {"13B": (40, 5120, 13824), "30B": (60, 6656, 17920), "65B": (80, 8192, 22016)}


def llama(name: str) -> ModelShape:
    """A Llama with 128,000 entries and two embeddings."""
    num_layers, hidden, ffn = LLAMAS[name]
    return llama_shape(
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=hidden // 128,
        num_query_groups=hidden // 128,
        vocab_size=128_000,
    )


def job(name: str = "13B", num_ranks: int = 64, sequence_tokens: int = 2048) -> FixedLengthJob:
    """4 Mi tokens a step."""
    return FixedLengthJob(
        shape=llama(name),
        num_ranks=num_ranks,
        sequence_tokens=sequence_tokens,
        num_sequences=TOKENS_PER_STEP // sequence_tokens,
    )


def layout(
    micro_batch_size: int = 1,
    tp: int = 1,
    pp: int = 1,
    *,
    ep: int = 1,
    sequence_parallel: bool = False,
    recomputes_layers: bool = False,
) -> Layout:
    """A layout."""
    return Layout(
        micro_batch_size=micro_batch_size,
        tp=tp,
        pp=pp,
        ep=ep,
        sequence_parallel=sequence_parallel,
        recomputes_layers=recomputes_layers,
    )


def predict(of: FixedLengthJob, how: Layout) -> LayoutPrediction:
    """Predicts the step of a layout on A100."""
    return predict_layout(of, how, A100)
