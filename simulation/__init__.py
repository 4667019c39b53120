"""A fleet of simulated workers under a routing policy, which measures how much a policy finds in cache.

Owns workloads (generated, or Mooncake traces), workers with a real cache of any kind and a real publisher, policies
that see only what a router sees, and the reports. The engines compute nothing and copies move no bytes; everything
between cache and router is real. Imports `kv_events`, `engine_cache`, `publisher` and `indexer`.

Start at `run.simulate`; then read `trial` (one request), `worker` (the cache's part of it) and `live` (how events
reach a router that runs).
"""

from simulation.caches import WorkerCache, create_cache
from simulation.policies import POLICIES, Policy, create_policy
from simulation.report import PolicyReport, WorkerLoad
from simulation.requests import Request, Requests
from simulation.run import simulate
from simulation.settings import CACHES, SimulationSettings
from simulation.traces import MooncakeTrace
from simulation.worker import SimulatedWorker
from simulation.workload import WorkloadSettings, generate

__all__ = [
    "CACHES",
    "POLICIES",
    "MooncakeTrace",
    "Policy",
    "PolicyReport",
    "Request",
    "Requests",
    "SimulatedWorker",
    "SimulationSettings",
    "WorkerCache",
    "WorkerLoad",
    "WorkloadSettings",
    "create_cache",
    "create_policy",
    "generate",
    "simulate",
]
