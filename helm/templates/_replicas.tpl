{{- /* What the chart's replicas lack, in one sentence; empty: nothing. */ -}}
{{- define "warmroute.replicasMissing" -}}
{{- $missing := list -}}
{{- with .Values.replicas -}}
{{- if not (or .model .command) -}}
{{- $missing = append $missing "replicas.model is empty: name the model that the replicas serve, or give their whole replicas.command" -}}
{{- end -}}
{{- if not (or .image.tag (eq .engine "sim")) -}}
{{- $missing = append $missing (printf "replicas.image.tag is empty: choose a release of %s" (include "warmroute.replicasRepository" $)) -}}
{{- end -}}
{{- if and $.Values.config.pools (not .pool) (not $.Values.existingConfigMap.name) -}}
{{- $missing = append $missing "replicas.pool is empty: name the pool of config.pools that the replicas belong to" -}}
{{- end -}}
{{- if and (eq .modelCache.type "existingClaim") (not .modelCache.existingClaim) -}}
{{- $missing = append $missing "replicas.modelCache.existingClaim is empty: name the PersistentVolumeClaim with the models" -}}
{{- end -}}
{{- if and (eq .modelCache.type "perReplica") (not .modelCache.size) -}}
{{- $missing = append $missing "replicas.modelCache.size is empty: how large is each replica's volume?" -}}
{{- end -}}
{{- end -}}
{{- join "; " $missing -}}
{{- end -}}

{{- define "warmroute.replicasRepository" -}}
{{- with .Values.replicas -}}
{{- default (get (dict "vllm" "vllm/vllm-openai" "sglang" "lmsysorg/sglang" "sim" $.Values.image.repository) .engine) .image.repository -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.replicasImage" -}}
{{- $image := .Values.replicas.image -}}
{{- $tag := include "warmroute.tag" (list "replicas.image.tag" $image.tag) -}}
{{- if eq .Values.replicas.engine "sim" -}}
{{- if or $image.repository $image.tag -}}
{{- printf "%s:%s" (include "warmroute.replicasRepository" .) (default .Chart.AppVersion $tag) -}}
{{- else -}}
{{- include "warmroute.image" . -}}
{{- end -}}
{{- else -}}
{{- printf "%s:%s" (include "warmroute.replicasRepository" .) $tag -}}
{{- end -}}
{{- end -}}

{{- /* The engine's command. A list under `command`, for fromYaml. */ -}}
{{- define "warmroute.replicasCommand" -}}
{{- with .Values.replicas -}}
{{- $command := .command -}}
{{- if not $command -}}
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
