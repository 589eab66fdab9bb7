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

{{- /* Of the gateway's pods alone: the chart's other pods have another name, see warmroute.partSelector. */ -}}
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

{{- /* The names of what is beside the gateway. A StatefulSet's has 52 characters at most: its pods carry it with a hash as a label. */ -}}
{{- define "warmroute.replicasName" -}}{{ include "warmroute.fullname" . | trunc 43 | trimSuffix "-" }}-replicas{{- end -}}
{{- define "warmroute.valkeyName" -}}{{ include "warmroute.fullname" . | trunc 56 | trimSuffix "-" }}-valkey{{- end -}}
{{- define "warmroute.metricsName" -}}{{ include "warmroute.fullname" . | trunc 55 | trimSuffix "-" }}-metrics{{- end -}}

{{- /* Labels of a part beside the gateway: (list . "replicas"). Not the gateway's, or its Service would send requests there. */ -}}
{{- define "warmroute.partSelector" -}}
{{- $part := last . -}}
{{- with first . -}}
app.kubernetes.io/name: {{ printf "%s-%s" (include "warmroute.name" . | trunc 54 | trimSuffix "-") $part }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}

{{- define "warmroute.partLabels" -}}
{{- with first . -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{ include "warmroute.partSelector" . }}
app.kubernetes.io/part-of: {{ include "warmroute.name" (first .) }}
{{- end -}}

{{- /* Spread of pods, (list CONSTRAINTS SELECTOR): those that name no pods are about these. */ -}}
{{- define "warmroute.spread" -}}
{{- $selector := dict "labelSelector" (dict "matchLabels" (last . | fromYaml)) -}}
{{- $spread := list -}}
{{- range first . -}}
{{- $spread = append $spread (ternary . (merge (deepCopy .) (deepCopy $selector)) (hasKey . "labelSelector")) -}}
{{- end -}}
{{- toYaml $spread -}}
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

{{- define "warmroute.gracePeriod" -}}
{{- /* 10 s: to answer what the kernel has accepted, to end what has not finished, and to write the last snapshot */ -}}
{{- $needed := addf .Values.preStopSleepSeconds .Values.config.limits.drain_accept_s .Values.config.limits.drain_timeout_s 10 -}}
{{- if lt (float64 .Values.terminationGracePeriodSeconds) $needed -}}
{{- fail (printf "terminationGracePeriodSeconds (%v) has to be at least preStopSleepSeconds + config.limits.drain_accept_s + config.limits.drain_timeout_s + 10 (%v): the kubelet would kill running requests" .Values.terminationGracePeriodSeconds $needed) -}}
{{- end -}}
{{- .Values.terminationGracePeriodSeconds -}}
{{- end -}}
