{{- define "warmroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "warmroute.fullname" -}}
{{- $name := include "warmroute.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.selectorLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{ include "warmroute.selectorLabels" . }}
{{- end -}}

{{- define "warmroute.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "warmroute.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.port" -}}8000{{- end -}}
{{- define "warmroute.metricsPort" -}}8002{{- end -}}

{{- /* The gateway's file: .Values.config and where to listen. */ -}}
{{- define "warmroute.config" -}}
{{- if not (or .Values.config.pools .Values.config.discovery) -}}
{{- fail "config.pools is empty: name at least one replica, for example --set 'config.pools[0].replicas[0]=http://vllm-0:8000', or where they are found, --set config.discovery[0].kubernetes=SERVICE" -}}
{{- end -}}
{{- range $index, $pool := ternary (list) .Values.config.pools (not (empty .Values.config.discovery)) -}}
{{- if not $pool.replicas -}}
{{- fail (printf "config.pools[%d].replicas is empty: a pool needs at least one replica URL" $index) -}}
{{- end -}}
{{- end -}}
{{- $listen := printf "0.0.0.0:%s" (include "warmroute.port" .) -}}
{{- $metrics := printf "0.0.0.0:%s" (include "warmroute.metricsPort" .) -}}
{{- toYaml (merge (dict "listen" $listen "metrics_listen" $metrics) .Values.config) -}}
{{- end -}}

{{- /* What the gateway reads at its start only: a change rolls the pods. All else is reloaded by those that run. */ -}}
{{- define "warmroute.fixed" -}}
{{- $config := .Values.config -}}
{{- $fixed := pick $config "admin_listen" "workers" "state" "log_level" "log_format" -}}
{{- $routing := pick (default (dict) $config.routing) "block_bytes" "block_tokens" -}}
{{- toYaml (merge (dict "routing" $routing) $fixed) -}}
{{- end -}}

{{- /* What the gateway watches by the API of this cluster: lines of NAMESPACE RESOURCE; empty: nothing. */ -}}
{{- define "warmroute.watched" -}}
{{- $lines := list -}}
{{- range .Values.config.discovery -}}
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

{{- define "warmroute.gracePeriod" -}}
{{- $needed := addf .Values.preStopSleepSeconds .Values.config.limits.drain_timeout_s -}}
{{- if le (float64 .Values.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "terminationGracePeriodSeconds (%v) has to be longer than preStopSleepSeconds + config.limits.drain_timeout_s (%v): the kubelet would kill running requests" .Values.terminationGracePeriodSeconds $needed) -}}
{{- end -}}
{{- .Values.terminationGracePeriodSeconds -}}
{{- end -}}
