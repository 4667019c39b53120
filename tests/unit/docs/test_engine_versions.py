"""The versions that the pages of engines name are those that the tests use."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version as installed
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.compose import SERVICES
from tests.support.engines.released_modules import RELEASES

ROOT = Path(__file__).resolve().parents[3]
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}


def versions(engine: str) -> str:
    """Return the section about versions of an engine's page, as one line."""
    page = (ROOT / "docs" / "engines" / f"{engine}.md").read_text()
    return " ".join(page.partition("## Versions\n")[2].partition("\n## ")[0].split())


@pytest.mark.parametrize("engine", TITLES)
def test_the_versions_that_are_called_tested_are_tested(engine: str) -> None:
    said = re.search(rf"is tested with the event modules of {TITLES[engine]} (\S+) and (\d\S*\d)", versions(engine))
    assert said is not None
    assert list(said.groups()) == [number for name, number in RELEASES if name == engine]


@pytest.mark.parametrize("engine", TITLES)
def test_the_image_of_the_compose_stack_is_new_enough(engine: str) -> None:
    least = [Version(each) for each in re.findall(rf"{TITLES[engine]} (\S+) or newer", versions(engine))]
    tested = [Version(number) for name, number in RELEASES if name == engine]
    image = Version(SERVICES[engine]["image"].rpartition(":v")[2])
    assert least
    assert min(least) == min(tested)  # nothing older is tested
    assert max(least) <= image == max(tested)


def test_hybrid_models_have_a_least_version_of_vllm_and_the_reason() -> None:
    said = versions("vllm")
    assert "need vLLM 0.21 or newer" in said
    assert "github.com/vllm-project/vllm/issues/49537" in said


def test_mooncakes_least_version_is_that_of_the_extra() -> None:
    said = re.search(r"Use Mooncake (\S+) or newer", versions("mooncake"))
    assert said is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (needed,) = [one for one in map(Requirement, extras["mooncake"]) if one.name.startswith("mooncake")]
    assert {str(each) for each in needed.specifier if each.operator == ">="} == {f">={said[1]}"}
    assert installed(needed.name) in needed.specifier
    assert "-DENABLE_KV_EVENTS=ON" in versions("mooncake")
