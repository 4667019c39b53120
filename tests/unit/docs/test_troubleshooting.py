"""The messages that the troubleshooting page quotes are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("api", "bridge", "indexer", "kv_events", "kvsight", "publisher")
PLACEHOLDER = re.compile(r"\.\.\.|\b[NM]\b|: ")


def test_quoted_messages_exist() -> None:
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    messages = [quote for cell in cells for quote in re.findall("`([^`]+)`", cell) if " " in quote]
    assert len(messages) > 10
    parts = {part.strip(" ,:") for message in messages for part in PLACEHOLDER.split(message)}
    assert [part for part in sorted(parts) if part not in source and not part.startswith("KVSIGHT_")] == []
