{{- /* Labels of the gateway's series in Prometheus. */ -}}
{{- define "warmroute.series" -}}
{{- default (printf "namespace=%q,service=%q" .Release.Namespace (include "warmroute.metricsName" .)) .Values.keda.selector -}}
{{- end -}}

{{- define "warmroute.limitsOfScaling" -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "minReplicas (%v) is above maxReplicas (%v)" .minReplicas .maxReplicas) -}}
{{- end -}}
{{- end -}}

{{- /* A trigger of KEDA by Prometheus: (list $ QUERY THRESHOLD). The query's value over the threshold is the number of pods. */ -}}
{{- define "warmroute.trigger" -}}
{{- $query := index . 1 -}}
{{- $threshold := index . 2 -}}
{{- with (first .).Values.keda -}}
{{- if not .serverAddress -}}
{{- fail "keda.serverAddress is empty: name the Prometheus that has the gateway's metrics, for example http://prometheus-operated.monitoring:9090" -}}
{{- end -}}
- type: prometheus
  metricType: AverageValue
  metadata:
    serverAddress: {{ .serverAddress | quote }}
    query: {{ $query | quote }}
    threshold: {{ $threshold | toString | quote }}
  {{- with .authenticationRef }}
  authenticationRef:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- /*
How full each gateway pod is, by what of it is fullest, added up over the pods. Without the slots where the gateways share: all have
the same ones then, and another gateway brings none.
*/ -}}
{{- define "warmroute.saturationQuery" -}}
{{- $series := include "warmroute.series" . -}}
{{- $shares := list -}}
{{- range $part, $names := dict "slots" (list "pool_inflight" "pool_inflight_limit") "connections" (list "client_connections" "client_connections_limit") "memory" (list "inflight_bytes" "inflight_limit_bytes") -}}
{{- $share := printf "max by (instance) (warmroute_%s{%s} / warmroute_%s{%s})" (first $names) $series (last $names) $series -}}
{{- if eq $part "slots" -}}
{{- $share = printf "(%s unless max by (instance) (warmroute_sharing_up{%s} == 1))" $share $series -}}
{{- end -}}
{{- $shares = append $shares (printf "label_replace(%s, \"part\", %q, \"\", \"\")" $share $part) -}}
{{- end -}}
{{- printf "sum(max by (instance) (%s))" (join " or " $shares) -}}
{{- end -}}

{{- /* What the chart's replicas have to do, by their pool. */ -}}
{{- define "warmroute.poolSeries" -}}
{{- printf "%s,pool=%q" (include "warmroute.series" .) (default "default" .Values.replicas.pool) -}}
{{- end -}}

{{- define "warmroute.demandQuery" -}}
{{- $series := include "warmroute.poolSeries" . -}}
{{- printf "sum(warmroute_pool_inflight{%s}) + sum(warmroute_pool_waiting{%s})" $series $series -}}
{{- end -}}

{{- define "warmroute.backlogQuery" -}}
{{- printf "sum(warmroute_pool_prefill_backlog_seconds{%s})" (include "warmroute.poolSeries" .) -}}
{{- end -}}
