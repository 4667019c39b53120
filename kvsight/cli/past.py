"""`kvsight replay --serve`"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvsight.cli.allocator import keep_freed_memory
from kvsight.cli.console import UsageError, compile_kernels, err
from kvsight.cli.log.reading import LogInput
from kvsight.cli.moments import parse_moment
from kvsight.cli.open_files import allow_open_files
from kvsight.extras import require_serve

_LARGE_BYTES = 64 * 2**20
"""A log of this size takes about a second to replay."""


def serve_past(folder: Path | None, at: str | None, others: Mapping[str, object], **flags: Any) -> None:
    """Serve the past of an event log until SIGINT or SIGTERM. others: flags that exclude it -> their values.
    flags: settings of the HTTP side.

    Raises UsageError, and the errors of `api.server.listen`.
    """
    for flag, value in others.items():
        if value is not None:
            raise UsageError(f"give either --serve or {flag}, not both")
    if folder is None:
        raise UsageError("give the folder of an event log")
    require_serve("kvsight replay --serve")
    from api.settings import ApiSettings

    settings = ApiSettings.from_flags(**flags)
    log, moment = LogInput(folder), parse_moment(at)
    log.find_torn_tail()
    # each moment that is opened would repeat them; the page shows them as marks
    logging.getLogger("indexer.applier").setLevel(logging.ERROR)
    keep_freed_memory()
    allow_open_files(settings.max_connections)
    compile_kernels("api.replay.app")
    from api.replay.app import create_past_app
    from api.replay.moments import OutsideTheLogError
    from api.server import listen, run_server, url_of

    try:
        app = create_past_app(folder, settings, moment, log.damage_lines)
    except OutsideTheLogError as error:
        raise UsageError(f"--at {error}") from None
    bound = listen(settings)
    for line in log.damage_lines:
        err.print(f"damaged: {line}", markup=False)
    if log.num_bytes > _LARGE_BYTES and not any(folder.glob("*.kvframe")):
        err.print(f"moments open faster after `kvsight log index {folder}`", markup=False)
    err.print(f"the past of {folder} is served on {url_of(bound, settings)} (docs at /docs)", markup=False)
    run_server(app, settings, bound)
