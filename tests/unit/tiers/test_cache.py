"""The byte-limited cache against a model: it never exceeds its limit and forgets what was used longest ago."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.tiers.cache import ByteLimitedCache

LIMIT = 100
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("get"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("put"), st.integers(0, 8), st.integers(0, 130)),
    ),
    max_size=60,
)


@given(STEPS)
def test_any_sequence_of_gets_and_puts_keeps_the_most_recently_used_within_the_limit(
    steps: list[tuple[str, int, int]],
) -> None:
    cache: ByteLimitedCache[tuple[int, int]] = ByteLimitedCache(LIMIT)
    model: dict[int, tuple[tuple[int, int], int]] = {}  # in order of use, the latest last
    for number, (action, key, size) in enumerate(steps):
        if action == "get":
            expected = model.get(key)
            assert cache.get(key) == (expected[0] if expected is not None else None)
            if expected is not None:
                model[key] = model.pop(key)
        else:
            cache.put(key, (key, number), size)
            model.pop(key, None)
            if size <= LIMIT:
                model[key] = ((key, number), size)
                while sum(one for _, one in model.values()) > LIMIT:
                    del model[next(iter(model))]
        assert cache.bytes == sum(one for _, one in model.values()) <= LIMIT
        assert len(cache) == len(model)
        assert {one for one in range(9) if one in cache} == set(model)
    assert {key: cache.get(key) for key in model} == {key: value for key, (value, _) in model.items()}


def test_a_value_larger_than_the_whole_cache_is_not_kept_and_drops_its_predecessor() -> None:
    cache: ByteLimitedCache[str] = ByteLimitedCache(10)
    cache.put("other", "stays", 4)
    cache.put("key", "small", 5)
    cache.put("key", "huge", 11)
    assert cache.get("key") is None
    assert cache.get("other") == "stays"
    assert cache.bytes == 4


def test_a_cache_without_room_keeps_nothing() -> None:
    cache: ByteLimitedCache[str] = ByteLimitedCache(0)
    cache.put("key", "value", 1)
    assert (cache.get("key"), len(cache), cache.bytes) == (None, 0, 0)
