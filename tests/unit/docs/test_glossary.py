"""docs/glossary.md defines each term once."""

from __future__ import annotations

import re
from pathlib import Path

GLOSSARY = Path(__file__).resolve().parents[3] / "docs" / "glossary.md"


def test_each_term_is_defined_once() -> None:
    rows = re.findall(r"^\| (\*\*.*?) \|", GLOSSARY.read_text(), re.M)
    terms = [term.lower() for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row)]
    assert len(terms) > 50
    assert sorted(terms) == sorted(set(terms))
