"""What the docs say about examples/router.py."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

from api.settings import ApiSettings

ROOT = Path(__file__).resolve().parents[3]
ROUTER = ROOT / "examples" / "router.py"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code() -> int:
    """Without docstrings, comments and empty lines."""
    lines: set[int] = set()
    is_at_start = True
    for token in tokenize.generate_tokens(io.StringIO(ROUTER.read_text()).readline):
        is_docstring = is_at_start and token.type == tokenize.STRING
        if token.type not in NO_CODE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        is_at_start = token.type in NO_CODE
    return len(lines)


def test_it_is_as_long_as_it_is_said_to_be() -> None:
    for page in ("README.md", "docs/routers.md"):
        (said,) = re.findall(r"examples/router\.py\)[^.]*? in (?:some )?(\d+)\s+lines", (ROOT / page).read_text())
        assert lines_of_code() <= int(said) < lines_of_code() + 10, page


def test_it_looks_for_kvsight_where_kvsight_serves() -> None:
    port = ApiSettings.ignoring_environment().port
    for page in (ROUTER, ROOT / "docs" / "routers.md"):
        said = re.findall(r"KVSIGHT_URL=http://127\.0\.0\.1:(\d+)", page.read_text())
        assert [int(each) for each in said] == [port], page
