"""Where settings come from."""

from __future__ import annotations

import pytest

from kv_events.errors import InvalidValueError
from kv_events.settings import KvsightSettings


class Settings(KvsightSettings):
    needed: int
    tenant: str = "default"


def test_variables_count_where_no_argument_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TENANT", "t")
    monkeypatch.setenv("KVSIGHT_NEEDED", "1")
    settings = Settings(needed=2)
    assert (settings.needed, settings.tenant) == (2, "t")


def test_variables_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSIGHT_TENANT", "t")
    settings = Settings.ignoring_environment(needed=2)
    assert (settings.needed, settings.tenant) == (2, "default")
    with pytest.raises(InvalidValueError, match="KVSIGHT_NEEDED: got 'x'"):
        Settings.ignoring_environment(needed="x")
