"""Puts the project's files outside docs/ on the site, where the pages' links expect them."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CODE_OF_CONDUCT.md",
    "LICENSE",
    "README.md",
    "benchmarks/README.md",
    "deploy/grafana/dashboards/kvsight.json",
    "deploy/helm/kvsight/values.yaml",
    "deploy/envoy/envoy.yaml",
    "deploy/haproxy/haproxy.cfg",
    "deploy/haproxy/kvsight.lua",
    "deploy/kubernetes/inference-pool.yaml",
    "deploy/kubernetes/kvsight.yaml",
    "deploy/kubernetes/vllm-with-bridge.yaml",
    "deploy/nginx/kvsight.lua",
    "deploy/nginx/nginx.conf",
    "deploy/prometheus/alerts.yml",
    "docker-compose.yml",
    "examples/debug_a_routing_anomaly.md",
    "examples/litellm.yaml",
    "examples/ray_serve.py",
    "examples/record_a_routing_anomaly.py",
    "examples/router.py",
    "examples/small_router.py",
    "examples/verl.yaml",
)
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of `OUTSIDE`, each at its path in the repository. README.md becomes `project.md`."""
    for name in OUTSIDE:
        files.append(File.generated(config, _place(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite relative links from places in the repository to places on the site."""
    source = page.file.src_uri
    repository_path = "README.md" if source == "project.md" else source
    if repository_path not in OUTSIDE:
        repository_path = f"docs/{repository_path}"
    folder = posixpath.dirname(repository_path)

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        place = _place(target) if target in OUTSIDE else target.removeprefix("docs/")
        return posixpath.relpath(place, posixpath.dirname(source) or ".")

    return _LINK.sub(moved, markdown)


def _place(name: str) -> str:
    return "project.md" if name == "README.md" else name
