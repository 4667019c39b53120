"""`kvsight log`: event logs as files, one module for each command. Start at `reading.py`, which they share."""

from __future__ import annotations

from kvsight.cli.app import App
from kvsight.cli.log.cat import cat
from kvsight.cli.log.copies import merge, slice_log
from kvsight.cli.log.export import export
from kvsight.cli.log.index import index
from kvsight.cli.log.info import info
from kvsight.cli.log.verify import verify

app = App(no_args_is_help=True, help="Look into event logs, check them, cut and merge them.")
app.command("info")(info)
app.command("cat")(cat)
app.command("verify")(verify)
app.command("slice")(slice_log)
app.command("merge")(merge)
app.command("index")(index)
app.command("export")(export)
