"""Moments of a log as people say them."""

from datetime import datetime, timedelta

import pytest

from kv_events.errors import InvalidValueError
from kv_events.log.moments import LogMoment


def seconds(text: str, *, may_come: bool = False) -> float:
    found = LogMoment.parse(text, may_come=may_come).time_s
    assert found is not None
    return found


@pytest.mark.parametrize("minutes", [-2, 2])
def test_a_time_of_the_day_is_the_last_one_unless_it_may_come(minutes: int) -> None:
    now = datetime.now()
    then = (now + timedelta(minutes=minutes)).replace(second=30, microsecond=0)
    text = then.strftime("%H:%M:%S")
    assert 0 <= now.timestamp() - seconds(text) < 86_400
    assert datetime.fromtimestamp(seconds(text)).strftime("%H:%M:%S") == text
    assert datetime.fromtimestamp(seconds(text, may_come=True)).date() == datetime.now().date()
    assert LogMoment.parse(text[:5]).is_naive


@pytest.mark.parametrize(("text", "ago_s"), [("-90s", 90), ("-5m", 300), ("-2h", 7200), ("-1.5d", 129_600)])
def test_a_time_may_be_given_by_how_long_ago_it_was(text: str, ago_s: float) -> None:
    assert datetime.now().timestamp() - seconds(text) == pytest.approx(ago_s, abs=5)


def test_what_looks_like_a_time_may_still_be_an_offset() -> None:
    moment = LogMoment.parse("015:27")
    assert moment.offsets == {15: 27}
    assert LogMoment.parse(moment.text) == moment
    assert LogMoment.parse("15:27,1:3").offsets == {15: 27, 1: 3}
    assert LogMoment.parse("25:27").offsets == {25: 27}


@pytest.mark.parametrize("text", ["-5", "-5w", "-m", "-0m", "15:27Z"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError):
        LogMoment.parse(text)
