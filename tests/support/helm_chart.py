"""The Helm chart, rendered by Helm's own engine, and the manifests in deploy/kubernetes that are made from it.

`python -m tests.support.helm_chart` (or `make manifests`) writes them.
"""

from pathlib import Path
from typing import Any

import helm_python
import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "kvsight"
MANIFESTS = DEPLOY / "kubernetes" / "kvsight.yaml"
PLAIN: dict[str, Any] = {"kafka": {"bootstrap": "kafka:9092"}, "redis": {"url": "redis://redis:6379/0"}}
"""Values of the plain manifests."""
_HEADER = """\
# Made from deploy/helm/kvsight by `make manifests`: do not edit it there. Change KVSIGHT_KAFKA and KVSIGHT_REDIS:
#   kubectl apply --filename deploy/kubernetes/kvsight.yaml
"""


def render(values: dict[str, Any], release: str = "kvsight") -> dict[str, str]:
    """Return template -> text, without empty ones and the notes. Raises HelmError."""
    with helm_python.Chart.load(CHART) as chart:
        found = chart.render(values=values, name=release, namespace="default")
    templates = {Path(path).name: text.strip() for path, text in sorted(found.items()) if path.endswith(".yaml")}
    return {name: text for name, text in templates.items() if text}


def documents(values: dict[str, Any], release: str = "kvsight") -> list[dict[str, Any]]:
    """Return the rendered objects. Raises HelmError."""
    texts = render(values, release).values()
    return [each for text in texts for each in yaml.safe_load_all(text) if each is not None]


def manifests() -> str:
    """Return the text of the plain manifests."""
    parts = [f"---\n{text.removeprefix('---').strip()}\n" for text in render(PLAIN).values()]
    lines = "".join(parts).replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")
    return _HEADER + "".join(line for line in lines.splitlines(keepends=True) if "helm.sh/chart:" not in line)


if __name__ == "__main__":
    MANIFESTS.write_text(manifests())
