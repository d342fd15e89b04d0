"""The strategy notation and the placement behind it, for any strategy."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.strategy import Pool, Replica, Scheme, Strategy


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    splits_cp = draw(st.booleans())
    shares_weights = draw(st.booleans())
    pp = 1 if shares_weights else draw(st.integers(1, 4))
    tp = draw(st.integers(1, 8))
    cp = draw(st.sampled_from([2, 4] if splits_cp else [2, 3] if shares_weights else [1, 2, 3]))
    return Scheme(
        tp=tp,
        cp=cp,
        ep=draw(st.sampled_from([ep for ep in range(1, tp * cp + 1) if tp * cp % ep == 0])),
        pp=pp,
        layers=draw(st.none() | st.lists(st.integers(1, 40), min_size=pp, max_size=pp).map(tuple)),
        splits_cp=splits_cp,
        fs=cp if shares_weights else 1,
        recomputes=draw(st.booleans()),
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, int, int]:
    """A strategy text without placement, the ranks of its job and of a node."""
    drawn = draw(st.lists(st.tuples(st.integers(1, 3), schemes()), min_size=1, max_size=4))
    ranks_per_node = draw(st.integers(1, 16))
    num_used = sum(num * scheme.num_ranks for num, scheme in drawn)
    num_ranks = -(-num_used // ranks_per_node) * ranks_per_node
    terms = [f"{num}*{scheme}" for num, scheme in drawn]
    if num_ranks > num_used:
        terms.append(f"{num_ranks - num_used}*idle")
    return draw(st.permutations(terms).map(" + ".join)), num_ranks, ranks_per_node


@given(jobs())
def test_text_round_trip(job: tuple[str, int, int]) -> None:
    text, num_ranks, ranks_per_node = job
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    again = Strategy.parse(str(strategy), num_ranks, ranks_per_node=ranks_per_node)
    assert again == strategy
    assert "@" not in str(strategy)


@given(jobs(), st.randoms(use_true_random=False))
def test_any_placement_round_trips(job: tuple[str, int, int], random_: object) -> None:
    text, num_ranks, ranks_per_node = job
    usual = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    shuffled = list(range(num_ranks))
    random_.shuffle(shuffled)  # type: ignore[attr-defined]
    replicas = []
    for replica in usual.replicas:
        replicas.append(Replica(replica.scheme, tuple(shuffled[: replica.num_ranks])))
        del shuffled[: replica.num_ranks]
    unnamed = Strategy("any", tuple(replicas), num_ranks, ranks_per_node)
    placed = Strategy(str(unnamed), unnamed.replicas, num_ranks, ranks_per_node)
    again = Strategy.parse(str(placed), num_ranks, ranks_per_node=ranks_per_node)
    assert again == placed
    assert sorted(shuffled) == list(placed.idle_ranks)


@given(jobs())
def test_every_rank_is_in_one_replica_or_idle(job: tuple[str, int, int]) -> None:
    text, num_ranks, ranks_per_node = job
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    used = [rank for replica in strategy.replicas for rank in replica.ranks]
    assert sorted([*used, *strategy.idle_ranks]) == list(range(num_ranks))


@given(st.integers(0, 3), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=6))
def test_power_of_two_tp_groups_stay_inside_nodes_of_eight(
    num_pairs: int, degrees: list[int]
) -> None:
    terms = [f"tp{tp}" for tp in degrees] + ["tp4pp2"] * num_pairs
    num_used = sum(degrees) + 8 * num_pairs
    num_ranks = -(-num_used // 8) * 8
    if num_ranks > num_used:
        terms.append(f"{num_ranks - num_used}*idle")
    strategy = Strategy.parse("+".join(terms), num_ranks, ranks_per_node=8)
    for replica in strategy.replicas:
        for stage in range(replica.scheme.pp):
            assert len({rank // 8 for rank in replica.tp_ranks(stage, 0)}) == 1


@given(jobs())
def test_pool_round_trip(job: tuple[str, int, int]) -> None:
    text, num_ranks, ranks_per_node = job
    strategy = Strategy.parse(text, num_ranks, name="only", ranks_per_node=ranks_per_node)
    pool = Pool.of(strategy)
    assert Pool.from_json(pool.to_json()) == pool


@given(st.integers(1, 12), st.integers(0, 30))
def test_an_even_split_differs_by_one_layer_and_never_rises(pp: int, num_more: int) -> None:
    layers = Scheme(pp=pp).layers_per_stage(pp + num_more)
    assert sum(layers) == pp + num_more
    assert max(layers) - min(layers) <= 1
    assert list(layers) == sorted(layers, reverse=True)
