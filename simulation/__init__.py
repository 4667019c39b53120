"""A fleet of simulated workers under a routing policy, which measures how much a policy finds in cache, and how fast.

Owns workloads (generated, or Mooncake traces), engines with a queue and a batch around a real cache of any kind and a
real publisher, routers with the policies and the book of the service, and the reports. The engines compute nothing and
copies move no bytes; everything between cache and router is real. Imports `kv_events`, `engine_cache`, `publisher`,
`indexer`, `selection` and `analysis`.

Start at `run.simulate`; then read `run.TimedFleet` (the clock), `engine` (the time of a step), `policy_run` (one
policy), `worker` (the cache's part of a request) and `live` (how events reach a router that runs).
"""

from simulation.caches import WorkerCache as WorkerCache
from simulation.caches import create_cache as create_cache
from simulation.report import Latency as Latency
from simulation.report import PolicyReport as PolicyReport
from simulation.report import WorkerLoad as WorkerLoad
from simulation.router import POLICIES as POLICIES
from simulation.router import Policy as Policy
from simulation.router import create_policy as create_policy
from simulation.run import simulate as simulate
from simulation.settings import CACHES as CACHES
from simulation.settings import EngineSettings as EngineSettings
from simulation.settings import SimulationSettings as SimulationSettings
from simulation.worker import SimulatedWorker as SimulatedWorker
from simulation.workload import MooncakeTrace as MooncakeTrace
from simulation.workload import Request as Request
from simulation.workload import Requests as Requests
from simulation.workload import WorkloadSettings as WorkloadSettings
from simulation.workload import generate as generate
