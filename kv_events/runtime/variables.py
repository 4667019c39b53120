"""Names of all `KVSIGHT_*` environment variables, and the warning about variables that are set but unknown.

The list is separate from the settings classes, so that every process can check its environment without importing
packages that it does not use. `tests/unit/kvsight/test_variables.py` compares it with the classes and the commands.
"""

from __future__ import annotations

import logging
import os
from difflib import get_close_matches
from functools import cache

logger = logging.getLogger(__name__)

PREFIX = "KVSIGHT_"
SETTINGS = frozenset(
    {
        # everywhere
        "hash_seed",
        # log lines of the commands
        "log_level",
        "log_format",
        # Kafka
        "kafka",
        "kafka_client_id",
        "kafka_tls",
        "kafka_ca_file",
        "kafka_cert_file",
        "kafka_key_file",
        "kafka_key_password_file",
        "kafka_sasl_mechanism",
        "kafka_username",
        "kafka_password",
        "kafka_password_file",
        "kafka_token_file",
        "kafka_token_command",
        "events_topic",
        "control_topic",
        "decisions_topic",
        "topic_partitions",
        "topic_replication",
        "topic_retention_s",
        "compression",
        # publisher
        "model",
        "tenant",
        "worker",
        "dp_rank",
        "block_size",
        "event_log_dir",
        "with_tokens",
        "ledger_pages",
        "zmq",
        "zmq_replay",
        "zmq_topic",
        "replace_zmq",
        "bridge_away_s",
        "metrics_port",
        # indexer
        "redis",
        "redis_password",
        "redis_password_file",
        "redis_ca_file",
        "redis_cert_file",
        "redis_key_file",
        "redis_key_password_file",
        "snapshot_dir",
        "snapshot_interval_s",
        "dead_letter_dir",
        "tenant_limits_file",
        "max_pages",
        "max_set_bytes",
        "max_streams",
        "max_namespaces",
        "worker_ttl_s",
        "forget_after_s",
        # shard groups
        "group",
        "advertise_url",
        "group_deadline_s",
        "group_session_s",
        "group_token_file",
        "group_ca_file",
        # HTTP, and its clients
        "host",
        "port",
        "reuse_port",
        "api_token",
        "api_tokens_file",
        "tls_cert_file",
        "tls_key_file",
        "tls_key_password_file",
        "allowed_hosts",
        "answer_before_ready",
        "max_connections",
        "metrics_max_workers",
        "register_allow",
        "max_registrations",
        "record",
        "record_keep",
        "record_max_bytes",
        "explain_timeout_s",
        "tokenize_url",
        "url",
        # engine caches
        "debug_pools",
        "host_memory_reserve_bytes",
        "mooncake_master",
        "mooncake_metadata_server",
        "mooncake_local_hostname",
        "mooncake_protocol",
        "mooncake_devices",
        "mooncake_segment_bytes",
    }
)
"""Settings that have an environment variable, by field name."""


def variable(field: str) -> str:
    """Environment variable of a setting."""
    return f"{PREFIX}{field.upper()}"


@cache
def report_unknown_variables() -> None:
    """Log a warning for each `KVSIGHT_*` variable that no setting reads, with the nearest name. Once per process."""
    for name in sorted(os.environ):
        field = name.lower().removeprefix(PREFIX.lower())
        if name.upper().startswith(PREFIX) and field not in SETTINGS:
            nearest = get_close_matches(field, sorted(SETTINGS), n=1, cutoff=0.0)[0]
            logger.warning("%s is not a setting and is ignored. The nearest name is %s.", name, variable(nearest))
