{{- define "warmroute.replicasImage" -}}
{{- $image := .Values.replicas.image -}}
{{- if eq .Values.replicas.engine "sim" -}}
{{- if or $image.repository $image.tag -}}
{{- printf "%s:%s" (default .Values.image.repository $image.repository) (default .Chart.AppVersion $image.tag) -}}
{{- else -}}
{{- include "warmroute.image" . -}}
{{- end -}}
{{- else -}}
{{- $repository := default (get (dict "vllm" "vllm/vllm-openai" "sglang" "lmsysorg/sglang") .Values.replicas.engine) $image.repository -}}
{{- if not $image.tag -}}
{{- fail (printf "replicas.image.tag is empty: choose a release of %s" $repository) -}}
{{- end -}}
{{- printf "%s:%s" $repository $image.tag -}}
{{- end -}}
{{- end -}}

{{- /* The engine's command. A list under `command`, for fromYaml. */ -}}
{{- define "warmroute.replicasCommand" -}}
{{- with .Values.replicas -}}
{{- $command := .command -}}
{{- if not $command -}}
{{- if not .model -}}
{{- fail "replicas.model is empty: name the model that the replicas serve, or give their whole replicas.command" -}}
{{- end -}}
{{- $where := list "--host" "0.0.0.0" "--port" (include "warmroute.port" $) -}}
{{- if eq .engine "vllm" -}}
{{- $command = concat (list "vllm" "serve" .model) $where (list "--enable-prompt-tokens-details") -}}
{{- else if eq .engine "sglang" -}}
{{- $command = concat (list "python3" "-m" "sglang.launch_server" "--model-path" .model) $where (list "--enable-cache-report" "--enable-metrics") -}}
{{- else -}}
{{- $command = concat (list "warmroute" "replica" "--engine" "sim") $where -}}
{{- end -}}
{{- with ternary (default .model .servedModelName) .servedModelName (eq .engine "sim") -}}
{{- $command = concat $command (list "--served-model-name" .) -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "command" $command) -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.replicasPodSecurity" -}}
{{- $seccomp := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- $user := dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 -}}
{{- toYaml (default (ternary (merge $user $seccomp) $seccomp (eq .Values.replicas.engine "sim")) .Values.replicas.podSecurityContext) -}}
{{- end -}}

{{- define "warmroute.replicasSecurity" -}}
{{- $less := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) -}}
{{- if eq .Values.replicas.engine "sim" -}}{{- $_ := set $less "readOnlyRootFilesystem" true -}}{{- end -}}
{{- toYaml (default $less .Values.replicas.securityContext) -}}
{{- end -}}
