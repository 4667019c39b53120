"""Clients and stores on a test double of a Mooncake master."""

from typing import Any

import pytest

from tests.rigs.mooncake_double import DoubleMaster


@pytest.fixture
def master(monkeypatch):
    from engine_cache.storage import mooncake_client

    double = DoubleMaster()
    monkeypatch.setattr(mooncake_client, "MooncakeDistributedStore", double.make_native)
    yield double
    double.close()


@pytest.fixture
def open_store(master):
    """Opens stores without pools. `store.native` is the test double of the native client."""
    from engine_cache.storage.mooncake import MooncakeStorage
    from tests.rigs.mooncake import own_identity

    opened = list[Any]()

    def opener(identity=None, **settings):
        opened.append(MooncakeStorage.connect(identity or own_identity(), master.settings(**settings)))
        opened[-1].native = master.natives[-1]
        return opened[-1]

    yield opener
    for store in opened:
        store.close()
