"""What the chart makes on request: replicas, Valkey, Ingress, HTTPRoute, and what users put into the pods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.helm import ONE_REPLICA, Helm, Objects, changed, container, pod, validate
from tests.support.configs import load

pytestmark = pytest.mark.tools

SECRET = {"existingSecret": {"name": "secret", "key": "entry"}}
SIM: Mapping[str, Any] = {"replicas": {"enabled": True, "engine": "sim", "model": "m"}}
VLLM: Mapping[str, Any] = {"replicas": {"enabled": True, "model": "org/m", "image": {"tag": "v1"}}}
PODS: Mapping[str, Any] = {
    "extraArgs": ["--workers", "2"],
    "extraEnvFrom": [{"secretRef": {"name": "database"}}],
    "extraVolumes": [{"name": "list", "configMap": {"name": "replicas"}}],
    "extraVolumeMounts": [{"name": "list", "mountPath": "/etc/replicas"}],
    "initContainers": [{"name": "wait", "image": "busybox"}],
    "extraContainers": [{"name": "proxy", "image": "envoy"}],
    "priorityClassName": "high",
}
NAMED_POOL: Mapping[str, Any] = {"config": {"pools": [{"name": "far", "replicas": ["http://far:1"]}]}}
ROUTE: Mapping[str, Any] = {
    "enabled": True,
    "annotations": {"a": "b"},
    "parentRefs": [{"name": "public", "namespace": "infra", "sectionName": "https"}],
    "hostnames": ["llm.example.com"],
    "timeouts": {"request": "0s"},
    "filters": [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-tenant-id"]}}],
}


def all_valid(objects: Objects) -> Objects:
    for item in objects.values():
        validate(item)
    return objects


def config_of(objects: Objects) -> Any:
    return yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])


def spec_of(objects: Objects, kind: str) -> dict[str, Any]:
    """Of the pods of a Deployment or StatefulSet."""
    spec: dict[str, Any] = objects[kind]["spec"]["template"]["spec"]
    return spec


def engine(objects: Objects) -> dict[str, Any]:
    (only,) = spec_of(objects, "StatefulSet of replicas")["containers"]
    assert isinstance(only, dict)
    return only


# -- pods of the gateway


def test_what_users_add_to_the_pods_arrives(helm: Helm) -> None:
    objects = all_valid(helm.objects({**ONE_REPLICA, **PODS}))
    spec = pod(objects)
    main, sidecar = spec["containers"]
    assert main["command"] == ["warmroute", "serve", "--config", "/etc/warmroute/config.yaml"]
    assert (main["args"], main["envFrom"]) == (PODS["extraArgs"], PODS["extraEnvFrom"])
    assert main["volumeMounts"][-1:] == PODS["extraVolumeMounts"]
    assert spec["volumes"][-1:] == PODS["extraVolumes"]
    assert (spec["initContainers"], [sidecar]) == (PODS["initContainers"], PODS["extraContainers"])
    assert spec["priorityClassName"] == "high"


def test_a_configuration_of_one_s_own_is_mounted_in_place_of_the_chart_s(helm: Helm) -> None:
    own = {"existingConfigMap": {"name": "mine", "key": "gateway.yaml"}, "config": {"discovery": [{"kubernetes": "vllm"}]}}
    objects = all_valid(helm.objects(own))
    assert "ConfigMap" not in objects
    volume = next(each for each in pod(objects)["volumes"] if each["name"] == "config")
    assert volume["configMap"] == {"name": "mine", "items": [{"key": "gateway.yaml", "path": "config.yaml"}]}
    assert "Role" in objects, "what config.discovery names may be watched"
    all_valid(helm.objects({"existingConfigMap": {"name": "mine"}}))  # no pools are asked for


def test_pods_are_spread_by_their_own_labels_unless_others_are_named(helm: Helm) -> None:
    where: dict[str, Any] = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    other = {**where, "labelSelector": {"matchLabels": {"team": "x"}}}
    spread = {"topologySpreadConstraints": [where, other]}
    objects = all_valid(helm.objects({**spread, "replicas": {**SIM["replicas"], **spread}}))
    for kind in ("Deployment", "StatefulSet of replicas"):
        own = objects[kind]["spec"]["selector"]
        constraints = spec_of(objects, kind)["topologySpreadConstraints"]
        assert constraints == [{**where, "labelSelector": own}, other]


# -- ways to the gateway


def test_an_ingress_goes_to_the_service(helm: Helm) -> None:
    hosts = [{"host": "a.example", "paths": [{"path": "/v1", "pathType": "Exact"}]}, {"host": "b.example"}]
    tls = [{"hosts": ["a.example"], "secretName": "tls"}]
    ingress = {"enabled": True, "className": "nginx", "annotations": {"x": "y"}, "hosts": hosts, "tls": tls}
    objects = all_valid(helm.objects({**ONE_REPLICA, "ingress": ingress}))
    made = objects["Ingress"]
    service = objects["Service"]
    backend = {"service": {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}}
    assert made["metadata"]["annotations"] == {"x": "y"}
    assert made["spec"] == {
        "ingressClassName": "nginx",
        "tls": tls,
        "rules": [
            {"host": "a.example", "http": {"paths": [{"path": "/v1", "pathType": "Exact", "backend": backend}]}},
            {"host": "b.example", "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}},
        ],
    }


def test_an_ingress_without_hosts_is_for_all(helm: Helm) -> None:
    (rule,) = all_valid(helm.objects({**ONE_REPLICA, "ingress": {"enabled": True}}))["Ingress"]["spec"]["rules"]
    assert rule.keys() == {"http"}


def test_a_route_of_the_gateway_api_goes_to_the_service(helm: Helm) -> None:
    objects = all_valid(helm.objects({**ONE_REPLICA, "service": {"port": 80}, "httpRoute": ROUTE}))
    route = objects["HTTPRoute"]
    assert route["metadata"]["annotations"] == {"a": "b"}
    assert (route["spec"]["parentRefs"], route["spec"]["hostnames"]) == (ROUTE["parentRefs"], ROUTE["hostnames"])
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": objects["Service"]["metadata"]["name"], "port": 80}]
    assert (rule["timeouts"], rule["filters"]) == (ROUTE["timeouts"], ROUTE["filters"])


# -- replicas


def test_replicas_of_the_chart_are_found_by_the_gateway(helm: Helm, tmp_path: Path) -> None:
    objects = all_valid(helm.objects(SIM))
    service, engines = objects["Service of replicas"], objects["StatefulSet of replicas"]
    name = service["metadata"]["name"]
    assert (service["spec"]["clusterIP"], engines["spec"]["serviceName"]) == ("None", name)
    assert config_of(objects)["discovery"] == [{"kubernetes": name}]
    assert objects["Role"]["rules"][0]["resources"] == ["endpointslices"]
    assert pod(objects)["automountServiceAccountToken"] is True
    labels = engines["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (port,) = engine(objects)["ports"]
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [port["name"]] == ["http"]
    file = tmp_path / "config.yaml"
    file.write_text(objects["ConfigMap"]["data"]["config.yaml"], "utf-8")
    assert [source.source for source in load(file, {}, {}).discovery] == [f"kubernetes service {name}"]


def test_no_service_sends_clients_to_what_is_beside_the_gateway(helm: Helm) -> None:
    objects = helm.objects({**SIM, "valkey": {"enabled": True}})
    selectors = {kind: objects[kind]["spec"]["selector"] for kind in ("Service", "MetricsService")}
    selectors["Deployment"] = objects["Deployment"]["spec"]["selector"]["matchLabels"]
    labels = [objects[kind]["spec"]["template"]["metadata"]["labels"] for kind in WORKLOADS]
    labels.append(objects["Pod of test"]["metadata"]["labels"])
    for kind, selector in selectors.items():
        assert [each for each in labels if selector.items() <= each.items()] == [], kind


WORKLOADS = ("StatefulSet of replicas", "Deployment of valkey")


@pytest.mark.parametrize(
    ("engine_name", "begin", "flags"),
    [
        ("vllm", ["vllm", "serve", "org/m"], ["--enable-prompt-tokens-details"]),
        ("sglang", ["python3", "-m", "sglang.launch_server", "--model-path", "org/m"], ["--enable-cache-report"]),
        ("sim", ["warmroute", "replica", "--engine", "sim"], []),
    ],
)
def test_each_engine_is_told_its_model_its_port_and_to_show_cached_tokens(
    helm: Helm, engine_name: str, begin: list[str], flags: list[str]
) -> None:
    values = changed(changed(VLLM, "replicas.engine", engine_name), "replicas.servedModelName", "short")
    made = engine(all_valid(helm.objects(values)))
    command = made["command"]
    assert command[: len(begin)] == begin
    assert set(flags) <= set(command)
    after = {flag: command[command.index(flag) + 1] for flag in ("--host", "--port", "--served-model-name")}
    assert after == {"--host": "0.0.0.0", "--port": str(made["ports"][0]["containerPort"]), "--served-model-name": "short"}


def test_replicas_get_models_tokens_and_memory(helm: Helm) -> None:
    values = changed(VLLM, "replicas.hfToken", SECRET)
    values["replicas"] |= {
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "modelCache": {"type": "perReplica", "size": "20Gi", "storageClassName": "fast"},
        "extraArgs": ["--max-model-len", "8192"],
        "drainSeconds": 90,
        "startupSeconds": 600,
        "podDisruptionBudget": {"enabled": True},
        "runtimeClassName": "nvidia",
    }
    objects = all_valid(helm.objects(values))
    made, spec = engine(objects), spec_of(objects, "StatefulSet of replicas")
    mounts = {each["name"]: each["mountPath"] for each in made["volumeMounts"]}
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "entry"}}}
    assert made["env"] == [{"name": "HF_HOME", "value": mounts["models"]}, token]
    (claim,) = objects["StatefulSet of replicas"]["spec"]["volumeClaimTemplates"]
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("models", "fast")
    assert mounts["shm"] == "/dev/shm"
    assert made["args"] == ["--max-model-len", "8192"]
    assert made["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "90"]
    assert spec["terminationGracePeriodSeconds"] > 90
    assert made["startupProbe"]["failureThreshold"] * made["startupProbe"]["periodSeconds"] == 600
    assert spec["runtimeClassName"] == "nvidia"
    budget = objects["PodDisruptionBudget of replicas"]["spec"]["selector"]
    assert budget == objects["StatefulSet of replicas"]["spec"]["selector"]


def test_models_may_be_in_a_volume_that_is_there(helm: Helm) -> None:
    values = changed(VLLM, "replicas.modelCache", {"type": "existingClaim", "existingClaim": "models"})
    volumes = spec_of(all_valid(helm.objects(values)), "StatefulSet of replicas")["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in volumes


def test_simulated_replicas_are_as_restricted_as_the_gateway(helm: Helm) -> None:
    objects = helm.objects(SIM)
    gateway, replicas = pod(objects), spec_of(objects, "StatefulSet of replicas")
    assert replicas["securityContext"] == gateway["securityContext"]
    assert engine(objects)["securityContext"] == container(objects)["securityContext"]
    assert engine(objects)["image"] == container(objects)["image"]
    assert replicas["automountServiceAccountToken"] is False
    engines = engine(helm.objects(VLLM))["securityContext"]
    assert engines == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_replicas_join_a_pool_by_its_name(helm: Helm) -> None:
    pools = {"config": {"pools": [{"name": "far", "models": ["x"], "replicas": ["http://far:1"]}, {"name": "near"}]}}
    assert "replicas.pool is empty" in helm.refusal({**SIM, **pools})
    objects = helm.objects({**changed(SIM, "replicas.pool", "near"), **pools})
    assert config_of(objects)["discovery"] == [{"kubernetes": "demo-warmroute-replicas", "pool": "near"}]


def test_long_names_stay_within_what_kubernetes_takes(helm: Helm) -> None:
    objects = all_valid(helm.objects({**SIM, "valkey": {"enabled": True}, "fullnameOverride": "x" * 63}))
    name = objects["StatefulSet of replicas"]["metadata"]["name"]
    assert len(f"{name}-{'0' * 10}") <= 63, "its pods have its name and a hash as a label"
    assert max(len(item["metadata"]["name"]) for item in objects.values()) <= 63


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(SIM, "replicas.model", ""), "replicas.model is empty"),
        (
            {**NAMED_POOL, "replicas": {"enabled": True, "modelCache": {"type": "existingClaim"}}},
            "replicas.model is empty: name the model that the replicas serve, or give their whole replicas.command; "
            "replicas.image.tag is empty: choose a release of vllm/vllm-openai; "
            "replicas.pool is empty: name the pool of config.pools that the replicas belong to; "
            "replicas.modelCache.existingClaim is empty",
        ),
        (changed(VLLM, "replicas.modelCache", {"type": "perReplica", "size": ""}), "replicas.modelCache.size is empty"),
        (changed(VLLM, "replicas.image.tag", 1.1), "replicas.image.tag has to be text, got the number 1.1: quote it"),
        (
            {**ONE_REPLICA, "image": {"tag": 2}},
            "image.tag has to be text, got the number 2: quote it, or give it by --set-string",
        ),
        ({**ONE_REPLICA, "valkey": {"enabled": True, "image": {"tag": 8}}}, "valkey.image.tag has to be text"),
        (
            {**ONE_REPLICA, "podLabels": {"app.kubernetes.io/name": "mine"}},
            "podLabels: the pods are found by the label app.kubernetes.io/name, which has to stay warmroute",
        ),
        (changed(SIM, "replicas.podLabels", {"app.kubernetes.io/instance": "x"}), "replicas.podLabels: the pods are found by"),
        (changed(VLLM, "replicas.image.tag", ""), "replicas.image.tag is empty: choose a release of vllm/vllm-openai"),
        (changed(VLLM, "replicas.modelCache.type", "existingClaim"), "replicas.modelCache.existingClaim is empty"),
        ({**ONE_REPLICA, "httpRoute": {"enabled": True}}, "httpRoute.parentRefs is empty"),
        (
            {**ONE_REPLICA, "valkey": {"enabled": True, "externalUrl": "redis://a:1/0"}},
            "valkey.enabled and valkey.externalUrl exclude each other",
        ),
    ],
)
def test_what_is_missing_is_named(helm: Helm, values: Mapping[str, Any], message: str) -> None:
    assert message in helm.refusal(values)


# -- Valkey


def test_valkey_has_its_service(helm: Helm) -> None:
    objects = all_valid(helm.objects({**ONE_REPLICA, "valkey": {"enabled": True, "auth": SECRET}}))
    (server,) = spec_of(objects, "Deployment of valkey")["containers"]
    service = objects["Service of valkey"]["spec"]
    assert service["selector"] == objects["Deployment of valkey"]["spec"]["selector"]["matchLabels"]
    assert service["ports"][0]["targetPort"] == server["ports"][0]["name"]


def test_network_policies_let_the_gateway_alone_to_replicas_and_valkey(helm: Helm) -> None:
    objects = all_valid(helm.objects({**SIM, "valkey": {"enabled": True}, "networkPolicy": {"enabled": True}}))
    gateway = objects["Deployment"]["spec"]["selector"]["matchLabels"]
    for part, kind in (("replicas", "StatefulSet of replicas"), ("valkey", "Deployment of valkey")):
        policy = objects[f"NetworkPolicy of {part}"]["spec"]
        assert policy["podSelector"]["matchLabels"] == objects[kind]["spec"]["selector"]["matchLabels"]
        assert [rule["from"] for rule in policy["ingress"]] == [[{"podSelector": {"matchLabels": gateway}}]]


def test_engines_are_scraped_with_the_gateway(helm: Helm) -> None:
    values = {**SIM, "serviceMonitor": {"enabled": True, "labels": {"release": "p"}}}
    objects = all_valid(helm.objects(values))
    monitor = objects["ServiceMonitor of replicas"]
    assert monitor["metadata"]["labels"]["release"] == "p"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= objects["Service of replicas"]["metadata"]["labels"].items()


@pytest.mark.parametrize("monitored", [False, True])
@pytest.mark.parametrize("prometheus", [[], [{"namespaceSelector": {}}]])
def test_who_may_reach_the_replicas_is_a_value_of_its_own(helm: Helm, monitored: bool, prometheus: list[Any]) -> None:
    """Whoever may scrape an engine may use its API: those that may read the gateway's metrics are not let in by that."""
    policy = {"enabled": True, "prometheus": prometheus}
    values = {**SIM, "serviceMonitor": {"enabled": monitored}, "networkPolicy": policy}
    (gateway,) = helm.objects(values)["NetworkPolicy of replicas"]["spec"]["ingress"][0]["from"]
    assert gateway.keys() == {"podSelector"}
    scraper = {
        "namespaceSelector": {"matchLabels": {"team": "monitoring"}},
        "podSelector": {"matchLabels": {"app": "prometheus"}},
    }
    objects = all_valid(helm.objects(changed(values, "networkPolicy.replicas", [scraper])))
    assert objects["NetworkPolicy of replicas"]["spec"]["ingress"][0]["from"] == [gateway, scraper]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas.engine", "tgi"),
        ("replicas.count", -1),
        ("replicas.modelCache.type", "nfs"),
        ("replicas.gpu", 1),
        ("replicas.autoscaling.minReplicas", 0),
        ("replicas.extraEnv", [{"name": "A", "vaule": "b"}]),
        ("replicas.image.repository", "vllm/vllm-openai:v1"),
        ("valkey.image.repository", "valkey/valkey@sha256:0"),
        ("valkey.maxmemory", "256Mi"),
        ("ingress.hosts", ["llm.example.com"]),
        ("ingress.hosts", [{"host": "a", "paths": [{"path": "v1"}]}]),
        ("httpRoute.parentRefs", [{"namespace": "a"}]),
        ("httpRoute.timeouts", {"request": "10"}),
        ("autoscaling.type", "vpa"),
        ("autoscaling.saturation", 70),
        ("autoscaling.behavior", {"down": {}}),
        ("keda.serverAddress", "prometheus:9090"),
        ("extraArgs", "--workers 2"),
        ("extraEnvFrom", [{"secret": {"name": "a"}}]),
        ("extraContainers", [{"name": "a"}]),
        ("topologySpreadConstraints", [{"topologyKey": "zone"}]),
        ("existingConfigMap", "mine"),
        ("prometheusRule.additionalGroups", [{"rules": []}]),
        ("tests.request", "yes"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, path: str, value: Any) -> None:
    refusal = helm.refusal(changed(ONE_REPLICA, path, value))
    assert path.partition(".")[0] in refusal
    assert "schema" in refusal


# -- helm test


def test_helm_test_asks_the_service_with_the_clients_key_and_not_with_the_admin_s(helm: Helm) -> None:
    tests = {"model": "org/m", "apiKey": SECRET}
    values = {**ONE_REPLICA, "service": {"port": 80}, "adminKey": {"existingSecret": {"name": "admin"}}, "tests": tests}
    objects = all_valid(helm.objects(values))
    (only,) = objects["Pod of test"]["spec"]["containers"]
    service = objects["Service"]
    url = f"http://{service['metadata']['name']}.llm:{service['spec']['ports'][0]['port']}"
    assert only["args"] == [url, "request", "org/m"]
    assert only["env"] == [{"name": "API_KEY", "valueFrom": {"secretKeyRef": {"name": "secret", "key": "entry"}}}]
    (quiet,) = helm.objects(changed(ONE_REPLICA, "tests.request", False))["Pod of test"]["spec"]["containers"]
    assert quiet["args"][1:] == ["no-request"]
    assert "env" not in quiet
