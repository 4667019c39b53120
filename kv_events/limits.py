"""Limits on every size that comes from outside. A larger value is a clear error, never an allocation."""

MAX_RECORD_BYTES = 1_000_000
"""Largest record in the log, in bytes. With its framing it is below the 1 MiB that Kafka accepts by default."""

MAX_PAGES_PER_BATCH = 32_768
"""Largest number of pages that one record may store and remove in total."""

MAX_EVENTS_PER_BATCH = 4_096

MAX_ENGINE_EVENTS = 262_144
"""Largest number of events in one message of an engine. One step of an engine sends up to some ten thousand."""

MAX_ENGINE_PAGES = 2**20
"""Largest number of pages in one event of an engine."""

MAX_TOKENS_PER_QUERY = 4_194_304
MAX_HASHES_PER_QUERY = 262_144
MAX_BLOCK_SIZE = 65_536
MAX_DP_RANK = 65_535
MAX_RANKS = 1024
"""Largest number of ranks that one entry or record of an engine names."""
MAX_NAME_BYTES = 256
"""Largest UTF-8 length of a model, tenant or worker name."""

MAX_DEGRADED_REASON_BYTES = 256
"""Largest UTF-8 length of a degraded reason."""

MAX_CONTROL_BYTES = 4096
"""Largest message on the control topic, in bytes."""

MAX_REQUEST_ID_BYTES = 256
"""Largest UTF-8 length of the id of a request in a router's decision."""

MAX_CANDIDATES = 1024
"""Largest number of candidates in a router's decision."""

MAX_PAGES_PER_DECISION = 65_536
"""Largest number of pages of a prompt that a router's decision keeps. The pages behind them are left out."""

MAX_TOKENS_PER_REQUEST = 2**40
"""Largest number of tokens that a router's decision or its outcome may name."""

MAX_OUTPUT_BLOCKS = 2**24
"""Largest number of pages that a reservation's output may have."""

MAX_EXTRA_KEY_BYTES = 1024
"""Largest UTF-8 length of an extra key, which separates the pages of a namespace."""

MAX_TOKEN_ID = 2**32 - 1

SOCKET_FILES = 4
"""File descriptors of a connected ZMQ socket with a monitor."""

URL_PATTERN = (
    r"^https?://(?:[A-Za-z0-9][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[A-Za-z0-9_.~-]+)*/?(?![\s\S])"
)
"""Addresses where engines take requests: `http://HOST:PORT`, with a path if wanted, without user names and queries."""
