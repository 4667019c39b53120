"""What tests of several routers use."""

from collections.abc import Iterator

import pytest

from tests.rigs.routed_fleet import RoutedFleet


@pytest.fixture
def fleet() -> Iterator[RoutedFleet]:
    """Three engines behind a real `kvsight serve`."""
    with RoutedFleet() as running:
        yield running
