"""The Helm chart, rendered by Helm itself, and the manifests, checked against the schemas of Kubernetes."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from bridge.settings import parse_engine, read_engines
from tests.support.compose import ROOT, check_command_line, command, documented, unknown_settings
from tests.support.helm_chart import CHART, DEPLOY, MANIFESTS, PLAIN, documents, manifests

BRIDGE = {"enabled": True, "engines": [{"worker": "w", "model": "m", "endpoint": "tcp://e:5557", "num_ranks": 2}]}
EVERYTHING: dict[str, Any] = {
    "image": {"repository": "registry/kvsight", "tag": "t"},
    "imagePullSecrets": [{"name": "pull"}],
    "kafka": {"bootstrap": "a:9092,b:9092"},
    "redis": {"existingSecret": "redis", "secretKey": "address"},
    "env": {"KVSIGHT_EVENTS_TOPIC": "events", "KVSIGHT_WORKER_TTL_S": 20},
    "envFrom": [{"secretRef": {"name": "kafka"}}],
    "volumes": [{"name": "certificates", "secret": {"secretName": "kafka"}}],
    "volumeMounts": [{"name": "certificates", "mountPath": "/etc/certificates", "readOnly": True}],
    "serve": {
        "replicas": 3,
        "port": 9000,
        "apiToken": {"existingSecret": "api"},
        "args": ["--no-answer-before-ready"],
        "env": {"KVSIGHT_WORKER_TTL_S": 30, "KVSIGHT_MAX_PAGES": 100000000},
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "podDisruptionBudget": {"minAvailable": "50%"},
    },
    "bridge": {
        **BRIDGE,
        "podAnnotations": {"a": "b"},
        "nodeSelector": {"a": "b"},
        "args": ["--bridge-away-s", 60],
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"from": [{"namespaceSelector": {}}], "egressPorts": [9094]},
}
SMALL: dict[str, Any] = {
    "kafka": {"bootstrap": "a:9092"},
    "serve": {"podDisruptionBudget": {"enabled": False}},
    "serviceAccount": {"create": False},
    "networkPolicy": {"enabled": False},
}
GROUP: dict[str, Any] = {**PLAIN, "serve": {"group": "members"}, "networkPolicy": {"from": [{"namespaceSelector": {}}]}}
CASES = {
    "plain": PLAIN,
    "everything": EVERYTHING,
    "small": SMALL,
    "bridge": {**PLAIN, "bridge": BRIDGE},
    "group": GROUP,
}
VERSIONS = ("1.27", "1.34")
FOREIGN = ("monitoring.coreos.com", "gateway.networking.k8s.io", "inference.networking.k8s.io")
"""Of operators and extensions, not of Kubernetes itself."""
each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


def kinds(values: dict[str, Any]) -> list[str]:
    return sorted(each["kind"] for each in documents(values))


def pods_of(values: dict[str, Any]) -> list[Any]:
    return [each["spec"]["template"] for each in documents(values) if each["kind"] == "Deployment"]


def one(kind: str, name: str, values: dict[str, Any]) -> Any:
    (found,) = [each for each in documents(values) if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container(name: str, values: dict[str, Any]) -> Any:
    return one("Deployment", f"kvsight-{name}", values)["spec"]["template"]["spec"]["containers"][0]


def variables(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(name, values)["env"]}


def check(objects: list[dict[str, Any]], version: str) -> None:
    for each in objects:
        if each["apiVersion"].partition("/")[0] in FOREIGN:
            continue
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@each_case
def test_every_rendered_object_is_valid(values: dict[str, Any], version: str) -> None:
    check(documents(values), version)


@each_case
def test_helm_has_nothing_to_complain_about(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


def test_objects_that_are_switched_off_are_not_rendered() -> None:
    assert kinds(SMALL) == ["Deployment", "Service"]
    always = ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceAccount"]
    assert kinds(PLAIN) == always
    of_bridge = ["ConfigMap", "Deployment", "NetworkPolicy", "Service"]
    assert kinds({**PLAIN, "bridge": BRIDGE}) == sorted([*always, *of_bridge])
    assert kinds(EVERYTHING) == sorted([*always, *of_bridge, "ServiceMonitor", "ServiceMonitor"])


@each_case
def test_every_command_line_is_one_the_command_accepts(values: dict[str, Any]) -> None:
    for pod in pods_of(values):
        check_command_line(pod["spec"]["containers"][0]["args"])


@each_case
def test_no_container_has_more_rights_than_it_needs(values: dict[str, Any]) -> None:
    for pod in (each["spec"] for each in pods_of(values)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False  # KVSIGHT_PORT of a service would be read as a setting
        for context in (found["securityContext"] for found in pod["containers"]):
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


@each_case
def test_every_selector_finds_its_pods_and_every_port_and_volume_exists(values: dict[str, Any]) -> None:
    objects, pods = documents(values), pods_of(values)
    for pod in pods:
        volumes = {each["name"] for each in pod["spec"]["volumes"]}
        ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        for found in pod["spec"]["containers"]:
            assert {mount["name"] for mount in found["volumeMounts"]} <= volumes
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                assert probe not in found or found[probe]["httpGet"]["port"] in ports
    for each in objects:
        spec = each.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        labels = selector.get("matchLabels", selector)
        if each["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            chosen = [pod for pod in pods if labels.items() <= pod["metadata"]["labels"].items()]
            assert len(chosen) == 1, each["metadata"]["name"]
            names = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
            if each["kind"] == "Service":
                assert {port["targetPort"] for port in spec["ports"]} == names
            if each["kind"] == "NetworkPolicy":
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == names


def test_a_cluster_may_choose_the_user() -> None:
    values = {**PLAIN, "podSecurityContext": {"runAsUser": None, "runAsGroup": None}}
    pod = one("Deployment", "kvsight-serve", values)["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_a_service_monitor_finds_its_service() -> None:
    objects = documents(EVERYTHING)
    services = [each for each in objects if each["kind"] == "Service"]
    monitors = [each for each in objects if each["kind"] == "ServiceMonitor"]
    for each in monitors:
        labels = each["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in services if labels <= one["metadata"]["labels"].items()]
        assert [port["port"] for port in each["spec"]["endpoints"]] == [
            port["name"] for port in service["spec"]["ports"]
        ]
        assert each["metadata"]["labels"]["release"] == "prometheus"


def test_probes_ask_the_routes_of_the_service() -> None:
    found = container("serve", PLAIN)
    paths = {name: found[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/ready", "liveness": "/health", "readiness": "/health"}


def test_settings_reach_the_containers() -> None:
    serve = variables("serve", EVERYTHING)
    assert serve["KVSIGHT_KAFKA"] == "a:9092,b:9092"
    assert serve["KVSIGHT_REDIS"] == {"secretKeyRef": {"name": "redis", "key": "address"}}
    assert serve["KVSIGHT_API_TOKEN"] == {"secretKeyRef": {"name": "api", "key": "token"}}
    assert serve["KVSIGHT_WORKER_TTL_S"] == "30"  # that of serve wins
    assert serve["KVSIGHT_MAX_PAGES"] == "100000000"  # no exponent
    assert container("serve", EVERYTHING)["args"][-1] == "--no-answer-before-ready"
    assert container("bridge", EVERYTHING)["args"][-2:] == ["--bridge-away-s", "60"]
    bridge = variables("bridge", EVERYTHING)
    assert bridge["KVSIGHT_EVENTS_TOPIC"] == "events"
    assert not {"KVSIGHT_API_TOKEN", "KVSIGHT_REDIS"} & bridge.keys()
    assert container("serve", EVERYTHING)["image"] == "registry/kvsight:t"


def test_members_of_a_group_know_their_addresses_and_reach_each_other() -> None:
    settings = variables("serve", GROUP)
    assert settings["KVSIGHT_GROUP"] == "members"
    assert settings["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert settings["KVSIGHT_ADVERTISE_URL"] == "http://$(POD_IP):8000"
    assert [*settings].index("POD_IP") < [*settings].index("KVSIGHT_ADVERTISE_URL")  # only earlier ones are expanded
    policy = one("NetworkPolicy", "kvsight-serve", GROUP)["spec"]
    members = {"podSelector": policy["podSelector"]}
    assert members in policy["ingress"][0]["from"]
    assert {"to": [members], "ports": [{"port": "http", "protocol": "TCP"}]} in policy["egress"]
    assert not {"KVSIGHT_GROUP", "KVSIGHT_ADVERTISE_URL"} & variables("serve", PLAIN).keys()


def test_every_setting_is_one_the_code_reads() -> None:
    for name, values in (("serve", EVERYTHING), ("bridge", EVERYTHING), ("serve", GROUP)):
        assert not unknown_settings(variables(name, values))


def test_the_bridge_reads_the_engines_of_the_values(tmp_path: Path) -> None:
    config = one("ConfigMap", "kvsight-bridge", EVERYTHING)
    (tmp_path / "engines.json").write_text(config["data"]["engines.json"])
    (engine,) = read_engines(tmp_path / "engines.json")
    assert (engine.worker, engine.model, engine.endpoint, engine.num_ranks) == ("w", "m", "tcp://e:5557", 2)
    changed = {**EVERYTHING, "bridge": {**BRIDGE, "engines": [{"worker": "w2", "model": "m", "endpoint": "tcp://e:5"}]}}
    sums = [
        one("Deployment", "kvsight-bridge", values)["spec"]["template"]["metadata"]["annotations"]["checksum/engines"]
        for values in (EVERYTHING, changed)
    ]
    assert sums[0] != sums[1]  # so that the pod restarts


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "kafka.bootstrap"),
        ({**PLAIN, "bridge": {"enabled": True}}, "bridge.engines"),
        ({**PLAIN, "redis": {"url": "redis:6379"}}, "redis"),
        ({**PLAIN, "serv": {}}, "serv"),
        ({**PLAIN, "serve": {"port": 70000}}, "port"),
        ({**PLAIN, "env": {"kvsight_port": 1}}, "kvsight_port"),
        ({**PLAIN, "serve": {"group": "a group"}}, "group"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(words)):
        documents(values)


def test_the_documented_installation_renders() -> None:
    install = next(line for line in documented("Helm chart") if line.startswith("helm install"))
    words = install.split()
    assert words[:4] == ["helm", "install", "kvsight", "deploy/helm/kvsight"]
    assert set(words[4::2]) == {"--set"}
    values = helm_python.parse_set_string(",".join(words[5::2]))
    check(documents(values), VERSIONS[-1])
    page = (ROOT / "docs/deployment.md").read_text()
    names = {each["metadata"]["name"] for each in documents(values)}
    assert set(re.findall(r"(?:deployment|service)/([\w-]+)|http://([\w-]+):8000", page)) - {("", "localhost")} <= {
        (name, "") for name in names
    } | {("", name) for name in names}
    shown = {
        name for cell in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", cell)
    }
    chart = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in shown - {"group", "observability", "record", "vllm", "sglang"}:
        found = chart
        for part in name.split("."):
            assert part in found, name
            found = found[part]


def test_another_release_has_names_of_its_own() -> None:
    assert {each["metadata"]["name"].partition("-serve")[0] for each in documents(PLAIN, "blue")} == {"blue-kvsight"}


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert MANIFESTS.read_text() == manifests(), "run `make manifests`"


@pytest.mark.parametrize("file", sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda file: file.name)
def test_every_plain_manifest_is_valid(file: Path) -> None:
    objects = list(yaml.safe_load_all(file.read_text()))
    assert objects
    check(objects, VERSIONS[-1])


def test_the_sidecar_reads_the_engine_beside_it() -> None:
    (deployment,) = yaml.safe_load_all((DEPLOY / "kubernetes/vllm-with-bridge.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (engine,), (bridge,) = pod["containers"], pod["initContainers"]
    assert [*engine["args"]] == command("vllm")
    assert bridge["restartPolicy"] == "Always"
    config = json.loads(engine["args"][-1])
    read = parse_engine(bridge["args"][-1].removeprefix("--engine="))
    assert read.model == engine["args"][0]
    assert read.endpoint == config["endpoint"].replace("*", "127.0.0.1")
    assert read.replay_endpoint == config["replay_endpoint"].replace("*", "127.0.0.1")


def test_chart_image_and_package_have_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert {chart["version"], chart["appVersion"], project["version"]} == {project["version"]}
    for file in (DEPLOY / "kubernetes").glob("*.yaml"):
        assert set(re.findall(r"image: kvsight:(\S+)", file.read_text())) == {project["version"]}


def test_the_pool_names_the_picker_whose_pods_take_its_requests() -> None:
    objects = {
        each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes/inference-pool.yaml").read_text())
    }
    pool, service, pod = (objects[kind]["spec"] for kind in ("InferencePool", "Service", "Deployment"))
    (container_,) = pod["template"]["spec"]["containers"]
    (port,), (found,) = service["ports"], container_["ports"]
    assert pool["endpointPickerRef"]["name"] == objects["Service"]["metadata"]["name"]
    assert pool["endpointPickerRef"]["port"]["number"] == port["port"] == found["containerPort"]
    assert service["selector"].items() <= pod["template"]["metadata"]["labels"].items()
    assert port["targetPort"] == found["name"]
    check_command_line(container_["args"])
    (engines,) = yaml.safe_load_all((DEPLOY / "kubernetes/vllm-with-bridge.yaml").read_text())
    assert pool["selector"]["matchLabels"] == engines["spec"]["selector"]["matchLabels"]
