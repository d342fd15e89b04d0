"""Schemes, positions and replicas."""

import pytest

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.strategy import Position, Replica, Scheme


def test_layers_split_evenly_with_the_longer_stages_first() -> None:
    assert Scheme(pp=3).layers_per_stage(8) == (3, 3, 2)
    assert Scheme(pp=4).layers_per_stage(8) == (2, 2, 2, 2)
    assert Scheme(pp=2, layers=(5, 3)).layers_per_stage(8) == (5, 3)


@pytest.mark.parametrize(
    ("scheme", "num_layers", "message"),
    [
        (Scheme(pp=2, layers=(5, 3)), 9, "pp2:5,3 places 8 layers but the model has 9"),
        (Scheme(pp=4), 3, "4 stages but the model has 3 layers; use at most pp3"),
    ],
)
def test_layers_that_do_not_fit_the_model(scheme: Scheme, num_layers: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        scheme.layers_per_stage(num_layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"pp": -1}, "pp is -1"),
        ({"pp": 2, "layers": (3,)}, "for 1 stages but has 2"),
        ({"pp": 2, "layers": (3, 0)}, "gives a stage 0 layers"),
        ({"cp": 6, "splits_cp": True}, "power of two .* cp is 6"),
        ({"splits_cp": True}, "power of two .* cp is 1"),
        ({"ep": 0}, "ep is 0"),
        ({"fs": 0}, "fs is 0"),
        ({"cp": 4, "fs": 4, "pp": 2}, "cp4fspp2 has fs and pp 2; drop the fs or the pp"),
        ({"cp": 8, "fs": 4}, "cp8fs4 has fs 4 and cp 8; use cp8fs,"),
    ],
)
def test_impossible_schemes(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Scheme(**arguments)  # type: ignore[arg-type]


def test_ranks_run_stage_by_stage_then_cp_by_cp_then_tp_by_tp() -> None:
    replica = Replica(Scheme(tp=2, cp=2, pp=2), (10, 11, 12, 13, 24, 25, 26, 27))
    assert replica.rank_at(1, 0, 1) == 25
    assert replica.tp_ranks(0, 1) == (12, 13)
    assert replica.cp_ranks(0, 1) == (11, 13)
    assert replica.pp_ranks(1, 0) == (12, 26)
    assert replica.position_of(26) == Position(stage=1, cp=1, tp=0)
    assert replica.position_of(14) is None


def test_position_and_rank_are_inverse() -> None:
    replica = Replica(Scheme(tp=2, cp=3, pp=2), tuple(range(20, 8, -1)))
    for rank in replica.ranks:
        position = replica.position_of(rank)
        assert position is not None
        assert replica.rank_at(position.stage, position.cp, position.tp) == rank


def test_ep_ranks_are_consecutive_in_a_stage() -> None:
    ranks = tuple(range(10, 18))
    narrow, wide = (Replica(Scheme(tp=2, cp=2, pp=2, ep=ep), ranks) for ep in (2, 4))
    assert narrow.ep_ranks(0, 1, 0) == narrow.ep_ranks(0, 1, 1) == (12, 13)
    assert wide.ep_ranks(1, 0, 1) == wide.ep_ranks(1, 1, 0) == (14, 15, 16, 17)


def test_ep_belongs_to_a_scheme_and_its_context_groups() -> None:
    scheme = Scheme(tp=2, cp=4, pp=2, splits_cp=True, ep=8)
    assert str(scheme) == "tp2cp4~ep8pp2"
    assert {group.ep for group in scheme.group_schemes} == {8}
    assert [group.as_replica.cp for group in scheme.group_schemes] == [4, 4, 4]
    assert Scheme(tp=4, cp=3, ep=2).as_replica == Scheme(tp=4, cp=3, ep=2)
    assert Scheme.from_json(JsonObject(scheme.to_json(), "scheme", StrategyError)) == scheme


def test_fs_belongs_to_a_scheme_and_its_context_groups() -> None:
    scheme = Scheme(tp=2, cp=4, splits_cp=True, fs=4)
    assert [str(group) for group in scheme.group_schemes] == ["tp2cp4fs", "tp2cp2fs4", "tp2fs4"]
    assert {group.as_replica for group in scheme.group_schemes} == {Scheme(tp=2, cp=4, fs=4)}
    assert Scheme(fs=4, ep=8).as_replica == Scheme(cp=8, fs=8, ep=8)
    for each in (scheme, *scheme.group_schemes):
        assert Scheme.from_json(JsonObject(each.to_json(), "scheme", StrategyError)) == each
    assert {"fs", "recomputes"}.isdisjoint(Scheme(cp=4).to_json())


def test_recomputation_belongs_to_a_scheme_and_its_context_groups() -> None:
    scheme = Scheme(cp=4, splits_cp=True, fs=4, recomputes=True)
    assert [str(group) for group in scheme.group_schemes] == ["cp4fsr", "cp2fs4r", "fs4r"]
    assert Scheme(ep=2, recomputes=True).as_replica == Scheme(cp=2, ep=2, recomputes=True)
    assert Scheme.from_json(JsonObject(scheme.to_json(), "scheme", StrategyError)) == scheme


def test_no_position_outside_the_scheme() -> None:
    # A negative index would silently select another stage's rank.
    with pytest.raises(IndexError, match="stage -1"):
        Replica(Scheme(pp=2), (0, 1)).rank_at(-1, 0, 0)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0,), "needs 2 ranks but 1 are listed"),
        ((3, 3), "lists rank 3 2 times"),
        ((0, -1), "count from 0 but tp2 lists rank -1"),
    ],
)
def test_impossible_replicas(ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Replica(Scheme(tp=2), ranks)


def test_schemes_that_micro_batches_may_run_as() -> None:
    plain = Scheme(tp=2, cp=3, pp=2, layers=(1, 2))
    assert plain.group_schemes == (plain,)
    splits = Scheme(tp=2, cp=4, pp=2, layers=(1, 2), splits_cp=True)
    assert splits.group_schemes == tuple(Scheme(2, cp, 2, (1, 2)) for cp in (4, 2, 1))
