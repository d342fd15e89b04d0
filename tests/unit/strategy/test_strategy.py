"""Strategies: notation, placement, canonical text, the model they fit, pools."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.strategy import Pool, Replica, Scheme, Strategy
from megatron.hydraulis.strategy.megatron_layout import MegatronLayout
from megatron.hydraulis.strategy.pool import num_ranks_of
from tests.support.planning import LLAMA_7B


def ranks_of(text: str, num_ranks: int, ranks_per_node: int | None = None) -> list[list[int]]:
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    return [list(replica.ranks) for replica in strategy.replicas]


def test_the_designs_examples() -> None:
    large = Strategy.parse("tp16+2*tp8pp3", 64, ranks_per_node=8)
    assert [replica.scheme for replica in large.replicas] == [
        Scheme(tp=16),
        Scheme(tp=8, pp=3),
        Scheme(tp=8, pp=3),
    ]
    placed = Strategy.parse("tp2@0,3+pp2:5,3@1,2", 4)
    assert placed.replicas == (
        Replica(Scheme(tp=2), (0, 3)),
        Replica(Scheme(pp=2, layers=(5, 3)), (1, 2)),
    )
    idle = Strategy.parse("tp4cp2pp2+4*tp2+2*idle", 26)
    assert idle.idle_ranks == (24, 25)
    assert idle.schemes == (Scheme(tp=4, cp=2, pp=2), Scheme(tp=2))


def test_a_splitting_width() -> None:
    assert Strategy.parse("2*cp8~", 16).replicas[0].scheme == Scheme(cp=8, splits_cp=True)


@pytest.mark.parametrize(
    ("text", "num_ranks", "canonical"),
    [
        (" 2 * tp2 + tp 1 ", 5, "2*tp2+tp1"),
        ("tp2+tp2+tp1", 5, "2*tp2+tp1"),
        ("idle+pp2tp2cp1", 5, "tp2pp2+idle"),
        ("1*tp1", 1, "tp1"),
        ("cp2~tp2pp2:3,5", 8, "tp2cp2~pp2:3,5"),
        ("cp4 fs+ fs 4 cp4~ ep2", 8, "cp4fs+cp4~fsep2"),
        ("tp2 cp2fs@3,1,0,2", 4, "tp2cp2fs@3,1,0,2"),
        ("tp2 r + tp1r+cp2~fs r", 5, "tp2r+tp1r+cp2~fsr"),
        ("pp2r:3,1@1,0", 2, "pp2r:3,1@1,0"),
        # The ranks would be placed like this anyway.
        ("tp2@0,1+tp1@2", 3, "tp2+tp1"),
        ("2*tp2@0,1,3,2", 4, "2*tp2@0,1,3,2"),
        ("tp1@1+idle", 2, "tp1@1+idle"),
    ],
)
def test_canonical_text(text: str, num_ranks: int, canonical: str) -> None:
    strategy = Strategy.parse(text, num_ranks)
    assert str(strategy) == canonical
    assert strategy.name == canonical
    assert Strategy.parse(canonical, num_ranks) == strategy


@pytest.mark.parametrize(
    ("text", "num_ranks", "ranks_per_node", "expected"),
    [
        # Largest tp first, wherever it is in the text.
        ("tp1+tp2", 3, None, [[2], [0, 1]]),
        # A TP group stays inside a node; smaller ones fill the gaps.
        ("2*tp3+2*tp1", 8, 4, [[0, 1, 2], [4, 5, 6], [3], [7]]),
        # CP stays inside a node if it can, else each of its TP groups does.
        ("tp2+cp4+tp2", 8, 4, [[0, 1], [4, 5, 6, 7], [2, 3]]),
        ("tp4cp2", 8, 4, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        # Pipelines cross nodes.
        ("tp2pp3+tp2", 8, 4, [[0, 1, 2, 3, 4, 5], [6, 7]]),
        # Larger than a node.
        ("tp8+2*tp4", 16, 4, [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        # Groups that no node has room for cross nodes.
        ("2*tp3+idle+idle+idle+tp3", 12, 4, [[0, 1, 2], [4, 5, 6], [8, 9, 10]]),
        ("5*tp3+idle", 16, 8, [[0, 1, 2], [3, 4, 5], [8, 9, 10], [11, 12, 13], [6, 7, 14]]),
        # Named ranks are assigned first.
        ("tp2+tp2@0,3", 4, None, [[1, 2], [0, 3]]),
        ("tp4+tp1@0+3*tp1", 8, 4, [[4, 5, 6, 7], [0], [1], [2], [3]]),
    ],
)
def test_placement(
    text: str, num_ranks: int, ranks_per_node: int | None, expected: list[list[int]]
) -> None:
    assert ranks_of(text, num_ranks, ranks_per_node) == expected


@pytest.mark.parametrize(
    ("text", "num_ranks", "message"),
    [
        ("3*tp8", 16, "3 replicas use 24 ranks but the job has 16; remove a replica or start 24"),
        ("tp2", 4, r"1 replica uses 2 ranks but the job has 4, .* append '\+2\*idle'"),
        ("tp2+3*idle", 4, "3 more are idle, but the job has 4; remove idle ranks or start 5 ranks"),
        ("idle", 1, "at least 1 replica but has 0"),
        ("", 3, "'' at character 1 is none"),
        ("tp2++tp1", 3, "'' at character 5 is none"),
        ("tp2+", 2, "'' at character 5 is none"),
        ("tp2 tp1", 3, "tp2 tp1 has tp twice"),
        ("tp2+tp1 6", 16, "'tp1 6' at character 5"),
        ("2tp2", 4, "'2tp2' at character 1"),
        ("TP2", 2, "'TP2' at character 1"),
        ("dp2", 2, "of tp, cp, fs, ep and pp, .* 'dp2' at character 1"),
        ("tp", 2, "'tp' at character 1"),
        ("tp²", 2, "'tp²' at character 1"),
        ("tp1234567890", 2, "at most 9 digits"),
        ("tp0", 2, "tp is 0"),
        ("0*tp1+tp2", 2, r"says 0\*; remove that term"),
        ("tp2~", 2, "'~' belongs behind the degree of cp, not of tp"),
        ("cp3~", 3, "power of two"),
        ("pp2:3,", 2, "'pp2:3,' at character 1"),
        ("pp2:1,2,3", 2, "layers for 3 stages but has 2"),
        ("tp2@0", 2, "tp2 with 2 ranks in all has 1 listed; list 2 ranks"),
        ("2*tp2@0,1", 4, "2 copies of tp2 with 4 ranks in all have 2 listed; list 4 ranks"),
        ("idle@0+tp1", 2, "'idle@0' at character 1"),
        ("tp2@0,0", 2, "tp2 lists rank 0 2 times"),
        ("tp2@0,1+tp2@1,2", 4, "rank 1 is named for tp2 and for tp2"),
        ("tp2@0,5+tp2", 4, "rank 5 but the job's 4 ranks end at 3"),
        ("tp2ep4", 2, "tp2ep4 has tp·cp = 2 ranks a stage and ep 4; use an ep that divides 2"),
        ("ep2~", 2, "'~' belongs behind the degree of cp, not of ep"),
        ("cp1fs", 1, "cp1fs has 1 of them; give cp a degree from 2 on or drop the fs"),
        ("cp4fs1", 4, "cp4fs1 has 1 of them"),
        ("tp2rr", 2, "'tp2rr' at character 1"),
        ("r", 1, "'r' at character 1"),
        ("cp4fs~", 4, "'~' belongs behind the degree of cp, not of fs"),
        ("cp4fsfs", 4, "cp4fsfs has fs twice"),
        ("cp2fspp2", 4, "cp2fspp2 has fs and pp 2; drop the fs or the pp"),
        ("cp2fs4", 2, "cp2fs4 has cp 2 and fs 4, as groups of cp4fs do; use cp4fs"),
        ("tp1", 0, "at least 1 rank but has 0"),
        ("999999999*tp1", 999999999, "at most 131072 ranks here but this one has 999999999"),
    ],
)
def test_bad_text_names_rule_numbers_and_fix(text: str, num_ranks: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message) as raised:
        Strategy.parse(text, num_ranks)
    assert str(raised.value).startswith(f"strategy {text!r}: ")


def test_errors_call_a_strategy_by_its_name() -> None:
    with pytest.raises(StrategyError, match=r"^strategy 'long': 3 replicas use 20 ranks"):
        Strategy.parse("2*tp8+tp4", 16, name="long")
    with pytest.raises(StrategyError, match=r"^strategy 'long': .* 'tp8!'"):
        Strategy.parse("tp8!", 8, name="long")


def test_nodes_must_be_complete() -> None:
    with pytest.raises(StrategyError, match="10 ranks do not fill whole nodes; start 12 ranks"):
        Strategy.parse("10*tp1", 10, ranks_per_node=4)
    strategy = Strategy.parse("tp2", 2)
    for nodes_of_none in (
        lambda: Strategy.parse("tp2", 2, ranks_per_node=0),
        lambda: Pool(2, 0, (strategy,)),
        lambda: replace(strategy, ranks_per_node=0),
    ):
        with pytest.raises(StrategyError, match="ranks_per_node is 0 but a node needs at least 1"):
            nodes_of_none()
    # A node larger than the job is the job's only node.
    assert Strategy.parse("tp2", 2, ranks_per_node=8) == strategy


def test_megatrons_sizes_become_equal_replicas() -> None:
    assert str(MegatronLayout(tp=2, pp=2).strategy(8)) == "2*tp2pp2"
    assert MegatronLayout().strategy(1).name == "tp1"
    with pytest.raises(StrategyError, match="replicas of 4 ranks do not fill the job's 6 ranks"):
        MegatronLayout(tp=2, cp=2).strategy(6)


@pytest.mark.parametrize(
    ("layout", "num_ranks", "strategy"),
    [
        (MegatronLayout(tp=2, num_experts=8), 4, "2*tp2"),
        (MegatronLayout(tp=2, etp=1, num_experts=8), 4, "2*tp2"),
        (MegatronLayout(tp=2, etp=4, num_experts=8), 4, "tp2cp2~ep4"),
        (MegatronLayout(tp=2, cp=2, ep=2, etp=1, num_experts=8), 8, "2*tp2cp2ep2"),
        (MegatronLayout(tp=2, cp=2, ep=2, num_experts=8), 8, "2*tp2cp2ep4"),
        (MegatronLayout(tp=2, ep=4, num_experts=64), 8, "tp2cp4~ep8"),
        (MegatronLayout(tp=2, pp=2, ep=8, etp=1, num_experts=8), 16, "tp2cp4~ep8pp2"),
        (MegatronLayout(tp=2, cp=3, ep=3, etp=1, num_experts=6), 12, "2*tp2cp3ep3"),
        # No scheme of 3 or 4 ranks shares 12 experts in threes, so 4 ranks do.
        (MegatronLayout(ep=3, num_experts=12), 12, "3*cp4~ep4"),
        (MegatronLayout(tp=2, ep=4), 4, "2*tp2"),
    ],
)
def test_ranks_hold_as_many_experts_as_in_megatron(
    layout: MegatronLayout, num_ranks: int, strategy: str
) -> None:
    layout.check_ranks(num_ranks)
    found = layout.strategy(num_ranks)
    assert str(found) == strategy
    assert not layout.note(found.schemes[0])


@pytest.mark.parametrize(
    ("layout", "num_ranks", "strategy", "shares"),
    [
        (MegatronLayout(tp=2, ep=8, num_experts=8), 16, "2*tp2cp4~ep8", ("1/16", "1/8")),
        (MegatronLayout(ep=3, num_experts=12), 9, "9*tp1", ("1/3", "all")),
        (MegatronLayout(tp=4, ep=3, num_experts=3), 12, "3*tp4", ("1/12", "1/4")),
        (MegatronLayout(tp=2, ep=2, num_experts=8), 2, "tp2ep2", ("1/4", "1/2")),
    ],
)
def test_ranks_that_hold_more_experts_than_in_megatron_are_named(
    layout: MegatronLayout, num_ranks: int, strategy: str, shares: tuple[str, str]
) -> None:
    layout.check_ranks(num_ranks)
    found = layout.strategy(num_ranks)
    assert str(found) == strategy
    note = layout.note(found.schemes[0])
    there, here = shares
    assert f"in Megatron a rank holds {there} of" in note
    assert f"in {found.schemes[0]} {here}, the nearest" in note


@pytest.mark.parametrize(
    ("layout", "num_ranks", "numbers"),
    [
        (MegatronLayout(tp=2, ep=2, etp=3, num_experts=8), 4, "groups of 6 .* 2 times .*-size 3"),
        (MegatronLayout(ep=8, num_experts=8), 4, r"groups of 8 .*-size 8\) .* start 8 "),
        (MegatronLayout(tp=2, pp=2, ep=6, num_experts=6), 16, "has 8 ranks; .* start 12 "),
    ],
)
def test_sizes_of_experts_that_megatron_refuses(
    layout: MegatronLayout, num_ranks: int, numbers: str
) -> None:
    with pytest.raises(StrategyError, match=numbers):
        layout.check_ranks(num_ranks)


def test_replica_of() -> None:
    strategy = Strategy.parse("tp2@0,3+tp1+idle", 4)
    assert strategy.replica_of(3) == Replica(Scheme(tp=2), (0, 3))
    assert strategy.replica_of(1) == Replica(Scheme(), (1,))
    assert strategy.replica_of(2) is None
    with pytest.raises(StrategyError, match="rank 4 is asked for"):
        strategy.replica_of(4)


EXPERTS = {
    "num_experts": 8,
    "num_expert_layers": 32,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 1024,
}


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({}, "tp3", "tp must divide the attention heads but tp3 has tp 3 .* is 32"),
        ({"num_query_groups": 2}, "tp4", "query groups but tp4 .* is 2"),
        ({"hidden_size": 4098}, "tp4", "hidden size"),
        ({"ffn_hidden_size": 11010}, "tp4", "ffn hidden size"),
        ({"vocab_size": 32001}, "tp2", "padded vocabulary size"),
        ({}, "pp33", "33 stages but the model has 32 layers"),
        ({}, "pp2:16,15", "places 31 layers but the model has 32"),
        ({}, "cp2ep2", "cp2ep2 has ep 2 and the model has no experts; drop the ep"),
        (EXPERTS, "cp3ep3", "cp3ep3 has ep 3 and the model 8 experts; use an ep that divides 8"),
    ],
)
def test_models_that_a_strategy_cannot_cut(
    changes: dict[str, int], text: str, message: str
) -> None:
    strategy = Strategy.parse(f"{text}+tp1", num_ranks_of(text) + 1)
    with pytest.raises(StrategyError, match=message):
        strategy.check_model(replace(LLAMA_7B, **changes))  # type: ignore[arg-type]


def test_models_that_a_strategy_can_cut() -> None:
    Strategy.parse("tp8pp4+tp4pp2:20,12+cp2", 42).check_model(LLAMA_7B)
    with_experts = replace(LLAMA_7B, **EXPERTS)  # type: ignore[arg-type]
    Strategy.parse("tp2cp4~ep8+tp2ep2", 10).check_model(with_experts)


def pool_content() -> dict[str, Any]:
    return {
        "num_ranks": 16,
        "ranks_per_node": 8,
        "strategies": [
            {"name": "long", "replicas": "tp16"},
            {"name": "mixed", "replicas": "tp8+2*tp3+2*idle"},
        ],
    }


def test_pool_file_round_trip() -> None:
    pool = Pool.from_json(pool_content())
    assert pool.to_json() == pool_content()
    assert pool.tp_lcm == 48
    assert str(pool.strategy("mixed")) == "tp8+2*tp3+2*idle"
    with pytest.raises(StrategyError, match="use one of 'long', 'mixed'"):
        pool.strategy("short")


def test_pool_of_strategies() -> None:
    strategy = Strategy.parse("2*tp2", 4)
    assert Pool.of(strategy) == Pool(4, 4, (strategy,))
    with pytest.raises(StrategyError, match="at least 1 strategy"):
        Pool.of()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"strategies": []}, "at least 1 strategy but has 0"),
        ({"num_ranks": "16"}, "num_ranks must be a whole number but is '16'"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0 but a node needs at least 1 rank"),
        ({"nodes": 2}, "pool: has the unknown keys 'nodes'"),
        ({"strategies": [{"name": "long"}]}, "strategy 0 of the pool: needs 'replicas' but lacks"),
        ({"version": 2}, "pool: version 1 can be read but this one is of version 2"),
        ({"strategies": [{"name": "", "replicas": "tp16"}]}, "a name has characters"),
        ({"strategies": ["tp16"]}, "strategy 0 of the pool: must be an object"),
        ({"strategies": [{"name": "long", "replicas": "tp8"}]}, "strategy 'long': 1 replica"),
        (
            {"strategies": [{"name": "a", "replicas": "tp16"}, {"name": "a", "replicas": "2*tp8"}]},
            "2 strategies are called 'a'",
        ),
        ({"ranks_per_node": 5}, "16 ranks do not fill whole nodes"),
    ],
)
def test_damaged_pool_files(damage: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Pool.from_json(pool_content() | damage)


def limited_pool(**max_tokens: Any) -> dict[str, Any]:
    entry = {"name": "own", "replicas": "tp8+2*tp2pp2", "max_tokens": max_tokens}
    return {"num_ranks": 16, "ranks_per_node": 8, "strategies": [entry]}


def test_limits_of_a_strategy_round_trip() -> None:
    content = limited_pool(tp8=4096)
    strategy = Pool.from_json(content | {"version": 1}).strategies[0]
    assert dict(strategy.token_limits) == {Scheme(tp=8): 4096}
    assert Pool.of(strategy).to_json() == content


@pytest.mark.parametrize(
    ("max_tokens", "message"),
    [
        ({"tp4": 1}, "'own': max_tokens is given for tp4 but its schemes are tp8, tp2pp2"),
        ({"tp2pp2": 8, "pp2tp2": 9}, "max_tokens is given once a scheme but 2 times for tp2pp2"),
        ({"tp8": 0}, "a micro-batch holds at least 1 token but max_tokens of tp8 is 0"),
        ({"tp8": "all"}, "max_tokens of strategy 'own': tp8 must be a whole number but is 'all'"),
        ({"2*tp8": 5}, "expected one scheme, without copies and ranks, but found '2[*]tp8'"),
        ({"idle": 5}, "expected one scheme, without copies and ranks, but found 'idle'"),
        ({"dp8": 5}, "'own, max_tokens of dp8': .* 'dp8' at character 1"),
    ],
)
def test_impossible_limits_of_a_strategy(max_tokens: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Pool.from_json(limited_pool(**max_tokens))


def test_a_pool_is_for_one_job() -> None:
    with pytest.raises(StrategyError, match="is for 2 ranks, 2 a node, but its pool for 4 ranks"):
        Pool.of(Strategy.parse("tp4", 4), Strategy.parse("tp2", 2))


@pytest.mark.parametrize("name", ["a\ud800", "a\x1b[31m", "a\nb"])
def test_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    with pytest.raises(StrategyError, match="no control characters") as raised:
        Strategy.parse("tp1", 1, name=name)
    assert str(raised.value).isprintable()
