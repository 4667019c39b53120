"""Names of all `KVSIGHT_*` environment variables, the check that a process knows all that are set, and quantities.

The list is separate from the settings classes, so that every process can check its environment without importing
packages that it does not use. `tests/commands/test_settings.py` compares it with the classes and the commands.
"""

import logging
import os
import re
from functools import cache

from kv_events.errors import InvalidValueError, UnknownVariableError
from kv_events.runtime.words import nearest

logger = logging.getLogger(__name__)

PREFIX = "KVSIGHT_"
_SETTINGS = """
hash_seed url
kafka kafka_tls kafka_ca_file kafka_cert_file kafka_key_file kafka_key_password_file kafka_sasl_mechanism kafka_username
kafka_password kafka_password_file kafka_token_file kafka_token_command
events_topic control_topic topic_partitions topic_replication topic_retention_s
model tenant worker block_size event_log_dir with_tokens ledger_pages zmq zmq_replay zmq_topic replace_zmq metrics_port
host_memory_reserve_bytes
redis redis_password snapshot_interval_s max_pages max_set_bytes max_streams max_namespaces worker_ttl_s forget_after_s
group advertise_url port api_token
"""
_FLAGS = """
log_level log_format kafka_client_id decisions_topic reservations_topic
redis_password_file redis_ca_file redis_cert_file redis_key_file redis_key_password_file
snapshot_dir record record_keep record_max_bytes explain_timeout_s tenant_limits_file dead_letter_dir
host reuse_port max_connections allowed_hosts answer_before_ready metrics_max_workers
tokenize_url tokenizer_file tokenize_timeout_s tokenize_at_once
api_tokens_file tls_cert_file tls_key_file tls_key_password_file
register_allow max_registrations forget_engine_s bridge_away_s policy predict_s reservation_ttl_s
group_deadline_s group_session_s group_token_file group_ca_file
"""
SETTINGS = frozenset(_SETTINGS.split())
"""Settings that have an environment variable, by field name."""
FLAGS = frozenset(_FLAGS.split())
"""Settings that only commands read, by field name: flags. The variables that they had count in this release only."""

_GONE = {
    "dp_rank": "engines give their rank themselves",
    "compression": "set compression.type of the topic instead",
    "debug_pools": "it was a check for tests",
}
_RENAMED = {
    "mooncake_master": "MOONCAKE_MASTER",
    "mooncake_metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "mooncake_local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "mooncake_protocol": "MOONCAKE_PROTOCOL",
    "mooncake_devices": "MOONCAKE_DEVICE",
    "mooncake_segment_bytes": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
}
"""Field -> the variable that Mooncake's other users read, too."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|$)")
"""In what Kubernetes tells a container of a service: KVSIGHT_SERVE_SERVICE_HOST, KVSIGHT_SERVE_PORT=tcp://..."""


def variables_of(field: str) -> list[str]:
    """Environment variables that set a field: the one of today, then that of the version before."""
    names = [_RENAMED[field]] if field in _RENAMED else []
    return [*names, f"{PREFIX}{field.upper()}"] if field in SETTINGS | FLAGS | set(_RENAMED) else []


def variable(field: str) -> str:
    """How a user sets a field: its environment variable, else its flag, else the field itself."""
    if field in SETTINGS:
        return f"{PREFIX}{field.upper()}"
    return f"--{field.replace('_', '-')}" if field in FLAGS else _RENAMED.get(field, field)


@cache
def check_variables() -> None:
    """Raise UnknownVariableError for a `KVSIGHT_*` variable that does not exist. Once per process.

    A variable of the version before is logged with its new form.
    """
    for name, value in sorted(os.environ.items()):
        field = name.lower().removeprefix(PREFIX.lower())
        if not name.upper().startswith(PREFIX) or field in SETTINGS:
            continue
        if field in FLAGS:
            logger.warning("%s is the flag %s now. The variable counts in this release only.", name, variable(field))
        elif field in _RENAMED:
            logger.warning("%s is %s now, and counts in this release only.", name, _RENAMED[field])
        elif field in _GONE:
            logger.warning("%s is gone: %s.", name, _GONE[field])
        elif not (_SERVICE_LINK.search(name) and (not name.endswith("_PORT") or "://" in value)):
            raise UnknownVariableError(name, variable(nearest(field, SETTINGS)))


# Numbers with a unit, as people write them in flags and variables: `20GiB`, `7d`
BYTES = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


LEAST_LOG = "16MiB"
"""Smallest bound on the size of a recording: eight files of a few large records fit."""


def parse_quantity(field: str, text: str, units: dict[str, int], least: str | None = None) -> float:
    """Return a positive number, at least `least`. units: unit -> factor. Raises InvalidValueError."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if found is None or found[2] not in units or not float(found[1]) > 0:
        expected = f"a positive number with one of the units {', '.join(filter(None, units))}"
        raise InvalidValueError(field, text, expected)
    number = float(found[1]) * units[found[2]]
    if least is not None and number < parse_quantity(field, least, units):
        raise InvalidValueError(field, text, f"at least {least}")
    return number
