"""Fixed-length training as the layout model sees it: the work of a step, and how it is laid out."""

from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

__all__ = ["FixedLengthJob", "Layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLengthJob:
    """The same number of sequences of one length in every step.

    Raises ConfigurationError for a size that is not positive.
    """

    shape: ModelShape
    num_ranks: int
    sequence_tokens: int
    """Tokens of every sequence."""
    num_sequences: int
    """Sequences of a step: the global batch."""
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        sizes = {
            "ranks": self.num_ranks,
            "tokens a sequence": self.sequence_tokens,
            "sequences a step": self.num_sequences,
            "ranks a node": self.ranks_per_node,
        }
        for what, value in sizes.items():
            if value < 1:
                raise ConfigurationError(
                    f"job: needs at least 1 of {what} but has {value}; give a positive number"
                )

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step that MFU counts, forward and backward.

        6 a parameter and token, embedding included, and 12·layers·q·s a token for attention, not
        halved for being causal (arXiv 2204.02311, appendix B); recomputation does not count.
        """
        shape = self.shape
        num_ends = 1 if shape.tied_embeddings else 2
        num_entries = (
            shape.num_layers * shape.num_matrix_parameters_per_layer
            + num_ends * shape.num_embedding_parameters
        )
        attention = 12 * shape.num_layers * shape.query_size * self.sequence_tokens
        return self.num_sequences * self.sequence_tokens * (6.0 * num_entries + attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is spread over ranks and micro-batches.

    Raises ConfigurationError for sizes below 1.
    """

    micro_batch_size: int
    """Sequences of a micro-batch."""
    tp: int
    pp: int
    kernel: str
    """Name of the attention and norm kernels, see layout_constants."""
    sequence_parallel: bool = False
    recomputes_layers: bool = False
    """Whether every layer keeps its input alone and runs its forward again in the backward."""

    def __post_init__(self) -> None:
        for name, value in (
            ("the micro-batch size", self.micro_batch_size),
            ("tp", self.tp),
            ("pp", self.pp),
        ):
            if value < 1:
                raise ConfigurationError(
                    f"layout: every size is at least 1 but {name} is {value}; give a positive one"
                )

    @property
    def scheme(self) -> Scheme:
        """The shape of one replica."""
        return Scheme(tp=self.tp, pp=self.pp)

    def dp(self, job: FixedLengthJob) -> int:
        """Replicas of the job; ConfigurationError where they do not use all ranks."""
        dp, rest = divmod(job.num_ranks, self.tp * self.pp)
        if rest or dp == 0:
            raise ConfigurationError(
                f"layout tp {self.tp}, pp {self.pp}: replicas of {self.tp * self.pp} ranks must "
                f"use all ranks but the job has {job.num_ranks}; take degrees whose product "
                f"divides {job.num_ranks}"
            )
        return dp

    def num_micro_batches(self, job: FixedLengthJob) -> int:
        """Micro-batches of a replica in a step, the last one perhaps not full."""
        return -(-job.num_sequences // (self.micro_batch_size * self.dp(job)))

    def num_shares_of_hidden(self) -> int:
        """Over how many ranks a hidden state is spread between matrix products."""
        return self.tp if self.sequence_parallel else 1
