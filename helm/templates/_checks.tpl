{{- /* What the gateway would refuse at its start, and the schema of the values cannot say. */ -}}

{{- define "warmroute.checkReplicas" -}}
{{- range $pool, $each := .Values.config.pools -}}
{{- range $list := list "replicas" "prefill" "decode" -}}
{{- range $place, $replica := index $each $list -}}
{{- $url := (ternary (dict "url" $replica) $replica (kindIs "string" $replica)).url -}}
{{- with regexFind "/v1/(chat/completions|completions|embeddings|models|responses|messages|score|rerank|tokenize)/*$" $url -}}
{{- fail (printf "config.pools[%d].%s[%d]: %s is the URL of an API path, not a base URL; write %s" $pool $list $place $url (trimSuffix . $url)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.checkSources" -}}
{{- $pools := include "warmroute.poolNames" . | fromYaml -}}
{{- range $place, $source := .Values.config.discovery -}}
{{- $at := printf "config.discovery[%d]" $place -}}
{{- $kinds := keys (pick $source "dns" "kubernetes" "file") -}}
{{- if ne (len $kinds) 1 -}}
{{- fail (printf "%s: one of dns, kubernetes, file is expected, got %s" $at (default "none" (join " and " (sortAlpha $kinds)))) -}}
{{- end -}}
{{- include "warmroute.checkDns" (list $at $source.dns) -}}
{{- if kindIs "map" $source.kubernetes -}}
{{- if eq (empty $source.kubernetes.service) (empty $source.kubernetes.pods) -}}
{{- fail (printf "%s.kubernetes: either service or pods is expected" $at) -}}
{{- end -}}
{{- end -}}
{{- if $pools.known -}}
{{- if and $source.pool (not (has $source.pool $pools.names)) -}}
{{- fail (printf "%s.pool: %q is no pool's name; possible are: %s" $at $source.pool (join ", " $pools.names)) -}}
{{- else if and (not $source.pool) (gt (len $pools.names) 1) -}}
{{- fail (printf "%s.pool is empty: name the replicas' pool, one of %s" $at (join ", " $pools.names)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* (list WHERE DNS). DNS: a name, a dictionary or nothing. */ -}}
{{- define "warmroute.checkDns" -}}
{{- $at := first . -}}
{{- with last . -}}
{{- $dns := ternary (dict "name" .) . (kindIs "string" .) -}}
{{- if not (or $dns.port (hasPrefix "_" $dns.name)) -}}
{{- fail (printf "%s.dns.port is missing: name the replicas' port, or SRV records such as _http._tcp.%s" $at $dns.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* names: of the pools. known: false where the gateway makes some of them up, of models. A dictionary, for fromYaml. */ -}}
{{- define "warmroute.poolNames" -}}
{{- $names := list -}}
{{- $unnamed := 0 -}}
{{- range default (list dict) .Values.config.pools -}}
{{- if not .name -}}{{- $unnamed = add $unnamed (ternary 2 1 (not (empty .models))) -}}{{- end -}}
{{- $names = append $names (default "default" .name) -}}
{{- end -}}
{{- toYaml (dict "names" $names "known" (le (int $unnamed) 1)) -}}
{{- end -}}

{{- /* (list WHERE URL) of a store. The pattern and what is expected: gateway/config/addresses.py. */ -}}
{{- define "warmroute.checkStoreUrl" -}}
{{- $at := first . -}}
{{- $url := last . -}}
{{- if regexMatch ":.*:.*@" $url -}}
{{- fail (printf "%s: a password does not belong in a URL, for it would be in the ConfigMap: put it into a Secret, and name that in valkey.auth.existingSecret" $at) -}}
{{- else if not (regexMatch `^(off|rediss?(\+sentinel|\+cluster)?://([^\s@/:]+@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?(,(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?)*(/[A-Za-z0-9_.-]+)?(/[0-9]{1,5})?)$` $url) -}}
{{- fail (printf "%s: redis://[USER@]HOST[:PORT][/DB], or rediss://, redis+sentinel://, redis+cluster://, or off is expected, got %q" $at (regexReplaceAll "^.*@" $url "")) -}}
{{- end -}}
{{- end -}}

{{- /* (list WHERE URL) of a database. */ -}}
{{- define "warmroute.checkDatabaseUrl" -}}
{{- if regexMatch `^postgres(ql)?://([^\s/?#]*:[^\s/?#]*@|.*[?&]password=)` (last .) -}}
{{- fail (printf "%s: a password does not belong in a URL, for it would be in the ConfigMap: put PGPASSWORD into a Secret, and name that in extraEnvFrom" (first .)) -}}
{{- end -}}
{{- end -}}
