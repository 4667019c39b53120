"""Runs of all policies over one workload."""

from __future__ import annotations

from collections.abc import Sequence

import uvloop

from kv_events.kafka.connection import KafkaConnection
from simulation.direct import run_direct
from simulation.live import KafkaTransport, run_live
from simulation.policies import create_policy
from simulation.report import PolicyReport
from simulation.requests import Requests
from simulation.settings import SimulationSettings
from simulation.trial import Progress


def simulate(
    requests: Requests,
    settings: SimulationSettings,
    policies: Sequence[str],
    progress: Progress | None = None,
) -> list[PolicyReport]:
    """Run the workload once for each policy, each time with a fresh fleet.

    With `settings.kafka` the events pass through a broker, in a new event loop; inside a running loop, use
    `live.run_live`. Before anything runs, raises InvalidValueError for a policy that is not in `POLICIES`, and
    KafkaUnreachableError for a broker that cannot be used. Also raises SimulationError and EventLogError.
    """
    for policy in policies:
        create_policy(policy, settings.workers, settings.seed)
    if settings.kafka is None:
        return [run_direct(requests, settings, policy, progress) for policy in policies]
    uvloop.run(KafkaConnection(settings.kafka).check())
    transport = KafkaTransport(settings.kafka)
    return [uvloop.run(run_live(requests, settings, policy, transport, progress)) for policy in policies]
