"""A fleet of simulated workers under a routing policy, to see what a policy finds in cache.

Owns workloads (generated, or Mooncake traces), workers that keep a real cache of any kind and a real publisher,
policies that see only what a router sees, and the reports. Engines compute nothing here and copies move no bytes;
everything between cache and router is the real thing. Imports `kv_events`, `engine_cache`, `publisher` and `indexer`.

Start at `run.simulate`; then `trial` (one request), `worker` (what a cache has to do with it), `direct` and `live` (how
events reach the router).
"""

from simulation.caches import WorkerCache, create_cache
from simulation.policies import POLICIES, Policy, create_policy
from simulation.report import PolicyReport, WorkerLoad, reports_table
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
    "reports_table",
    "simulate",
]
