"""Where the gateways of a release share what they know: its own Valkey, an external store, or what the configuration names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.features.sharing.address import STORE_URL, STORE_URL_PATTERN, parse_store_url
from tests.deploy.helm import ONE_REPLICA, Helm, changed, container, validate
from tests.deploy.test_chart import notes_of, template
from tests.deploy.test_chart_parts import SECRET, SIM, all_valid, config_of, spec_of
from tests.support.configs import load
from tests.support.tools import ROOT, tool

pytestmark = pytest.mark.tools

OWN: Mapping[str, Any] = {**ONE_REPLICA, "valkey": {"enabled": True}}
URLS = (
    "redis://valkey",
    "rediss://gateway@valkey.example:6380/2",
    "redis+sentinel://a:26379,b:26379/main/1",
    "rediss+cluster://a,b,[2001:db8::1]:6379",
)


def external(url: str) -> dict[str, Any]:
    return {**ONE_REPLICA, "valkey": {"externalUrl": url}}


def named(url: str) -> dict[str, Any]:
    return changed(ONE_REPLICA, "config.sharing", {"url": url})


def sharing_of(helm: Helm, values: Mapping[str, Any]) -> Any:
    return config_of(helm.objects(values))["sharing"]


def test_what_changes_the_store_rolls_the_pods(helm: Helm) -> None:
    """`sharing` is read at the start only."""
    templates = [ONE_REPLICA, OWN, *map(external, URLS), {**OWN, "fullnameOverride": "other"}]
    made = [template(helm, values)["metadata"]["annotations"]["checksum/restart"] for values in templates]
    assert len(set(made)) == len(templates)
    for path, value in (("maxmemory", "128mb"), ("image.tag", "8.2"), ("resources.requests.cpu", "1")):
        assert template(helm, changed(OWN, f"valkey.{path}", value)) == template(helm, OWN), path
    mine = {"existingConfigMap": {"name": "mine"}}
    assert template(helm, changed(mine, "config.workers", 2)) == template(helm, mine), "that configuration is not used"


@pytest.mark.parametrize("url", URLS)
def test_every_kind_of_store_can_be_named_in_both_places(helm: Helm, tmp_path: Path, url: str) -> None:
    for values in (external(url), named(url)):
        objects = all_valid(helm.objects(values))
        file = tmp_path / "config.yaml"
        file.write_text(objects["ConfigMap"]["data"]["config.yaml"], "utf-8")
        assert parse_store_url(load(file, {}, {}).sharing.url) == parse_store_url(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "redis://:secret@valkey",
            "a password does not belong in a URL, for it would be in the ConfigMap: put it into a Secret",
        ),
        ("redis+cluster://user:secret@a,b", "a password does not belong in a URL"),
        ("http://valkey", f'{STORE_URL} is expected, got "http://valkey"'),
        ("valkey:6379", f'{STORE_URL} is expected, got "valkey:6379"'),
        ("user:secret@valkey:6379", 'is expected, got "valkey:6379"'),
        ("redis://valkey:6379/a/b/c", "is expected, got"),
    ],
)
def test_a_url_with_a_password_or_of_something_else_is_refused(helm: Helm, url: str, message: str) -> None:
    for values, key in ((external(url), "valkey.externalUrl"), (named(url), "config.sharing.url")):
        refusal = helm.refusal(values)
        assert f"{key}: " in refusal
        assert message in refusal
        assert "secret@" not in refusal


def test_the_templates_take_the_urls_that_the_gateway_takes() -> None:
    assert f"`^({STORE_URL_PATTERN})$`" in (ROOT / "helm" / "templates" / "_checks.tpl").read_text("utf-8")


@pytest.mark.parametrize("url", ["postgresql://u:secret@h/n", "postgres://u@h/n?password=secret"])
@pytest.mark.parametrize("key", ["config.state.url", "config.ledger.url"])
def test_a_password_of_a_database_is_refused(helm: Helm, url: str, key: str) -> None:
    refusal = helm.refusal(changed(ONE_REPLICA, key, url))
    assert f"{key}: a password does not belong in a URL, for it would be in the ConfigMap: put PGPASSWORD" in refusal
    for good in ("off", False, "sqlite", "postgresql://u@h:5432/n?sslmode=require"):
        helm.objects(changed(ONE_REPLICA, key, good))


def test_the_url_of_the_chart_s_own_valkey_is_that_of_its_service(helm: Helm) -> None:
    objects = helm.objects(OWN)
    address = parse_store_url(config_of(objects)["sharing"]["url"])
    service = objects["Service of valkey"]
    assert address.hosts == ((service["metadata"]["name"], service["spec"]["ports"][0]["port"]),)


def test_releases_with_one_store_stay_apart(helm: Helm) -> None:
    """Also two of one name in two namespaces: their replicas may have the same names."""
    url = URLS[0]
    clusters = set()
    for namespace in ("llm", "other", "n" * 63):
        for name in ("a", "x" * 63):
            # The last --namespace counts.
            done = helm.template({**external(url), "fullnameOverride": name}, "--namespace", namespace)
            documents = [each for each in yaml.safe_load_all(done.stdout) if each and each["kind"] == "ConfigMap"]
            clusters.add(yaml.safe_load(documents[0]["data"]["config.yaml"])["sharing"]["cluster"])
    assert len(clusters) == 6
    assert "llm/a" in clusters
    assert max(map(len, clusters)) <= 100, "the gateway's limit"


def test_what_the_configuration_says_of_sharing_is_kept(helm: Helm) -> None:
    mine = {"cluster": "mine", "ca_file": "/etc/store/ca.crt"}
    for values in (OWN, external(URLS[1])):
        sharing = sharing_of(helm, changed(values, "config.sharing", mine))
        assert sharing.items() >= mine.items()
        assert sharing["url"] != "off"
    assert sharing_of(helm, changed(named(URLS[0]), "config.sharing.cluster", "default"))["cluster"] == "default"
    assert "cluster" not in sharing_of(helm, ONE_REPLICA), "nothing is shared"
    off = changed(OWN, "config.sharing.url", False)
    assert sharing_of(helm, off) == sharing_of(helm, OWN)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**named(URLS[0]), "valkey": {"enabled": True}}, "config.sharing.url and valkey.enabled exclude each other"),
        ({**external(URLS[1]), **named(URLS[0])}, "config.sharing.url and valkey.externalUrl exclude each"),
        (
            {**external(URLS[0]), "existingConfigMap": {"name": "mine"}},
            "existingConfigMap.name and valkey.externalUrl exclude each other: write sharing.url into that ConfigMap",
        ),
        (
            changed(OWN, "valkey.maxmemory", "2gb"),
            "valkey.resources.limits.memory (512Mi) has to be above valkey.maxmemory (2gb)",
        ),
        (changed(OWN, "valkey.resources.limits", {"memory": "256M"}), "(256M) has to be above valkey.maxmemory (256mb)"),
    ],
)
def test_what_excludes_each_other_is_refused(helm: Helm, values: Mapping[str, Any], message: str) -> None:
    assert message in helm.refusal(values)


@pytest.mark.parametrize("limits", [{"memory": "257Mi"}, {"memory": 268435457}, {"memory": "0.3G"}, {"cpu": 1}, {}])
def test_a_valkey_has_more_memory_than_it_may_keep(helm: Helm, limits: Mapping[str, Any]) -> None:
    values = changed(OWN, "valkey.resources", {"limits": {"memory": None, **limits}})
    all_valid(helm.objects(values))


def test_passwords_reach_the_gateway_whatever_names_the_store(helm: Helm) -> None:
    auth = {"existingSecret": {**SECRET["existingSecret"], "sentinelKey": "watchers"}}
    names = {"WARMROUTE_SHARING_PASSWORD": "entry", "WARMROUTE_SHARING_SENTINEL_PASSWORD": "watchers"}
    wanted = [{"name": name, "valueFrom": {"secretKeyRef": {"name": "secret", "key": key}}} for name, key in names.items()]
    for values in (OWN, external(URLS[2]), named(URLS[2]), {"existingConfigMap": {"name": "mine"}}):
        assert container(all_valid(helm.objects(changed(values, "valkey.auth", auth))))["env"] == wanted
        assert container(helm.objects(changed(values, "valkey.auth", SECRET)))["env"] == wanted[:1]
    assert "env" not in container(helm.objects({**ONE_REPLICA, "valkey": {"auth": auth}})), "there is none to log in at"


def test_the_password_of_valkey_is_in_no_argument(helm: Helm) -> None:
    (server,) = spec_of(all_valid(helm.objects(changed(OWN, "valkey.auth", SECRET))), "Deployment of valkey")["containers"]
    (variable,) = server["env"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "secret", "key": "entry"}}
    words = [*server["command"], *server["args"]]
    assert [word for word in words if f"$({variable['name']})" in word] == [], "the kubelet would put it in"


def test_a_valkey_without_a_password_admits_the_gateway_alone(helm: Helm) -> None:
    guarded = changed(OWN, "valkey.auth", SECRET)
    assert "NetworkPolicy of valkey" not in helm.objects(guarded)
    for values in (OWN, {**guarded, "networkPolicy": {"enabled": True}}):
        objects = all_valid(helm.objects(values))
        policy = objects["NetworkPolicy of valkey"]["spec"]
        gateway = {"podSelector": {"matchLabels": objects["Deployment"]["spec"]["selector"]["matchLabels"]}}
        assert policy["podSelector"] == {"matchLabels": objects["Deployment of valkey"]["spec"]["selector"]["matchLabels"]}
        assert [rule["from"] for rule in policy["ingress"]] == [[gateway]]
    assert "NetworkPolicy" not in helm.objects(OWN)


def test_notes_say_what_several_gateways_know(tmp_path: Path) -> None:
    alone, no_password = "its own requests only", "asks for no password"
    several = {**ONE_REPLICA, "replicaCount": 3}
    assert alone in notes_of(several, tmp_path)
    assert alone not in notes_of(ONE_REPLICA, tmp_path)
    shared = notes_of({**several, **OWN}, tmp_path)
    assert alone not in shared
    assert no_password in shared
    assert "through redis://demo-warmroute-valkey:6379/0, as cluster llm/demo-warmroute." in shared
    guarded = notes_of(changed({**several, **OWN}, "valkey.auth", SECRET), tmp_path)
    assert no_password not in guarded
    assert alone not in notes_of({**several, **named(URLS[2])}, tmp_path)
    unused = notes_of({**several, "existingConfigMap": {"name": "mine"}, "valkey": {"enabled": True}}, tmp_path)
    assert alone not in unused
    example = re.findall(r"if that ConfigMap names it: (.*)\.\n", unused)[0]
    assert yaml.safe_load(example)["sharing"] == sharing_of_own(tmp_path)


def sharing_of_own(tmp_path: Path) -> dict[str, str]:
    sharing: dict[str, str] = sharing_of(Helm(tool("helm"), tmp_path), OWN)
    return {key: sharing[key] for key in ("url", "cluster")}


def test_the_page_s_example_of_a_store_with_tls_is_right(helm: Helm) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8").partition("\n## Gateways that share\n")[2]
    values = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)[0])
    objects = helm.objects({**SIM, **values})
    for item in objects.values():
        validate(item)
    sharing, main = config_of(objects)["sharing"], container(objects)
    assert parse_store_url(sharing["url"]).kind == "sentinel"
    (mount,) = [each for each in main["volumeMounts"] if sharing["ca_file"].startswith(each["mountPath"])]
    assert mount["name"] in [each["name"] for each in spec_of(objects, "Deployment")["volumes"]]
    assert [each["name"] for each in main["env"]] == ["WARMROUTE_SHARING_PASSWORD", "WARMROUTE_SHARING_SENTINEL_PASSWORD"]
