"""The checker's own parser of strategies agrees with the planner's."""

import pytest

from megatron.hydraulis.plan_check.files import Shape, read_shape, read_strategy
from megatron.hydraulis.strategy import Strategy


@pytest.mark.parametrize(
    ("text", "num_ranks", "ranks_per_node"),
    [
        ("tp16+2*tp8pp3", 64, 8),
        ("tp8 pp3 + 10*tp4", 64, 8),
        ("tp4cp2pp2+4*tp2+2*idle", 26, 13),
        ("tp2@0,3+pp2:5,3@1,2", 4, 2),
        ("2*tp2@3,2,0,1+tp3+idle", 8, 4),
        ("3*tp3+tp2cp2+tp1", 14, 7),
        ("cp8~+8*tp1", 16, 8),
        ("2*tp6cp2+4*tp2", 32, 8),
        ("tp2cp4~ep8pp2:1,2 + 4*tp2ep2 + tp4ep2cp2", 32, 8),
        ("tp16+3*tp8+238*tp4+2*tp4pp4", 1024, 8),
    ],
)
def test_same_replicas_on_the_same_ranks(text: str, num_ranks: int, ranks_per_node: int) -> None:
    planner = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    expected = [
        (Shape(s.tp, s.cp, s.pp, s.layers, s.splits_cp, s.ep), list(replica.ranks))
        for replica in planner.replicas
        for s in [replica.scheme]
    ]
    assert read_strategy(text, num_ranks, ranks_per_node) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp4+", "'' in 'tp4[+]' is no term"),
        ("dp4", "is no term of a strategy"),
        ("tp2cp2ep3", "has an ep that does not divide tp times cp"),
        ("tp2", "is for 2 ranks but the job has 4"),
        ("2*tp2@0,1", "names 2 ranks but needs 4"),
        ("tp2@0,0+tp2", "names a rank twice"),
        ("tp4@0,1,2,4", "or one that the job does not have"),
    ],
)
def test_invalid_strategies(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_strategy(text, 4, 4)


@pytest.mark.parametrize("text", ["2*tp4", "idle", "tp2@0,1", "tp2+tp2", ""])
def test_invalid_schemes(text: str) -> None:
    with pytest.raises(ValueError, match="is no scheme"):
        read_shape(text)
