"""`kvsight log export`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvsight.cli.console import UsageError, compile_kernels, err, print_json
from kvsight.cli.log.reading import LogFolder, LogInput
from kvsight.cli.log.verify import damage_facts
from kvsight.cli.moments import moment_fault, parse_moment
from kvsight.cli.options import AsJson
from kvsight.cli.replay import views_at
from kvsight.cli.tables import count
from kvsight.extras import require_analysis


def export(
    log: LogFolder,
    parquet: Annotated[Path, typer.Option(help="Folder for the Parquet files, new or empty.")],
    at: Annotated[str | None, typer.Option(help="The moment of the views. Default: the end of the log.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the events of a log, and its views at a moment, as Parquet files.

    events.parquet has a row for each page that a batch stores or removes, views.parquet one for each page that a worker
    holds. --at accepts what `kvsight replay --at` does.

    Example: kvsight log export run.log --parquet run.parquet
    """
    require_analysis("kvsight log export")
    source, moment = LogInput(log), parse_moment(at)
    if parquet.exists() and (not parquet.is_dir() or any(parquet.iterdir())):
        raise UsageError(f"{parquet}: not an empty folder")
    compile_kernels("indexer.replay")
    from analysis.parquet import write_events, write_views

    replayed = LogInput(log)
    views, extent = views_at(replayed, moment)
    fault = moment_fault(extent, moment)
    if fault:
        raise UsageError(fault)
    source.faults, source.warnings = replayed.faults, replayed.warnings
    parquet.mkdir(parents=True, exist_ok=True)
    num_events = write_events(parquet / "events.parquet", source.records("exporting"))
    num_pages = write_views(parquet / "views.parquet", views)
    if as_json:
        print_json({"folder": str(parquet), "event_rows": num_events, "pages_held": num_pages, **damage_facts(source)})
    else:
        err.print(f"{parquet}: {count(num_events, 'row')} of events, {count(num_pages, 'page')} held", markup=False)
    source.exit_if_damaged()
