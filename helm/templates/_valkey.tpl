{{- /* Where several gateways share what they know: the chart's own Valkey, or an external one; empty: nowhere. */ -}}
{{- define "warmroute.sharingUrl" -}}
{{- if and .Values.valkey.enabled .Values.valkey.externalUrl -}}
{{- fail "valkey.enabled and valkey.externalUrl exclude each other: run one, or name one that you have" -}}
{{- end -}}
{{- if .Values.valkey.enabled -}}
redis://{{ include "warmroute.valkeyName" . }}:6379/0
{{- else -}}
{{- .Values.valkey.externalUrl -}}
{{- end -}}
{{- end -}}

{{- /* Its password, for the gateway. */ -}}
{{- define "warmroute.sharingEnv" -}}
{{- if include "warmroute.sharingUrl" . -}}
{{- with .Values.valkey.auth.existingSecret -}}
{{- if .name -}}
- name: WARMROUTE_SHARING_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
