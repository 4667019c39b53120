"""The pages that a store is known to hold, whatever the order in which answers arrive."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine_cache.storage.base import TrackedPages

KEYS = st.lists(st.sampled_from("abcdef"), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), KEYS, st.booleans()),
        st.tuples(st.just("lose"), KEYS),
        st.tuples(st.sampled_from(["lose_all", "forget_all", "take_lost"])),
    ),
    max_size=30,
)


def test_what_was_missed_before_it_was_seen_is_not_lost():
    held = TrackedPages(limit=9)
    held.hold(["a", "b"], held.moment)
    moment = held.moment
    held.hold(["a"], moment)
    held.lose(["a", "b"], moment)
    assert (held.keys(), held.take_lost()) == (["a"], ["b"])


def test_the_page_that_was_seen_longest_ago_goes_first():
    held = TrackedPages(limit=2)
    held.hold(["a", "b"], 0)
    held.hold(["a"], 0)
    held.hold(["c"], 0)
    assert (held.keys(), held.take_lost()) == (["a", "c"], ["b"])


@given(STEPS, st.integers(1, 4))
def test_announcing_what_is_held_and_withdrawing_what_is_lost_ends_as_what_is_held(steps, limit):
    held, told, before = TrackedPages(limit), set(), -1
    seen: list[Any] = []
    for what, *arguments in steps:
        if what == "hold":
            keys, is_late = arguments
            held.hold(keys, before if is_late else held.moment)
            if not is_late:
                seen = ([key for key in seen if key not in keys] + list(dict.fromkeys(reversed(keys)))[::-1])[-limit:]
                told |= {key for key in keys if key in held}
        elif what == "lose":
            held.lose(arguments[0], held.moment)
            seen = [key for key in seen if key not in arguments[0]]
        elif what == "take_lost":
            told -= set(held.take_lost())
        else:
            before = held.moment
            getattr(held, what)()
            seen = []
            if what == "forget_all":
                told = set()
        assert held.keys() == seen
        assert len(held) == len(seen)
    assert told - set(held.take_lost()) == set(seen)
