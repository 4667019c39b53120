"""The pages of the documentation, their code blocks and their command lines."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """One fenced block."""

    page: str
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks in some languages, page by page."""
    for page in PAGES:
        for language, text in _BLOCK.findall(page.read_text()):
            if language in languages:
                yield Block(str(page.relative_to(ROOT)), language, dedent(text))


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words of every command line in a console block."""
    for block in blocks("console", ""):
        joined = re.sub(r" *\\\n +", " ", block.text)
        lines = (
            joined.splitlines() if block.language == "" else re.findall(r"^ *\$ ((?:[^'\n]|'[^']*')*)", joined, re.M)
        )
        for line in lines:
            if line.startswith("kvsight ") or block.language == "console":
                yield block.page, shlex.split(line, comments=True)
