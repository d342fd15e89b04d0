"""What a run tells: one record an iteration, and the file, log fields, table and picture from it.

Nothing here knows how training works; whoever trains fills an `IterationRecord`.
"""

from megatron.hydraulis.observability.console import (
    EtaEstimator,
    closing_table,
    iteration_suffix,
)
from megatron.hydraulis.observability.metrics_writer import (
    METRICS_FILE_NAME,
    MetricsWriter,
    read_metrics,
)
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.summary import SUMMARY_FILE_NAME, write_summary

__all__ = [
    "METRICS_FILE_NAME",
    "SUMMARY_FILE_NAME",
    "EtaEstimator",
    "IterationRecord",
    "MetricsWriter",
    "closing_table",
    "iteration_suffix",
    "read_metrics",
    "write_summary",
]
