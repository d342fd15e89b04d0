"""The rules for plans, and the exception for a plan that breaks one."""

from enum import Enum

__all__ = ["BrokenRule", "Rule"]


class Rule(Enum):
    """The rules by name, in the order in which they are checked; a plan keeps them if …"""

    PLAN_FORMAT = "plan-format"
    """… every key is there, with numbers where numbers belong."""
    UNKNOWN_STRATEGY = "unknown-strategy"
    """… its strategy is in the pool."""
    REPLICA_COUNT = "replica-count"
    """… it lists every replica of the strategy."""
    REPLICA_SCHEME = "replica-scheme"
    """… each has the strategy's scheme."""
    REPLICA_RANKS = "replica-ranks"
    """… each is on the strategy's ranks."""
    EMPTY_MICRO_BATCH = "empty-micro-batch"
    """… no micro-batch is without sequences, and each has a length per sequence."""
    UNKNOWN_SEQUENCE = "unknown-sequence"
    """… it names only sequences of the batch."""
    REPEATED_SEQUENCE = "repeated-sequence"
    """… it names none twice."""
    SEQUENCE_LENGTH = "sequence-length"
    """… with the lengths of the batch."""
    MISSING_SEQUENCE = "missing-sequence"
    """… it names all of them."""
    CONTEXT_GROUPS = "context-groups"
    """… the groups of a micro-batch cut the cp ranks of a scheme with ``~``, and its sequences,
    into runs: aligned powers of two of cp ranks, for which the profile has a row."""
    TOKEN_LIMIT = "token-limit"
    """… no micro-batch, or group of one, has more tokens than its scheme's limit, with cp > 1
    the padding included."""
    REPLICA_TIME = "replica-time"
    """… a replica's predicted time is that of 1F1B over its micro-batches, in their order; of one
    in groups that of the slowest group."""
    ITERATION_TIME = "iteration-time"
    """… the predicted time is the makespan plus the strategy's overhead."""
    STAGE_OBJECTIVE = "stage-objective"
    """… the objective of dispatch and of packing is the makespan."""
    STAGE_BOUND = "stage-bound"
    """… no bound is above the makespan."""
    STAGE_GAP = "stage-gap"
    """… a gap is (objective - bound) / objective."""


class BrokenRule(Exception):
    """A plan breaks a rule."""

    def __init__(self, rule: Rule, message: str) -> None:
        super().__init__(message)
        self.rule = rule
