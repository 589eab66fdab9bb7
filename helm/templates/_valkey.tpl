{{- /* Where the chart's values say that gateways share: its own Valkey, or an external store; empty: nowhere. */ -}}
{{- define "warmroute.valkeyUrl" -}}
{{- if and .Values.valkey.enabled .Values.valkey.externalUrl -}}
{{- fail "valkey.enabled and valkey.externalUrl exclude each other: run one, or name one that you have" -}}
{{- end -}}
{{- if .Values.valkey.enabled -}}
redis://{{ include "warmroute.valkeyName" . }}:6379/0
{{- else -}}
{{- with .Values.valkey.externalUrl -}}
{{- include "warmroute.checkStoreUrl" (list "valkey.externalUrl" .) -}}
{{- . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* .Values.config.sharing with the URL and the cluster that are in force. A dictionary, for fromYaml. */ -}}
{{- define "warmroute.sharing" -}}
{{- $own := default (dict) .Values.config.sharing -}}
{{- $url := default "off" $own.url -}}
{{- include "warmroute.checkStoreUrl" (list "config.sharing.url" $url) -}}
{{- $valkey := include "warmroute.valkeyUrl" . -}}
{{- if and $valkey (ne $url "off") -}}
{{- fail (printf "config.sharing.url and valkey.%s exclude each other: both say where the gateways share" (ternary "enabled" "externalUrl" .Values.valkey.enabled)) -}}
{{- end -}}
{{- $url = default $url $valkey -}}
{{- $cluster := default (include "warmroute.cluster" .) $own.cluster -}}
{{- if ne $url "off" -}}
{{- toYaml (merge (dict "url" $url "cluster" $cluster) $own) -}}
{{- else -}}
{{- toYaml (ternary $own (omit $own "cluster") (not (empty $own.cluster))) -}}
{{- end -}}
{{- end -}}

{{- /* Two releases in one store are two clusters. At most 100 characters. */ -}}
{{- define "warmroute.cluster" -}}
{{- $name := printf "%s/%s" .Release.Namespace (include "warmroute.fullname" .) -}}
{{- if gt (len $name) 100 -}}
{{- $name = printf "%s-%s" (trunc 91 $name) ($name | sha256sum | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- /* The passwords of the store, for the gateway. Whether a ConfigMap of the user's names one is not known. */ -}}
{{- define "warmroute.sharingEnv" -}}
{{- $shared := .Values.existingConfigMap.name -}}
{{- if and $shared .Values.valkey.externalUrl -}}
{{- fail "existingConfigMap.name and valkey.externalUrl exclude each other: write sharing.url into that ConfigMap" -}}
{{- end -}}
{{- if not $shared -}}
{{- $shared = ne "off" (default "off" (include "warmroute.sharing" . | fromYaml).url) -}}
{{- end -}}
{{- with .Values.valkey.auth.existingSecret -}}
{{- if and $shared .name -}}
- name: WARMROUTE_SHARING_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .name | quote }}
      key: {{ .key | quote }}
{{- with .sentinelKey }}
- name: WARMROUTE_SHARING_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.valkey.auth.existingSecret.name | quote }}
      key: {{ . | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a Valkey that would be killed for its memory before it drops what is oldest. */ -}}
{{- define "warmroute.checkValkeyMemory" -}}
{{- $limit := toString (dig "limits" "memory" "" (default (dict) .resources)) -}}
{{- $units := dict "kb" 1024 "mb" 1048576 "gb" 1073741824 -}}
{{- $quantities := dict "" 1 "k" 1e3 "Ki" 1024 "M" 1e6 "Mi" 1048576 "G" 1e9 "Gi" 1073741824 "T" 1e12 "Ti" 1099511627776 -}}
{{- $most := mulf (regexFind "^[0-9]+" .maxmemory) (get $units (regexFind "[a-z]+$" .maxmemory)) -}}
{{- if regexMatch "^[0-9.]+(k|Ki|M|Mi|G|Gi|T|Ti)?$" $limit -}}
{{- if ge $most (mulf (regexFind "^[0-9.]+" $limit) (get $quantities (regexFind "[A-Za-z]*$" $limit))) -}}
{{- fail (printf "valkey.resources.limits.memory (%s) has to be above valkey.maxmemory (%s): Valkey needs more than what it keeps" $limit .maxmemory) -}}
{{- end -}}
{{- end -}}
{{- end -}}
