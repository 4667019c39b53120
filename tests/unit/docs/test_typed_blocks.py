"""The Python blocks of the documentation pass `mypy --strict`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.test_code_blocks import EXAMPLES, ROOT, blocks

GIVEN = {
    ("docs/caches.md", 4): "from docs_caches_1 import PAGE, TOKENS, prompt\nswa_kv_pool: object\n",
    ("docs/caches.md", 5): "from docs_caches_1 import cache, identity\nfrom engine_cache import StoragePolicy\n",
    ("docs/engine.md", 2): "from docs_engine_1 import publisher\n",
    ("docs/hashing.md", 2): "from kv_events.hashing import local_hashes, token_array\n",
    ("docs/engines/tensorrt_llm.md", 1): "from typing import Any\nllm: Any\nserving: bool\n",
}
"""What a block takes from the text around it, by page and number."""


def modules() -> dict[str, str]:
    """Return the blocks as modules: name -> text. A complete example is checked as a file of its own."""
    found: dict[str, str] = {}
    count: dict[str, int] = {}
    for block in blocks("python"):
        if block.text not in EXAMPLES:
            number = count[block.page] = count.get(block.page, 0) + 1
            name = block.page.removesuffix(".md").replace("/", "_")
            found[f"{name}_{number}"] = GIVEN.get((block.page, number), "") + block.text
    return found


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_python_blocks_are_typed(tmp_path: Path) -> None:
    for name, text in modules().items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", *tmp_path.glob("*.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": f"{tmp_path}:{ROOT}"},
    )
    assert done.returncode == 0, done.stdout
