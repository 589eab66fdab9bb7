"""Strict schemas of the custom resources that the chart makes: the fields that it uses, and no others.

Written from the public API references of the Prometheus operator (monitoring.coreos.com/v1), KEDA (keda.sh/v1alpha1) and the
Gateway API (gateway.networking.k8s.io/v1). A field that the chart begins to use has to be added here, with its reference read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PROMETHEUS_DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
GATEWAY_DURATION: Schema = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
POSITIVE: Schema = {"type": "integer", "minimum": 0}


def fields(*required: str, **properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def items(of: Schema, most: int | None = None) -> Schema:
    return {"type": "array", "items": of, "minItems": 1, **({} if most is None else {"maxItems": most})}


def resource(api: str, kind: str, spec: Schema) -> Schema:
    metadata = fields("name", "labels", name=NAME, labels=TEXTS, annotations=TEXTS)
    of_all = {"apiVersion": {"const": api}, "kind": {"const": kind}, "metadata": metadata, "spec": spec}
    return fields(*of_all, **of_all)


ENDPOINT = fields("port", port=TEXT, path={"type": "string", "pattern": "^/"}, interval=PROMETHEUS_DURATION)
SERVICE_MONITOR = fields("selector", "endpoints", selector=fields("matchLabels", matchLabels=TEXTS), endpoints=items(ENDPOINT))
ALERT = fields("alert", "expr", alert=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": PROMETHEUS_DURATION})
RECORD = fields("record", "expr", record=TEXT, expr=TEXT, labels=TEXTS)
GROUP = fields("name", "rules", name=TEXT, rules=items({"oneOf": [ALERT, RECORD]}))
PROMETHEUS_RULE = fields("groups", groups=items(GROUP))

TRIGGER = fields(
    "type",
    "metadata",
    type=TEXT,
    metadata=TEXTS,
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
    authenticationRef=fields("name", name=NAME, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}),
)
POLICY = fields("type", "value", "periodSeconds", type={"enum": ["Pods", "Percent"]}, value=POSITIVE, periodSeconds=POSITIVE)
DIRECTION = fields(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies=items(POLICY),
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
)
ADVANCED = fields(horizontalPodAutoscalerConfig=fields(behavior=fields(scaleUp=DIRECTION, scaleDown=DIRECTION)))
SCALED_OBJECT = fields(
    "scaleTargetRef",
    "triggers",
    scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=NAME),
    minReplicaCount=POSITIVE,
    maxReplicaCount=POSITIVE,
    pollingInterval=POSITIVE,
    cooldownPeriod=POSITIVE,
    advanced=ADVANCED,
    triggers=items(TRIGGER),
)

PARENT = fields("name", group=TEXT, kind=TEXT, namespace=NAME, name=NAME, sectionName=NAME, port=POSITIVE)
MATCH = fields("path", path=fields("type", "value", type={"enum": ["Exact", "PathPrefix"]}, value={"pattern": "^/"}))
BACKEND = fields("name", "port", name=NAME, port={"type": "integer", "minimum": 1, "maximum": 65535})
RULE = fields(
    "backendRefs",
    matches=items(MATCH, 64),
    filters=items({"type": "object", "required": ["type"]}, 16),
    timeouts=fields(request=GATEWAY_DURATION, backendRequest=GATEWAY_DURATION),
    backendRefs=items(BACKEND, 16),
)
HTTP_ROUTE = fields("rules", parentRefs=items(PARENT, 32), hostnames=items(TEXT, 16), rules=items(RULE, 16))

CRDS: Mapping[tuple[str, str], Schema] = {
    (api, kind): resource(api, kind, spec)
    for api, kind, spec in (
        ("monitoring.coreos.com/v1", "ServiceMonitor", SERVICE_MONITOR),
        ("monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE),
        ("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
        ("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
    )
}
