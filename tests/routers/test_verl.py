"""The load balancer in verl's real router module and the real Ray, with three engines and a real `kvsight serve`."""

import asyncio

import pytest

from tests.rigs.routed_fleet import RoutedFleet, conversations, run
from tests.support.servers.ray_apps import verl_balancer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),  # installs Ray
    pytest.mark.timing("several processes must start and answer within their time"),
]


def test_with_stand_ins_for_verls_client_and_servers_turns_reuse_most_release_all_and_outlive_kvsight() -> None:
    waves = conversations(24, 3)  # first turns share four beginnings: verl alone reuses 65 to 75 %
    with RoutedFleet() as fleet, verl_balancer([each.url for each in fleet.engines], fleet.url) as app:
        before = asyncio.run(run(app.url, waves[:1], at_once=1))
        assert (before.failures, before.share >= 0.85) == (0, True), (before.share, app.log.read_text())
        wait_until(lambda: fleet.requests() == 0, what="all reservations to end")
        fleet.kill_kvsight()
        assert asyncio.run(run(app.url, waves[1:])).failures == 0
