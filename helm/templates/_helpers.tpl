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
app.kubernetes.io/name: {{ include "warmroute.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
app.kubernetes.io/name: {{ printf "%s-%s" (include "warmroute.name" . | trunc 54 | trimSuffix "-") $part | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}
{{- end -}}

{{- define "warmroute.partLabels" -}}
{{- with first . -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{ include "warmroute.partSelector" . }}
app.kubernetes.io/part-of: {{ include "warmroute.name" (first .) | quote }}
{{- end -}}

{{- /* (list LABELS MORE): labels or annotations of the chart, as text, and those of the user, which win. */ -}}
{{- define "warmroute.merged" -}}
{{- toYaml (merge (dict) (default (dict) (last .)) (first . | fromYaml)) -}}
{{- end -}}

{{- /* Labels of pods, (list SELECTOR WHERE MORE): those that they are found by cannot be others. */ -}}
{{- define "warmroute.podLabels" -}}
{{- $where := index . 1 -}}
{{- $more := default (dict) (last .) -}}
{{- range $name, $value := first . | fromYaml -}}
{{- if ne $value (get (merge (dict) $more (dict $name $value)) $name) -}}
{{- fail (printf "%s: the pods are found by the label %s, which has to stay %s" $where $name $value) -}}
{{- end -}}
{{- end -}}
{{- include "warmroute.merged" (list (first .) $more) -}}
{{- end -}}

{{- define "warmroute.podAnnotations" -}}
checksum/restart: {{ include "warmroute.fixed" . | sha256sum | quote }}
{{- if .Values.metrics.podAnnotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ include "warmroute.metricsPort" . | quote }}
prometheus.io/path: /metrics
{{- end -}}
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

{{- /* The tag of an image, (list WHERE TAG). A number is one that has lost its zeros. */ -}}
{{- define "warmroute.tag" -}}
{{- if not (kindIs "string" (last .)) -}}
{{- fail (printf "%s has to be text, got the number %v: quote it, or give it by --set-string %s=..." (first .) (last .) (first .)) -}}
{{- end -}}
{{- last . -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{- $tag := include "warmroute.tag" (list "image.tag" .Values.image.tag) -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion $tag) -}}
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
