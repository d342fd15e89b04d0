"""Two recorders in the place of one."""

from megatron.hydraulis.runtime.span_pair import told
from megatron.hydraulis.runtime.spans import COMPUTE, HOST, NO_SPANS, MemoryRecorder


def test_both_are_told_of_what_each_keeps() -> None:
    first, second = MemoryRecorder(), MemoryRecorder()
    first.tracks, second.tracks = frozenset({COMPUTE}), frozenset({HOST})
    both = told(first, second)
    outer = both.begin("forward", micro_batch=1)
    inner = both.begin("gather wait")
    both.end(inner)
    both.end(outer)
    assert [span.name for span in first.take()] == ["forward"]
    assert [span.name for span in second.take()] == ["gather wait"]


def test_one_stays_itself_and_none_costs_nothing() -> None:
    recorder = MemoryRecorder()
    assert told(recorder) is recorder
    assert told() is NO_SPANS
