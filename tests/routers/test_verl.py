"""The load balancer in verl's real router module and the real Ray, with three engines and a real `kvsight serve`."""

import asyncio

from tests.rigs.routed_fleet import INSTALLS_A_ROUTER, RoutedFleet, conversations, run
from tests.support.servers.ray_apps import verl_balancer

pytestmark = INSTALLS_A_ROUTER


def test_with_stand_ins_for_verls_client_and_servers_turns_reuse_most_release_all_and_outlive_kvsight() -> None:
    waves = conversations(24, 3)  # first turns share four beginnings: verl alone reuses 65 to 75 %
    with RoutedFleet() as fleet, verl_balancer(fleet.addresses, fleet.url) as app:
        before = asyncio.run(run(app.url, waves[:1], at_once=1))
        assert (before.failures, before.share >= 0.85) == (0, True), (before.share, app.log.read_text())
        fleet.wait_for_release()
        fleet.kill_kvsight()
        assert asyncio.run(run(app.url, waves[1:])).failures == 0
