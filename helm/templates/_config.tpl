{{- /* Where replicas are found: .Values.config.discovery, and the chart's own replicas. A dictionary, for fromYaml. */ -}}
{{- define "warmroute.discovery" -}}
{{- $sources := default (list) .Values.config.discovery -}}
{{- if .Values.replicas.enabled -}}
{{- with include "warmroute.replicasMissing" . -}}{{- fail . -}}{{- end -}}
{{- $own := dict "kubernetes" (include "warmroute.replicasName" .) -}}
{{- with .Values.replicas.pool -}}{{- $_ := set $own "pool" . -}}{{- end -}}
{{- $sources = append $sources $own -}}
{{- end -}}
{{- toYaml (dict "sources" $sources) -}}
{{- end -}}

{{- /* The gateway's file: .Values.config and where to listen. */ -}}
{{- define "warmroute.config" -}}
{{- $sources := (include "warmroute.discovery" . | fromYaml).sources -}}
{{- if not (or .Values.config.pools $sources) -}}
{{- fail "config.pools is empty: name at least one replica, for example --set 'config.pools[0].replicas[0]=http://vllm-0:8000', or where they are found, --set config.discovery[0].kubernetes=SERVICE, or let the chart run some, replicas.enabled" -}}
{{- end -}}
{{- range $index, $pool := ternary (list) .Values.config.pools (not (empty $sources)) -}}
{{- if not (or $pool.replicas $pool.decode) -}}
{{- fail (printf "config.pools[%d].replicas is empty: a pool needs at least one replica URL, or one in decode" $index) -}}
{{- end -}}
{{- end -}}
{{- include "warmroute.checkReplicas" . -}}
{{- include "warmroute.checkSources" . -}}
{{- include "warmroute.checkDatabaseUrl" (list "config.state.url" (dig "url" "" (default (dict) .Values.config.state) | toString)) -}}
{{- include "warmroute.checkDatabaseUrl" (list "config.ledger.url" (dig "url" "" (default (dict) .Values.config.ledger) | toString)) -}}
{{- $keysUrl := dig "url" "" (default (dict) .Values.config.keys) | toString -}}
{{- if not (or (eq $keysUrl "ledger") (hasPrefix "/" $keysUrl)) -}}
{{- include "warmroute.checkDatabaseUrl" (list "config.keys.url" $keysUrl) -}}
{{- end -}}
{{- $listen := printf "0.0.0.0:%s" (include "warmroute.port" .) -}}
{{- $metrics := printf "0.0.0.0:%s" (include "warmroute.metricsPort" .) -}}
{{- $chart := dict "listen" $listen "metrics_listen" $metrics "discovery" $sources "sharing" (include "warmroute.sharing" . | fromYaml) -}}
{{- toYaml (merge $chart (omit .Values.config "sharing")) -}}
{{- end -}}

{{- /* What the gateway reads at its start only: a change rolls the pods. All else is reloaded by those that run. */ -}}
{{- define "warmroute.fixed" -}}
{{- $config := dict -}}
{{- if not .Values.existingConfigMap.name -}}
{{- $config = include "warmroute.config" . | fromYaml -}}
{{- end -}}
{{- $fixed := pick $config "admin_listen" "ui" "workers" "state" "ledger" "keys" "prompt_log" "sharing" "snapshot" "log_level" "log_format" "kv_events" -}}
{{- $routing := pick (default (dict) $config.routing) "block_bytes" "compare" "retain" -}}
{{- $tracing := pick (default (dict) $config.tracing) "endpoint" "service" -}}
{{- $workflows := pick (default (dict) $config.workflows) "enabled" "directory" -}}
{{- $limits := pick (default (dict) $config.limits) "adopt_s" -}}
{{- $health := pick (default (dict) $config.health) "wake" -}}
{{- toYaml (merge (dict "routing" $routing "tracing" $tracing "workflows" $workflows "limits" $limits "health" $health) $fixed) -}}
{{- end -}}

{{- /* What the gateway watches by the API of this cluster: lines of NAMESPACE RESOURCE; empty: nothing. */ -}}
{{- define "warmroute.watched" -}}
{{- $lines := list -}}
{{- range (include "warmroute.discovery" . | fromYaml).sources -}}
{{- with .kubernetes -}}
{{- $each := ternary (dict "service" .) . (kindIs "string" .) -}}
{{- if not $each.server -}}
{{- $resource := ternary "pods" "endpointslices" (not (empty $each.pods)) -}}
{{- $lines = append $lines (printf "%s %s" (default $.Release.Namespace $each.namespace) $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- join "\n" (uniq $lines | sortAlpha) -}}
{{- end -}}
