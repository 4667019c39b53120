"""Secrets of a service are in none of its outputs: log lines, errors, metrics, answers and process titles."""

import re
from pathlib import Path

import httpx
import typer

from kvsight.cli.main import app
from tests.support.servers.child_process import free_port
from tests.support.servers.service_process import ServiceProcess

API_TOKEN = "api-token-0123456789"
ROUTER_TOKEN = "router-token-0123456789"
REDIS_PASSWORD = "redis-password-0123456789"
KAFKA_PASSWORD = "kafka-password-0123456789"
WRONG_TOKEN = "wrong-token-0123456789"
SECRETS = (API_TOKEN, ROUTER_TOKEN, REDIS_PASSWORD, KAFKA_PASSWORD, WRONG_TOKEN)
BODIES = [
    b"{",
    b'{"model_name": "m"}',
    b'{"model_name": "m", "token_ids": [-1]}',
    b'{"model_name": "m", "token_ids": [1]}',
]


def test_no_output_of_a_service_shows_a_secret(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(f'[router]\ntoken = "{ROUTER_TOKEN}"\nscopes = ["read"]\n')
    variables = {
        "KVSIGHT_LOG_LEVEL": "debug",
        "KVSIGHT_KAFKA": f"127.0.0.1:{free_port()}",  # both are away, so the service complains about them
        "KVSIGHT_KAFKA_SASL_MECHANISM": "PLAIN",
        "KVSIGHT_KAFKA_USERNAME": "kvsight",
        "KVSIGHT_KAFKA_PASSWORD": KAFKA_PASSWORD,
        "KVSIGHT_REDIS": f"redis://kvsight:{REDIS_PASSWORD}@127.0.0.1:{free_port()}/0",
        "KVSIGHT_API_TOKEN": API_TOKEN,
        "KVSIGHT_API_TOKENS_FILE": tokens,
    }
    shown = []
    with ServiceProcess(tmp_path, **variables) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        for token in (API_TOKEN, ROUTER_TOKEN, WRONG_TOKEN):
            headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
            answers = [
                client.post(path, content=body, headers=headers) for path in ("/query", "/query?") for body in BODIES
            ]
            answers += [
                client.get(path, headers=headers) for path in ("/workers", "/fleet", "/dump", "/metrics", "/ready")
            ]
            answers += [client.post("/register", content=body, headers=headers) for body in BODIES]
            answers.append(client.get(f"/elsewhere/{token[:4]}", headers=headers))
            shown += [f"{answer.headers} {answer.text}" for answer in answers]
        assert {401, 403, 404, 422} <= {int(line) for line in statuses(shown)}
        shown.append(Path(f"/proc/{service.pid}/cmdline").read_text())
        shown.append(Path(f"/proc/{service.pid}/comm").read_text())
    shown.append(service.log.read_text())
    assert "kvsight listens on" in shown[-1]
    for secret in SECRETS:
        assert [text for text in shown if secret in text] == []


def statuses(shown: list[str]) -> set[str]:
    """The statuses in the problem documents of some answers."""
    return {text.split('"status":')[1][:3] for text in shown if '"status":' in text and '"title"' in text}


def test_secrets_have_no_flags_because_other_users_see_command_lines() -> None:
    group = typer.main.get_group(app)
    leaves = [leaf for each in group.commands.values() for leaf in getattr(each, "commands", {"": each}).values()]
    flags = {flag for leaf in leaves for parameter in leaf.params for flag in parameter.opts}
    named = {flag for flag in flags if re.search("token|password|secret|key", flag) and flag.startswith("--")}
    assert {flag for flag in named if not flag.endswith(("-file", "-command"))} == {
        "--api-token",  # of client commands; the variable is preferred
        *("--tls-key", "--tokens", "--tokenize-url"),  # a file, the prompt, an address
        *("--tokenize-at-once", "--tokenize-timeout-s"),  # numbers
    }
