"""What to do about each cause for which a view cannot be trusted: one sentence, used wherever a cause is shown.

The tables in docs/operations.md and docs/troubleshooting.md begin with the same sentences, which tests compare.
"""

_WAIT = "Wait: the indexer requests a resync by itself."
_PASSES = "Wait: it passes by itself."
_ROOM = "Raise `pages` or `worker_streams` in --tenant-limits-file."
OF_CONNECTIONS = {
    "connection refused": "Start the engine with KV events on, and with tcp://*:PORT as its own `endpoint`: with an "
    "address in place of * it connects and does not listen.",
    "no answer within": "Check that the machine of the engine runs, and that no firewall drops the connection.",
    "has not answered as a ZMQ publisher": "Give the port of the engine's KV events: another server listens on this "
    "one.",
    "host name is unknown": "Correct the host name, or wait until the name server knows it.",
    "no address was found": "Correct the host name, or wait until the name server knows it.",
    "still being looked up": _PASSES,
    "is not permitted by": "Add the address to --register-allow.",
    "not connected yet": _PASSES,
    "the connection is lost": "Restart the engine, or forget it with `kvsight unregister`.",
    "restarted so often": "Give each engine a port of its own: several send on this address.",
    "has another owner": "Give each engine a name of its own.",
    "the index has accepted none": "Look at the `reason` of kvsight_records_rejected_total.",
    "Address already in use": "Give a port that no other process of this machine has.",
    "nothing has arrived": "Send the engine a request: it sends events only while it works.",
}
"""Part of the reason why an engine is not read -> what to do."""
OF_VIEWS = {
    "missed ": "Set the engine's `replay_endpoint`, from which missed batches are fetched, and clear its cache or "
    "restart it.",
    "batches lost": "Clear the engine's cache or restart it, or wait until its pages are replaced.",
    "pages left out": "Clear the engine's cache or restart it, or wait until its pages are replaced.",
    "engine not heard": "Restore the connection from the bridge to the engine.",
    "replaying": _PASSES,
    "block size ": "Correct `block_size` in the engine's entry or registration, or leave it out.",
    "attention group": "Register the engine with `attention_chunk_size` if the model has chunked local attention.",
    "its attention groups": "Nothing: kvsight cannot score this model. Please report it.",
    "ledger full": "Raise KVSIGHT_LEDGER_PAGES, and restart the publisher.",
    "closed": "Nothing, if its publisher was stopped on purpose.",
    "no heartbeat": "Start the worker or its publisher again, unless it passes; `kvsight unregister` forgets a dead "
    "one.",
    "log unreadable since": "Restore Kafka, or the folder of the event log.",
    "index full": "Raise KVSIGHT_MAX_PAGES or KVSIGHT_MAX_SET_BYTES.",
    "tenant limit": _ROOM,
    **dict.fromkeys(("new", "gap", "digest", "restart", "resync cut off", "log replaced", "internal error"), _WAIT),
}
"""Beginning of the reason why a view is not live -> what to do."""
REGISTER = "kvsight register NAME=tcp://HOST:PORT --model MODEL"
NO_ENGINE = f"let the service read an engine: `{REGISTER}`, or start it with --engine"
NO_PUBLISHER = "let an engine or `kvsight bridge` publish to the log of this service; `kvsight doctor` checks each link"


def remedy(cause: str) -> str:
    """Return what to do about a cause, or "" if nothing is known. cause: of a view or of an engine's connection."""
    of_views = (text for beginning, text in OF_VIEWS.items() if cause.startswith(beginning))
    return next((text for part, text in OF_CONNECTIONS.items() if part in cause), "") or next(of_views, "")
