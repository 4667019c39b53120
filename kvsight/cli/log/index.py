"""`kvsight log index`"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvsight.cli.console import compile_kernels, err, print_json, progress_bar, stop_signals
from kvsight.cli.log.reading import LogFolder, LogInput
from kvsight.cli.log.verify import damage_facts
from kvsight.cli.options import AsJson
from kvsight.cli.tables import count

if TYPE_CHECKING:
    from indexer.replay import LogIndexer

_FOLLOW_S = 1.0


def index(
    log: LogFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on while the log grows, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the key frames and the time index of a log, so that any moment opens fast.

    Files that exist are kept and continued. They can be deleted at any time.

    Example: kvsight log index run.log
    """
    source = LogInput(log)
    indexer = index_all(log)
    if follow:
        asyncio.run(_follow(indexer))
    faults = [*indexer.timeline.faults, *indexer.failures.values()]
    source.damage, source.faults = indexer.timeline.damage, faults
    source.find_torn_tail()
    if as_json:
        facts = {"key_frames_written": indexer.frames_written, "next_index": indexer.next_index}
        print_json(facts | damage_facts(source))
    else:
        err.print(f"{log}: {count(indexer.frames_written, 'key frame')} written, up to record {indexer.next_index}")
    source.exit_if_damaged()


def index_all(log: Path) -> LogIndexer:
    """Write the key frames and the time index of a log up to its present end. Raises EventLogError, OSError."""
    compile_kernels("indexer.replay")
    from indexer.replay import LogIndexer

    indexer = LogIndexer(log)
    with progress_bar() as bar:
        task = bar.add_task("indexing", total=indexer.timeline.next_index)
        indexer.advance(lambda done: bar.update(task, completed=done))
    return indexer


async def _follow(indexer: LogIndexer) -> None:
    stop = stop_signals()
    while not stop.is_set():
        await asyncio.to_thread(indexer.advance)
        try:
            await asyncio.wait_for(stop.wait(), _FOLLOW_S)
        except TimeoutError:
            continue
