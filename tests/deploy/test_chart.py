"""The chart as the real helm 3 and 4 render it: valid for Kubernetes, hardened, with a configuration that the gateway loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config.hints import FIXED
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.sections import marked
from gateway.features.table import WholeConfig
from tests.deploy.helm import CHART, ONE_REPLICA, Helm, UniqueKeys, changed, container, pod, validate
from tests.support.configs import load
from tests.support.tools import ROOT, tool

DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
EVERYTHING = {
    "image": {"repository": "registry.example/warmroute", "digest": "sha256:" + "a" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "pull"}],
    "nameOverride": "gw",
    "replicaCount": 3,
    "service": {"type": "LoadBalancer", "port": 80, "annotations": {"example.com/internal": "true"}},
    "serviceAccount": {"name": "gateway", "annotations": {"example.com/role": "r"}},
    "adminKey": {"existingSecret": {"name": "warmroute-admin", "key": "key"}},
    "extraEnv": [
        {"name": "TZ", "value": "UTC"},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
    ],
    "resources": {"requests": {"cpu": 2}, "limits": {"memory": "1Gi"}},
    "preStopSleepSeconds": 10,
    "terminationGracePeriodSeconds": 120,
    "podAnnotations": {"example.com/note": "yes"},
    "podLabels": {"team": "platform"},
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "gateway", "effect": "NoSchedule"}],
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"team": "platform"}},
        }
    ],
    "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
    "networkPolicy": {"enabled": True, "clients": [{"namespaceSelector": {"matchLabels": {"team": "ingress"}}}]},
    "serviceMonitor": {"enabled": True, "interval": "30s", "labels": {"release": "prometheus"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    "config": {
        # Model names that a careless template would turn into other YAML values.
        "pools": [
            {
                "models": ["smollm2", "no", "1e3", "0x10", "12:30:00", "null", "~", "a: b", "{{ x }}", "*"],
                "replicas": [
                    "http://vllm-0.vllm:8000/v1",
                    {"url": "https://models.example/base", "name": "far", "capacity_tokens": 12_345_678},
                    {"url": "http://[2001:db8::1]:8000", "capacity_tokens": None},
                ],
            },
            {"replicas": ["http://llama-0:8080"]},
        ],
        "routing": {"policy": "least_loaded", "block_bytes": 512, "ttl_s": 0.25, "memory_mb": 4096},
        "prices": {"smollm2": {"input": 0.5, "output": 1.5}, "no": {"input": 0.001, "output": 0, "cached_input": 0}},
        "limits": {"drain_timeout_s": 60.5},
        "log_level": "debug",
    },
}
DISCOVERY = [
    {"kubernetes": "vllm"},
    {"kubernetes": {"service": "other", "port": "http"}},
    {"kubernetes": {"service": "vllm", "namespace": "models", "port": 8000}},
    {"kubernetes": {"pods": "app=vllm", "namespace": "models"}},
    {"dns": {"name": "vllm.models.svc.cluster.local", "port": 8000, "servers": ["10.96.0.10"]}},
    {"dns": "_http._tcp.vllm.models.svc.cluster.local"},
    {"file": "/etc/warmroute/replicas.yaml"},
]
MATRIX = {
    "a pool that is named by its models": {
        "config": {"pools": [{"models": ["m", "n"]}, {"name": "b"}], "discovery": [{"kubernetes": "a", "pool": "m,n"}]}
    },
    "the pool that is there by default": {"config": {"discovery": [{"kubernetes": "a", "pool": "default"}]}},
    "discovery alone": {"config": {"discovery": DISCOVERY}},
    "discovery and pools": {
        "config": {
            "pools": [{"name": "a", "models": ["m"]}, {"name": "b"}],
            "discovery": [{"dns": "_http._tcp.a.b", "pool": "b"}],
        }
    },
    "one replica": ONE_REPLICA,
    "everything": EVERYTHING,
    "tag": {**ONE_REPLICA, "image": {"tag": "0.2.0"}},
    "no service account": {**ONE_REPLICA, "serviceAccount": {"create": False}},
    "no preStop": {**ONE_REPLICA, "preStopSleepSeconds": 0, "terminationGracePeriodSeconds": 42},
    "scaled to zero": {**ONE_REPLICA, "replicaCount": 0},
    "as a sub-chart": {**ONE_REPLICA, "global": {"imageRegistry": "registry.example"}},
    "no resources": {**ONE_REPLICA, "resources": None},
    "names": {**ONE_REPLICA, "fullnameOverride": "front-door", "podDisruptionBudget": {"enabled": True}},
}

pytestmark = pytest.mark.tools


def test_helm_is_the_version_that_the_fixture_names(helm: Helm) -> None:
    done = helm.run("version", "--template", "{{.Version}}")
    assert done.stdout.startswith("v3." if helm.binary.name == "helm3" else "v4.")


def test_helm_3_says_the_same(tmp_path: Path) -> None:
    """All that the chart makes, word for word; it lints; and what is refused is named."""
    new, old = Helm(tool("helm"), tmp_path), Helm(tool("helm3"), tmp_path)
    parts = {"replicas": {"enabled": True, "engine": "sim", "model": "m"}, "valkey": {"enabled": True}}
    for values in (EVERYTHING, parts):
        assert new.objects(values) == old.objects(values)
    assert old.run("lint", "--strict", str(CHART)).returncode == 0
    assert "replicaCount" in old.refusal(changed(ONE_REPLICA, "replicaCount", "two"))


@pytest.mark.parametrize("values", [{}, *MATRIX.values()], ids=["defaults", *MATRIX])
def test_lints_strictly(helm: Helm, tmp_path: Path, values: Mapping[str, Any]) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    done = helm.run("lint", "--strict", str(CHART), "--values", str(file))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_renders_what_kubernetes_accepts(helm: Helm, values: Mapping[str, Any]) -> None:
    objects = helm.objects(values)
    assert {"Deployment", "Service", "ConfigMap"} <= objects.keys()
    for item in objects.values():
        validate(item)  # raises


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_the_gateway_loads_the_rendered_configuration(helm: Helm, tmp_path: Path, values: Mapping[str, Any]) -> None:
    rendered = helm.objects(values)["ConfigMap"]["data"]["config.yaml"]
    assert loaded(rendered, tmp_path) == loaded(
        yaml.safe_dump({**values["config"], "listen": "0.0.0.0:8000", "metrics_listen": "0.0.0.0:8002"}), tmp_path
    )


def loaded(text: str, tmp_path: Path) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text, "utf-8")
    return load(file, {}, {})


def test_helm_3_and_4_render_the_same(tmp_path: Path) -> None:
    new, old = (Helm(tool(name), tmp_path).objects(EVERYTHING) for name in ("helm", "helm3"))
    assert new == old


def test_everything_arrives_where_it_belongs(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    assert objects.keys() == {
        *("Deployment", "Service", "MetricsService", "ServiceAccount", "ConfigMap"),
        *("PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "Dashboards", "Pod of test"),
    }
    spec, main = pod(objects), container(objects)
    assert main["image"] == "registry.example/warmroute@sha256:" + "a" * 64
    assert main["command"] == ["warmroute", "serve", "--config", "/etc/warmroute/config.yaml"]
    assert main["env"][0] == {
        "name": "WARMROUTE_ADMIN_KEY",
        "valueFrom": {"secretKeyRef": {"name": "warmroute-admin", "key": "key"}},
    }
    assert main["env"][1:] == EVERYTHING["extraEnv"]
    assert main["resources"] == {"requests": {"cpu": 2, "memory": "512Mi"}, "limits": {"memory": "1Gi"}}
    assert main["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "10"]
    for key in ("imagePullSecrets", "nodeSelector", "tolerations", "affinity", "topologySpreadConstraints"):
        assert spec[key] == EVERYTHING[key], key
    assert spec["serviceAccountName"] == "gateway" == objects["ServiceAccount"]["metadata"]["name"]
    assert spec["terminationGracePeriodSeconds"] == 120
    assert objects["Deployment"]["spec"]["replicas"] == 3
    assert objects["Service"]["spec"]["type"] == "LoadBalancer"
    assert objects["PodDisruptionBudget"]["spec"]["maxUnavailable"] == "50%"
    metadata = template(helm, EVERYTHING)["metadata"]
    assert metadata["labels"]["team"] == "platform"
    assert metadata["annotations"]["example.com/note"] == "yes"


def test_annotations_and_labels_of_the_user_replace_those_of_the_chart(helm: Helm) -> None:
    own = {"podAnnotations": {"prometheus.io/scrape": "false"}, "podLabels": {"app.kubernetes.io/name": "warmroute", "a": "b"}}
    labels = {"helm.sh/chart": "mine"}
    monitors = {"serviceMonitor": {"enabled": True, "labels": labels}, "prometheusRule": {"enabled": True, "labels": labels}}
    objects = helm.objects({**ONE_REPLICA, **own, **monitors})  # no key twice
    metadata = objects["Deployment"]["spec"]["template"]["metadata"]
    assert metadata["annotations"].items() >= {"prometheus.io/scrape": "false", "prometheus.io/path": "/metrics"}.items()
    assert metadata["labels"] == {"app.kubernetes.io/instance": "demo", **own["podLabels"]}
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert objects[kind]["metadata"]["labels"]["helm.sh/chart"] == "mine"


@pytest.mark.parametrize("name", ["1234", "yes", "null", "1e3"])
def test_names_that_yaml_would_read_as_something_else_stay_names(helm: Helm, name: str) -> None:
    secret = {"existingSecret": {"name": name, "key": name}}
    values = {
        "nameOverride": name,
        "podLabels": {name: name},
        "serviceAccount": {"name": name},
        "priorityClassName": name,
        "adminKey": secret,
        "existingConfigMap": {"name": name, "key": name},
        "valkey": {"enabled": True, "auth": {"existingSecret": {**secret["existingSecret"], "sentinelKey": name}}},
        "tests": {"model": name, "apiKey": secret},
        "ingress": {"enabled": True, "className": name, "hosts": [{"host": name}]},
        "config": {"discovery": [{"kubernetes": {"service": "a", "namespace": name}}]},
        "serviceMonitor": {"enabled": True, "labels": {name: name}},
        "replicas": {
            "enabled": True,
            "model": name,
            "image": {"tag": name},
            "hfToken": secret,
            "priorityClassName": name,
            "runtimeClassName": name,
            "modelCache": {"type": "existingClaim", "existingClaim": name},
            "autoscaling": {"enabled": True, "type": "hpa"},
        },
    }
    file = tmp_file(helm, values)
    for release, more in (
        (name, ()),
        ("demo", ("--set-string", f"fullnameOverride={name},replicas.modelCache.type=perReplica")),
    ):
        done = helm.run("template", release, str(CHART), "--namespace", name, "--values", str(file), *more)
        assert done.returncode == 0, done.stderr
        items = [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]
        for item in items:
            validate(item)
        account = next(item for item in items if item["kind"] == "ServiceAccount")
        assert account["metadata"]["name"] == name


def tmp_file(helm: Helm, values: Mapping[str, Any]) -> Path:
    file = helm.scratch / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    return file


def test_optional_parts_are_off_by_default(helm: Helm) -> None:
    objects = helm.objects(ONE_REPLICA)
    assert objects.keys() == {"Deployment", "Service", "MetricsService", "ServiceAccount", "ConfigMap", "Pod of test"}
    assert "env" not in container(objects)
    assert container(objects)["image"] == "warmroute:0.1.0"


def test_the_pod_is_restricted(helm: Helm) -> None:
    """The restricted pod security standard, and a root file system that cannot be written."""
    objects = helm.objects(ONE_REPLICA)
    spec, main = pod(objects), container(objects)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # a Service named warmroute would set WARMROUTE_ variables
    assert {"name": "tmp", "emptyDir": {}} in spec["volumes"]
    assert {"name": "tmp", "mountPath": "/tmp"} in main["volumeMounts"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()


def test_probes_use_https_with_tls(helm: Helm) -> None:
    files = {"cert_file": "/etc/warmroute-tls/tls.crt", "key_file": "/etc/warmroute-tls/tls.key"}
    objects = helm.objects({"config": {**ONE_REPLICA["config"], "tls": files}})
    main = container(objects)
    probes = [main[name]["httpGet"]["scheme"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["HTTPS"] * 3
    assert yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])["tls"] == files


def test_probes_and_strategy(helm: Helm) -> None:
    objects = helm.objects(ONE_REPLICA)
    main = container(objects)
    paths = {name: main[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    health, ready = {"path": "/health", "port": "http"}, {"path": "/ready", "port": "http"}
    assert paths == {"startupProbe": health, "livenessProbe": health, "readinessProbe": ready}
    assert objects["Deployment"]["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


def test_selectors_find_the_pod_and_the_port(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    selectors = {
        "Deployment": objects["Deployment"]["spec"]["selector"]["matchLabels"],
        "Service": objects["Service"]["spec"]["selector"],
        "MetricsService": objects["MetricsService"]["spec"]["selector"],
        "PodDisruptionBudget": objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    }
    assert [kind for kind, wanted in selectors.items() if not wanted.items() <= labels.items()] == []
    port, metrics = container(objects)["ports"]
    file = yaml.safe_load(objects["ConfigMap"]["data"]["config.yaml"])
    assert file["listen"] == f"0.0.0.0:{port['containerPort']}"
    assert file["metrics_listen"] == f"0.0.0.0:{metrics['containerPort']}"
    assert objects["Service"]["spec"]["ports"] == [{"name": "http", "port": 80, "targetPort": port["name"], "protocol": "TCP"}]
    config_map = next(volume for volume in pod(objects)["volumes"] if volume["name"] == "config")
    assert config_map["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]


def test_service_monitor(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    monitor, service = objects["ServiceMonitor"], objects["MetricsService"]
    assert (monitor["apiVersion"], monitor["metadata"]["labels"]["release"]) == ("monitoring.coreos.com/v1", "prometheus")
    assert monitor["spec"] == {
        "selector": {
            "matchLabels": {
                "app.kubernetes.io/name": "gw",
                "app.kubernetes.io/instance": "demo",
                "app.kubernetes.io/component": "metrics",
            }
        },
        "endpoints": [{"port": "metrics", "path": "/metrics", "interval": "30s"}],
    }
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_metrics_are_scraped_in_the_cluster_and_not_through_the_clients_service(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    (port,) = objects["MetricsService"]["spec"]["ports"]
    named = {each["name"]: each["containerPort"] for each in container(objects)["ports"]}
    assert (port["targetPort"], port["port"]) == ("metrics", named["metrics"])
    assert objects["MetricsService"]["spec"]["clusterIP"] == "None", "each pod is found by the Service's name"
    assert [each["targetPort"] for each in objects["Service"]["spec"]["ports"]] == ["http"], "a load balancer shows no metrics"
    annotations = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(named["metrics"])
    assert annotations["prometheus.io/path"] == "/metrics"
    quiet = helm.objects(changed(ONE_REPLICA, "metrics.podAnnotations", False))
    assert not [name for name in quiet["Deployment"]["spec"]["template"]["metadata"]["annotations"] if "prometheus" in name]


def test_the_network_policy_knows_who_may_read_metrics(helm: Helm) -> None:
    objects = helm.objects(EVERYTHING)
    clients, prometheus = objects["NetworkPolicy"]["spec"]["ingress"]
    *peers, tests = clients["from"]
    assert clients["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert peers == EVERYTHING["networkPolicy"]["clients"]
    labels = objects["Pod of test"]["metadata"]["labels"]
    assert tests["podSelector"]["matchLabels"].items() <= labels.items(), "helm test gets through"
    assert prometheus == {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": [{"namespaceSelector": {}}]}


def test_dashboards_arrive_unchanged(helm: Helm) -> None:
    dashboards = helm.objects(EVERYTHING)["Dashboards"]
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert dashboards["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert len(DASHBOARDS) == 3
    made = {name: json.loads(text) for name, text in dashboards["data"].items()}
    assert made == {file.name: json.loads(file.read_text("utf-8")) for file in DASHBOARDS}


def test_alerts_lead_to_the_runbook_that_is_named(helm: Helm) -> None:
    for runbook, values in (("docs/runbook.md", {}), ("https://wiki.example/llm", {"runbook": "https://wiki.example/llm"})):
        objects = helm.objects({**ONE_REPLICA, "prometheusRule": {"enabled": True, **values}})
        rules = [rule for group in objects["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]
        links = {rule["annotations"]["runbook_url"].partition("#")[0] for rule in rules if "alert" in rule}
        assert links == {runbook}
        assert any("record" in rule for rule in rules)


def test_the_packaged_chart_has_the_dashboards_in_it(helm: Helm, tmp_path: Path) -> None:
    """The chart's `dashboards` is a link to the repository's folder; a package must not depend on it."""
    done = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    file = tmp_path / "values.json"
    file.write_text(json.dumps(EVERYTHING), "utf-8")
    rendered = helm.run("template", "demo", str(tmp_path / "warmroute-0.1.0.tgz"), "--values", str(file))
    assert rendered.returncode == 0, rendered.stderr
    assert "grafana_dashboard" in rendered.stdout
    assert [file.stem for file in DASHBOARDS if f'"uid": "{file.stem}"' not in rendered.stdout] == []


def template(helm: Helm, values: Mapping[str, Any]) -> Any:
    """What the pods are made of: a change of it rolls them."""
    return helm.objects(values)["Deployment"]["spec"]["template"]


def test_the_pods_are_rolled_by_what_they_cannot_reload_and_nothing_else(helm: Helm) -> None:
    first = template(helm, ONE_REPLICA)
    fixed = list[str]()
    for name, parts in marked(WholeConfig, FIXED):
        fixed += [name] if parts is True else [f"{name}.{part}" for part in parts]
    for key in fixed:
        if key not in ("listen", "metrics_listen", "admin_key", "read_key"):  # the chart's own, and Secrets
            value = OTHER_VALUES[key]
            assert template(helm, changed(ONE_REPLICA, f"config.{key}", value)) != first, key
    for path, value in (
        ("config.routing.ttl_s", 60),
        ("config.discovery", [{"dns": {"name": "a.b", "port": 8000}}]),
        ("config.prices", {"m": {"input": 1, "output": 2}}),
        ("serviceMonitor.enabled", True),
    ):
        assert template(helm, changed(ONE_REPLICA, path, value)) == first, path


def test_the_first_source_of_kubernetes_rolls_the_pods_for_they_need_a_token(helm: Helm) -> None:
    with_one = changed(ONE_REPLICA, "config.discovery", [{"kubernetes": "vllm"}])
    assert template(helm, with_one) != template(helm, ONE_REPLICA)
    assert template(helm, changed(with_one, "config.discovery", DISCOVERY)) == template(helm, with_one)


OTHER_VALUES: Mapping[str, Any] = {
    "admin_listen": "off",
    "tls": {"cert_file": "/etc/warmroute-tls/tls.pem"},
    "workers": 2,
    "state": {"url": "off"},
    "ledger": {"url": "sqlite"},
    "keys": {"url": "sqlite"},
    "prompt_log": False,
    "limits.adopt_s": 9,
    "sharing": {"url": "redis://valkey:6379"},
    "snapshot": {"file": "off"},
    "log_level": "debug",
    "log_format": "console",
    "routing.block_bytes": 512,
    "routing.compare": True,
    "routing.retain": True,
    "workflows.enabled": False,
    "workflows.directory": "/etc/workflows",
    "kv_events": {"follow": True},
    "health.wake": True,
    "tracing.endpoint": "http://otel-collector:4318",
}


def roles(helm: Helm, values: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """(namespace, name) -> rules; each has a binding to the gateway's account."""
    done = helm.template(values)
    assert done.returncode == 0, done.stderr
    items = [item for item in yaml.load_all(done.stdout, UniqueKeys) if item]
    bindings = {
        (each["metadata"]["namespace"], each["roleRef"]["name"]): each for each in items if each["kind"] == "RoleBinding"
    }
    found = {
        (each["metadata"]["namespace"], each["metadata"]["name"]): each["rules"] for each in items if each["kind"] == "Role"
    }
    assert found.keys() == bindings.keys()
    for each in bindings.values():
        account = values.get("fullnameOverride", "demo-warmroute")
        assert each["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "llm"}]
        assert each["roleRef"]["kind"] == "Role"
    return found


READ = ["list", "watch"]
SLICES = [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": READ}]
PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": READ}]


def test_each_namespace_that_is_watched_has_a_role_for_that_and_nothing_else(helm: Helm) -> None:
    values = changed(ONE_REPLICA, "config.discovery", DISCOVERY)
    assert roles(helm, values) == {
        ("llm", "demo-warmroute-endpointslices"): SLICES,
        ("models", "llm-demo-warmroute-endpointslices"): SLICES,
        ("models", "llm-demo-warmroute-pods"): PODS,
    }
    assert pod(helm.objects(values))["automountServiceAccountToken"] is True
    assert not roles(helm, changed(values, "rbac.create", False))


def test_roles_of_long_names_stay_apart(helm: Helm) -> None:
    values = changed(ONE_REPLICA, "config.discovery", DISCOVERY)
    names = [name for letter in "ab" for _, name in roles(helm, {**values, "fullnameOverride": "x" * 62 + letter})]
    assert len(set(names)) == len(names) == 6
    assert max(map(len, names)) <= 63


def test_without_discovery_by_kubernetes_the_pod_has_no_token_and_no_right(helm: Helm) -> None:
    for discovery in ([], [{"dns": {"name": "a.b", "port": 8000}}], [{"kubernetes": {"service": "a", "server": "https://c"}}]):
        values = changed(ONE_REPLICA, "config.discovery", discovery)
        assert not roles(helm, values)
        assert pod(helm.objects(values))["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("pools", "message"),
    [([], "config.pools is empty"), ([{"replicas": []}], "config.pools[0].replicas is empty")],
)
def test_no_replicas_is_refused(helm: Helm, pools: list[Any], message: str) -> None:
    assert message in helm.refusal({"config": {"pools": pools}})


def test_decoders_are_replicas_and_prefillers_alone_are_none(helm: Helm) -> None:
    pool = {"prefill": ["http://p:8000"], "decode": [{"url": "http://d:8000"}]}
    made = yaml.safe_load(helm.objects({"config": {"pools": [pool]}})["ConfigMap"]["data"]["config.yaml"])
    assert made["pools"] == [pool]
    assert "config.pools[0].replicas is empty" in helm.refusal({"config": {"pools": [{"prefill": ["http://p:8000"]}]}})


REFUSED: Mapping[str, tuple[Any, str]] = {
    **{
        f"/v1/{path}": (
            {"pools": [{"replicas": [f"http://vllm:8000/v1/{path}"]}]},
            f"config.pools[0].replicas[0]: http://vllm:8000/v1/{path} is the URL of an API path, not a base URL; write "
            "http://vllm:8000\n",
        )
        for path in ("chat/completions", "completions", "embeddings", "models", "responses", "messages", "tokenize/")
    },
    "replica with keys": (
        {"pools": [{"replicas": [{"url": "http://a/v1/score"}]}]},
        "http://a/v1/score is the URL of an API path",
    ),
    "decoder": (
        {"pools": [{"decode": ["http://a/v1/score"]}]},
        "config.pools[0].decode[0]: http://a/v1/score is the URL of an API path",
    ),
    "no port": ({"discovery": [{"dns": {"name": "vllm"}}]}, "config.discovery[0].dns.port is missing"),
    "short, no port": ({"discovery": [{"kubernetes": "a"}, {"dns": "vllm"}]}, "config.discovery[1].dns.port is missing"),
    "no pool": ({"discovery": [{"kubernetes": "a", "pool": "nope"}]}, '"nope" is no pool\'s name; possible are: default'),
    "unknown pool": (
        {"discovery": [{"kubernetes": "a", "pool": "nope"}], "pools": [{"name": "a"}, {"name": "b"}]},
        'config.discovery[0].pool: "nope" is no pool\'s name; possible are: a, b',
    ),
    "which pool": (
        {"discovery": [{"kubernetes": "a"}], "pools": [{"name": "a", "models": ["x"]}, {"name": "b"}]},
        "config.discovery[0].pool is empty: name the replicas' pool, one of a, b",
    ),
    "two sources in one": (
        {"discovery": [{"kubernetes": "a", "file": "/a"}]},
        "config.discovery[0]: one of dns, kubernetes, file is expected, got file and kubernetes",
    ),
    "none": ({"discovery": [{}]}, "config.discovery[0]: one of dns, kubernetes, file is expected, got none"),
    "service and pods": (
        {"discovery": [{"kubernetes": {"service": "a", "pods": "app=a"}}]},
        "config.discovery[0].kubernetes: either service or pods is expected",
    ),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_gateway_refuses_at_its_start_is_refused_before(
    helm: Helm, tmp_path: Path, config: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError):
        loaded(yaml.safe_dump(dict(config)), tmp_path)
    assert message in helm.refusal({"config": config})


def test_replicas_can_be_named_on_the_command_line(helm: Helm) -> None:
    """The way that NOTES, the README and the refusal of an empty list suggest."""
    urls = ["http://vllm-0:8000", "http://vllm-1:8000"]
    done = helm.template({}, "--set", "config.pools[0].replicas={" + ",".join(urls) + "}")
    text = next(item for item in yaml.safe_load_all(done.stdout) if item["kind"] == "ConfigMap")["data"]["config.yaml"]
    assert yaml.safe_load(text)["pools"] == [{"replicas": urls}]


@pytest.mark.parametrize(
    ("grace", "pre_stop", "accept", "drain", "fits"),
    [(45, 5, 2, 28, True), (44, 5, 2, 28, False), (44, 4, 2, 28, True), (44, 5, 1.5, 27.5, True), (30, 5, 2, 300, False)],
)
def test_the_grace_period_covers_the_shutdown(
    helm: Helm, grace: int, pre_stop: int, accept: float, drain: float, fits: bool
) -> None:
    values = changed(ONE_REPLICA, "terminationGracePeriodSeconds", grace)
    values = changed(values, "preStopSleepSeconds", pre_stop)
    values = changed(changed(values, "config.limits.drain_accept_s", accept), "config.limits.drain_timeout_s", drain)
    if fits:
        assert pod(helm.objects(values))["terminationGracePeriodSeconds"] == grace
    else:
        assert "terminationGracePeriodSeconds" in helm.refusal(values)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas", ["http://vllm-0:8000"]),
        ("image.name", "warmroute"),
        ("image.digest", "latest"),
        ("image.repository", "registry:5000/warmroute:0.1.0"),
        ("image.repository", "warmroute@sha256:" + "a" * 64),
        ("replicaCount", "2"),
        ("service.port", 0),
        ("service.type", "ExternalName"),
        ("podLabels.version", 2),
        ("extraEnv", [{"name": "A", "vaule": "b"}]),
        ("resources.request", {}),
        ("podDisruptionBudget.minAvailable", 1),
        ("podDisruptionBudget.maxUnavailable", "half"),
        ("serviceMonitor.interval", "15"),
        ("networkPolicy.from", []),
        ("metrics.port", 9000),
        ("terminationGracePeriodSeconds", 0),
        ("config", None),
        ("config.limits", None),
        ("config.listen", "0.0.0.0:9000"),
        ("config.metrics_listen", "0.0.0.0:9000"),
        ("config.admin_listen", "8001"),
        ("config.admin_key", "secret"),
        ("config.routing.policy", "fastest"),
        ("config.routing.ttl_s", "300"),
        ("config.routing.ttl_seconds", 300),
        ("config.pools", [{"replicas": ["vllm-0:8000"]}]),
        ("config.pools", [{"replicas": [{"url": "http://vllm-0:8000", "wait": 2}]}]),
        ("config.prices", {"m": {"input": 1}}),
        ("config.discovery", [{"kubernetes": {"service": "Upper"}}]),
        ("config.discovery", [{"kubernetes": {"servce": "vllm"}}]),
        ("config.discovery", [{"dns": {"name": "a.b", "refresh_s": 5}}]),
        ("rbac.create", "yes"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, path: str, value: Any) -> None:
    refusal = helm.refusal(changed(ONE_REPLICA, path, value))
    assert path.partition(".")[0] in refusal
    assert "schema" in refusal


def notes_of(values: Mapping[str, Any], scratch: Path) -> str:
    """`helm install --dry-run=client` prints the notes without a cluster (helm 3 wants one even so)."""
    helm = Helm(tool("helm"), scratch)
    file = scratch / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    arguments = ("--dry-run=client", "--namespace", "llm", "--values", str(file))
    done = helm.run("install", "demo", str(CHART), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_notes_explain_how_to_reach_the_gateway(tmp_path: Path) -> None:
    notes = notes_of(EVERYTHING, tmp_path)
    assert "4 replica(s) in 2 pool(s)" in notes
    assert "kubectl --namespace llm port-forward service/demo-gw 8000:80" in notes
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in notes
    assert "With 3 gateway pods" in notes
    assert "kubectl --namespace llm port-forward deployment/demo-gw 18000:18000" in notes
    assert "demo-gw-metrics.llm:8002/metrics" in notes


def test_notes_ask_for_the_admin_key_where_there_is_one(tmp_path: Path) -> None:
    curl, template = "curl {}http://127.0.0.1:18000/warmroute/replicas\n", """'{{ index .data "key" | base64decode }}'"""
    guarded = notes_of(EVERYTHING, tmp_path)
    assert f"KEY=$(kubectl --namespace llm get secret warmroute-admin -o go-template={template})\n" in guarded
    assert curl.format('-H "Authorization: Bearer $KEY" ') in guarded
    open_ = notes_of(ONE_REPLICA, tmp_path)
    assert f"  {curl.format('')}" in open_
    assert "KEY" not in open_
