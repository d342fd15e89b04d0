"""The algebra of ranges, calculated by hand."""

from megatron.hydraulis.transfer.ranges import Range, clip, intersection, num_elements, union

RUN = (Range(0, 4), Range(6, 9))


def test_union_merges_overlapping_adjacent_and_nested_ranges() -> None:
    assert union([RUN, (Range(1, 2), Range(4, 5)), (Range(8, 10),)]) == (Range(0, 5), Range(6, 10))
    assert union([]) == union([(), ()]) == ()


def test_intersection() -> None:
    assert intersection(RUN, (Range(2, 7), Range(8, 20))) == (
        Range(2, 4),
        Range(6, 7),
        Range(8, 9),
    )
    assert intersection(RUN, (Range(4, 6),)) == ()
    assert intersection((Range(0, 9),), (Range(1, 3), Range(3, 5))) == (Range(1, 5),)


def test_clip_cuts_at_both_ends_and_may_be_empty() -> None:
    assert clip(RUN, 3, 7) == (Range(3, 4), Range(6, 7))
    assert clip(RUN, 5, 5) == clip(RUN, 4, 6) == ()


def test_elements_are_counted() -> None:
    assert num_elements(RUN) == 7
