"""The command, and the straight list of its checks."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_events.http.service import DEFAULT_URL
from kvsight.cli.doctor.checks import Check, CheckResult, examine
from kvsight.cli.shared.console import UsageError, print_json, print_lines, waiting
from kvsight.cli.shared.flags import BROKER, KAFKA, REDIS, ApiToken, AsJson, Flag, Url, with_flags
from kvsight.cli.shared.prompts import parse_tokens, text_of
from kvsight.extras import require

if TYPE_CHECKING:
    from kvsight.cli.doctor.probe import PromptTrace
    from kvsight.cli.doctor.servers import Servers

_EXIT_BROKEN = 1
_DEFAULT_TENANT = "default"

_FLAGS = {
    "kafka": BROKER,
    "redis": Flag(str, "Redis of the snapshots, to check it: redis://HOST:PORT/DB", True),
    "topic_partitions": Flag(int, "Partitions of new topics, for more than 8 members of a group.", True),
    "topic_replication": Flag(int, "Replicas of new topics: 3 to survive the loss of a broker.", True),
    "topic_retention_s": Flag(int, "Seconds for which new topics keep records, if not a day.", True),
    "snapshot_interval_s": Flag(float, "Seconds between the service's snapshots, if not 30.", True),
}
"""Of `IndexerSettings`."""


@with_flags(_FLAGS, KAFKA, REDIS)
def doctor(
    *,
    should_create: Annotated[
        bool, typer.Option("--create-topics", help="Only create the topics that do not exist.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_token: ApiToken = None,
    engine: Annotated[str | None, typer.Option(help="HTTP address of an engine: http://HOST:PORT")] = None,
    engine_token_file: Annotated[Path | None, typer.Option(help="File with the engine's API key.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text, token ids or @FILE. Default: random.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, if the engine names it otherwise.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only events and pages of this worker.")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant (routing group).")] = _DEFAULT_TENANT,
    wait: Annotated[float, typer.Option(help="Seconds to wait for events.", min=0.1, max=600)] = 5.0,
    as_json: AsJson = False,
    flags: dict[str, Any],
) -> None:
    """Check the whole chain, and name the first broken link.

    Checks Kafka, its topics and their retention, Redis and the service. With --engine it sends a prompt to the engine,
    sees its events arrive, compares clocks, block sizes and hash seeds, asks the index for the prompt, and compares
    the answer with the tokens that the engine reuses. Parts that are not given are skipped.

    Ends with exit code 1 at the first failure, and prints what to do.

    --create-topics creates the topics of events, resync requests and decisions. Those that exist are not changed;
    differences from the settings are reported on stderr.

    Example: kvsight doctor --kafka localhost:9092 --engine http://localhost:8001
    """
    if prompt is not None and engine is None:
        raise UsageError("--prompt needs --engine")
    if flags["redis"] is not None:
        require("serve", "kvsight doctor --redis")
    from indexer.settings import IndexerSettings
    from kv_events.runtime.settings import read_secret
    from kvsight.cli.doctor.probe import PromptTrace
    from kvsight.cli.doctor.servers import Servers, create_topics
    from kvsight.cli.shared.engine_client import EngineClient
    from kvsight.client import Client

    settings = IndexerSettings.from_flags(**flags)
    if should_create:
        if settings.kafka is None:
            raise UsageError("--create-topics needs --kafka HOST:PORT")
        create_topics(settings)
        return
    token = None if engine_token_file is None else read_secret("engine_token_file", engine_token_file)
    typed = _prompt(prompt)
    with ExitStack() as open_clients:
        client = open_clients.enter_context(Client(url, token=api_token))
        known = None if engine is None else open_clients.enter_context(closing(EngineClient(engine, token)))
        servers = Servers(settings, client, url)
        probe = PromptTrace(servers, known, typed, model, worker, tenant, wait)
        _report(_checks(servers, probe), as_json)


def _checks(servers: Servers, probe: PromptTrace) -> list[Check]:
    of_kafka = "see `Connect to Kafka` in docs/operations.md"
    return [
        Check("broker", servers.broker, f"start the broker, or correct --kafka; {of_kafka}"),
        Check("topics", servers.topics, of_kafka),
        Check("retention", servers.retention, of_kafka),
        Check("Redis", servers.redis, "start Redis, or correct --redis; see `Connect to Redis` in docs/operations.md"),
        Check("service", servers.ready, "start `kvsight serve`, or correct --url and --api-token"),
        Check(
            "engine", probe.engine_answers, "start the engine's HTTP server, or correct --engine, --engine-token-file"
        ),
        Check("events", probe.events, "run this command again; if it fails again, look at the log of that part"),
        Check("clocks", probe.clocks, "run this command again"),
        Check("block size", probe.block_size, "run this command again"),
        Check("hash seed", probe.hash_seed, "run this command again"),
        Check("answer", probe.answer, "run this command again"),
    ]


def _report(checks: list[Check], as_json: bool) -> None:
    findings: list[CheckResult] = []
    with waiting("checking"):
        for finding in examine(checks):
            findings.append(finding)
            if not as_json:
                print_lines(finding.lines())
    broken = next((finding.check for finding in findings if finding.state == "FAILED"), None)
    if as_json:
        print_json({"broken": broken, "checks": findings})
    if broken is not None:
        raise typer.Exit(_EXIT_BROKEN)


def _prompt(typed: str | None) -> list[int] | str | None:
    """Token ids, if the text consists of numbers. Raises UsageError, OSError."""
    if typed is None:
        return None
    text = text_of(typed)
    if not text.strip():
        raise UsageError("--prompt is empty")
    is_numbers = all(word.isdecimal() for word in text.replace(",", " ").split())
    return parse_tokens(text, "--prompt") if is_numbers else text
