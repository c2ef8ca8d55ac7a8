"""What a router believes: its own requests at once, those of others as told, prompts as sent and as told."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedray.engine.cache_log import CacheChanges
from pagedray.engine.messages import EngineNews, Request, SamplingParams
from pagedray.engine.prefix_cache import hash_blocks
from pagedray.serving.router import RoutedEngine, Router

NOTHING = CacheChanges(b"", b"", False)


def request(name: int, num_blocks: int = 0, prompt: int = 0) -> Request:
    ids = tuple(range(prompt * 1000, prompt * 1000 + 4 * num_blocks))
    return Request(
        id=str(name),
        client_id="c",
        prompt_ids=ids or (1,),
        params=SamplingParams(max_tokens=5, seed=1),
        block_hashes=hash_blocks(ids, 4),
    )


def news(others: int = 0, cache: CacheChanges = NOTHING, tokens: int = 0) -> EngineNews:
    return EngineNews(
        is_draining=False,
        other_requests=others,
        other_tokens=tokens,
        num_running=0,
        num_waiting=0,
        kv_usage=0.0,
        cache=cache,
    )


def router_of(num_engines: int, policy: str = "prefix", factor: float = 2.0) -> tuple[Router, list[RoutedEngine]]:
    router = Router(policy, factor)
    return router, [router.add(f"engine-{i}") for i in range(num_engines)]


def send(router: Router, wanted: Request, name: bytes | None = None) -> RoutedEngine:
    engine = router.choose(router.engines, [wanted], name)
    router.sent(engine, wanted)
    return engine


def test_requests_of_others_count_as_told_and_own_ones_once() -> None:
    router, (one, two) = router_of(2, "least_loaded")
    router.hear(one, news(others=3))
    first = [send(router, request(i)) for i in range(4)]
    assert first[:3] == [two, two, two]
    router.hear(two, news(others=0))  # of the three there, none is another's
    assert abs(one.load - two.load) <= 1.01
    router.hear(one, news(others=0))
    assert one.load < two.load


def test_a_request_that_ended_no_longer_counts() -> None:
    router, (one, two) = router_of(2)
    long = request(0, num_blocks=100)
    router.sent(one, long)
    router.ended(one, long)
    assert one.load == two.load == 0


def test_a_prompt_is_known_from_the_moment_it_is_sent() -> None:
    router, engines = router_of(4)
    homes = {prompt: send(router, request(prompt, 8, prompt)) for prompt in range(4)}
    assert len(set(homes.values())) == 4
    for prompt, home in homes.items():
        assert send(router, request(10 + prompt, 8, prompt)) is home
    assert router.decisions["prefix", "affinity"] == 4
    assert router.decisions["prefix", "balance"] == 4
    assert {engine.own_requests for engine in engines} == {2}


def test_what_another_ingress_had_computed_is_found() -> None:
    router, (one, two) = router_of(2)
    wanted = request(0, 8, prompt=3)
    router.hear(two, news(cache=CacheChanges(b"".join(h[:8] for h in wanted.block_hashes), b"", True)))
    assert [send(router, wanted) for _ in range(1)] == [two]
    router.ended(two, wanted)
    router.hear(two, news(cache=CacheChanges(b"", wanted.block_hashes[0][:8], False)))
    assert router.choose([one, two], [request(1, 8, prompt=3)], None) in (one, two)
    assert router.decisions["prefix", "balance"] == 1


def test_nothing_is_left_of_a_dead_engine() -> None:
    router, (one, two) = router_of(2)
    wanted = request(0, 8, prompt=1)
    home = send(router, wanted)
    other = two if home is one else one
    router.remove(home)
    router.hear(home, news(others=-100))  # an answer that was on its way
    assert router.engines == [other]
    successor = router.add("engine-9")
    assert successor.load == 0
    send(router, request(1, 8, prompt=1))
    assert router.decisions["prefix", "affinity"] == 0


def test_a_hot_prompt_spreads_within_the_bound() -> None:
    router, engines = router_of(8)
    for number in range(400):
        send(router, request(number, 8, prompt=1))
        loads = [engine.load for engine in engines]
        assert max(loads) <= 2.0 * (min(loads) + 1.04)
    assert router.decisions["prefix", "overflow"] > 0
    assert router.decisions["prefix", "affinity"] > 200


def test_a_burst_of_cold_prompts_spreads_evenly() -> None:
    router, _ = router_of(8)
    counts = Counter(send(router, request(number, 8, prompt=number)).engine_id for number in range(500))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_a_session_has_one_engine_by_whichever_ingress() -> None:
    routers = [Router(turn=turn) for turn in range(3)]
    for router in routers:
        for i in range(4):
            router.add(f"engine-{i}")
    for number in range(20):
        name = b"session-%d" % number
        assert len({router.choose(router.engines, [request(0)], name).engine_id for router in routers}) == 1


def test_sessions_keep_to_the_bound() -> None:
    router, engines = router_of(4)
    for number in range(100):
        send(router, request(number), b"one session")
        counts = [engine.own_requests for engine in engines]
        assert max(counts) <= 2.0 * (min(counts) + 1)
    assert router.decisions["session", "overflow"] and router.decisions["session", "affinity"]


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_other_policies_keep_no_index(policy: str) -> None:
    router, (one, two) = router_of(2, policy)
    router.hear(one, news(cache=CacheChanges(bytes(80), b"", True)))
    assert {send(router, request(number, 8, prompt=1)) for number in range(2)} == {one, two}
    assert len(router._index) == 0


def test_equal_histories_give_equal_choices() -> None:
    def choices() -> list[str]:
        router, _ = router_of(5)
        return [send(router, request(n, 3, prompt=n % 7)).engine_id for n in range(60)]

    assert choices() == choices()


def test_news_survives_the_wire() -> None:
    sent = news(3, CacheChanges(b"12345678", b"", True), tokens=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineNews) == sent


STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "send", "end", "news", "die", "join"]), st.integers(0, 99)), max_size=80
)


@given(STEPS, st.sampled_from(["prefix", "least_loaded", "round_robin"]), st.sampled_from([1.0, 1.5, 2.0]))
def test_whatever_happens_loads_are_right_and_affinity_keeps_its_bound(
    steps: list[tuple[str, int]], policy: str, factor: float
) -> None:
    router, _ = router_of(3, policy, factor)
    sent: list[tuple[RoutedEngine, Request]] = []
    others: dict[RoutedEngine, int] = {}
    for step, (kind, number) in enumerate(steps):
        engines = router.engines
        if kind == "send" and engines:
            wanted = request(step, 1 + number % 5, prompt=number % 3)
            least = min(engine.load for engine in engines)
            decided = router.decisions[policy, "affinity"] + router.decisions["session", "affinity"]
            engine = send(router, wanted, b"%d" % (number % 4) if number % 7 == 0 else None)
            sent.append((engine, wanted))
            if router.decisions[policy, "affinity"] + router.decisions["session", "affinity"] > decided:
                cost = 1 + wanted.num_tokens / 1024
                assert engine.load <= factor * (least + cost) + 1e-9
        elif kind == "end" and sent:
            router.ended(*sent.pop(number % len(sent)))
        elif kind == "news" and engines:
            engine = engines[number % len(engines)]
            others[engine] = number % 10
            hashes = request(0, 3, prompt=number % 3).block_hashes
            joined = b"".join(h[:8] for h in hashes)
            router.hear(engine, news(others[engine], CacheChanges(joined, b"", number % 2 == 0)))
        elif kind == "die" and engines:
            dead = engines[number % len(engines)]
            router.remove(dead)
            sent = [(engine, one) for engine, one in sent if engine is not dead]
        elif kind == "join":
            router.add(f"late-{step}")
        for engine in router.engines:
            own = [one for where, one in sent if where is engine]
            expected = len(own) + others.get(engine, 0) + sum(one.num_tokens for one in own) / 1024
            assert engine.load == pytest.approx(expected)
