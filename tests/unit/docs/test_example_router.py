"""The statements in the docs about the routers in examples/."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from api.settings import ApiSettings

ROOT = Path(__file__).resolve().parents[3]
ROUTERS = [ROOT / "examples" / name for name in ("router.py", "small_router.py")]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(router: Path) -> int:
    """Count lines without docstrings, comments and empty lines."""
    lines: set[int] = set()
    is_at_start = True
    for token in tokenize.generate_tokens(io.StringIO(router.read_text()).readline):
        is_docstring = is_at_start and token.type == tokenize.STRING
        if token.type not in NO_CODE and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        is_at_start = token.type in NO_CODE
    return len(lines)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.name)
def test_it_is_as_long_as_stated(router: Path) -> None:
    for page in ("README.md", "docs/routers.md"):
        said = re.findall(rf"examples/{router.stem}\.py\)[^.]*?(\d+)\s+lines", (ROOT / page).read_text())
        assert len(said) == 1, page
        assert lines_of_code(router) <= int(said[0]) < lines_of_code(router) + 10, page


def test_the_small_one_has_at_most_eighty_lines_and_is_shown_whole() -> None:
    small = ROUTERS[1]
    assert lines_of_code(small) <= 80
    assert f"```python\n{small.read_text()}```\n" in (ROOT / "docs" / "routers.md").read_text()


def test_they_look_for_kvsight_where_kvsight_serves() -> None:
    port = ApiSettings.ignoring_environment().port
    for page in (*ROUTERS, ROOT / "docs" / "routers.md"):
        said = re.findall(r"KVSIGHT_URL=http://127\.0\.0\.1:(\d+)", page.read_text())
        assert said, page
        assert {int(each) for each in said} == {port}, page
