"""A valid record, with whatever a test wants to be different."""

from typing import Any

from megatron.hydraulis.observability import IterationRecord


def make_record(iteration: int = 1, **changes: Any) -> IterationRecord:
    values: dict[str, Any] = {
        "iteration": iteration,
        "lm_loss": 9.0 - iteration / 8,
        "grad_norm": 1.5,
        "learning_rate": 1e-3,
        "num_sequences": 16,
        "num_tokens": 24_310,
        "strategy": "tp2+2*tp1",
        "iteration_time_s": 1.25,
        "predicted_time_s": 1.0,
        "padding_fraction": 0.004,
        "imbalance": 1.07,
        "consumed_samples": 16 * iteration,
        "plan_time_s": 0.0012,
        "plan_wait_s": 0.0001,
        "plan_fetch_s": 0.0004,
        "replica_times_s": (1.0, 0.75, 0.5),
        "plan_status": "certified",
        "plan_gap": 0.0005,
        "num_marked_plans": 0,
    }
    return IterationRecord(**(values | changes))
