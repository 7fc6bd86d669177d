{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Groups of nodes. Each group has its own DaemonSet and ConfigMap. The nodes that no group in the values
selects form an additional group, which comes last and has no name. */}}

{{- define "numa.groupLabel" -}}
dra-driver-numa/group
{{- end -}}

{{/*
Returns the groups as a YAML list: {name, nodeSelector, driverConfig, frontend, backend, hugepageProvision, others}. A
node belongs to the first group in the list that selects it. "others" contains the node selectors of those earlier
groups that may select the same nodes.
*/}}
{{- define "numa.groups" -}}
{{- $groups := list -}}
{{- range default list .Values.groups -}}
{{- $selector := default (dict (include "numa.groupLabel" $) .name) .nodeSelector -}}
{{- $others := list -}}
{{- $group := . -}}
{{- range $upper := $groups -}}
{{- if eq $upper.name $group.name -}}
{{- fail (printf "groups: %s is listed twice" $group.name) -}}
{{- end -}}
{{- $apart := false -}}
{{- $within := true -}}
{{- range $key, $value := $upper.nodeSelector -}}
{{- $apart = or $apart (and (hasKey $selector $key) (ne (get $selector $key) $value)) -}}
{{- $within = and $within (eq (get $selector $key) $value) -}}
{{- end -}}
{{- if $within -}}
{{- fail (printf "groups: %s would have no nodes: %s, above it, selects all of them; list it above that group, or give it another nodeSelector" $group.name $upper.name) -}}
{{- end -}}
{{- if not $apart -}}
{{- $others = append $others $upper.nodeSelector -}}
{{- end -}}
{{- end -}}
{{- $groups = append $groups (merge (dict "nodeSelector" $selector "others" $others) $group) -}}
{{- end -}}
{{- $rest := list -}}
{{- range $groups -}}
{{- /* The group without a name excludes all nodes with the group label, whatever its value, so it need not exclude this
group's nodes by their selector. */ -}}
{{- if not (hasKey .nodeSelector (include "numa.groupLabel" $)) -}}
{{- $rest = append $rest .nodeSelector -}}
{{- end -}}
{{- end -}}
{{- append $groups (dict "name" "" "others" $rest) | toYaml -}}
{{- end -}}

{{/* Returns the context in which a group's objects are rendered: the chart's values, overridden by the group's. Takes
(dict "root" $ "group" GROUP). */}}
{{- define "numa.scope" -}}
{{- $values := deepCopy (merge dict .root.Values) -}}
{{- range $part := list "driverConfig" "nodeSelector" "hugepageProvision" -}}
{{- range $key, $value := default dict (get $.group $part) -}}
{{- $_ := set $values $part (set (default dict (get $values $part)) $key $value) -}}
{{- end -}}
{{- end -}}
{{- range $name := list "frontend" "backend" -}}
{{- range $key, $value := dig $name "image" dict $.group -}}
{{- $_ := set (get $values $name).image $key $value -}}
{{- end -}}
{{- end -}}
{{- dict "Values" $values "Group" .group "Chart" (dict "Name" .root.Chart.Name "Version" .root.Chart.Version "AppVersion" .root.Chart.AppVersion) "Release" (dict "Name" .root.Release.Name "Namespace" .root.Release.Namespace "Service" .root.Release.Service) | toYaml -}}
{{- end -}}

{{- define "numa.groupName" -}}
{{- include "numa.fullname" . }}{{ with .Group.name }}-{{ . }}{{ end -}}
{{- end -}}

{{/* The labels in the selector of a group's DaemonSet. A selector must not match the pods of another DaemonSet, and
cannot be changed later. So the group without a name keeps the chart's selector, and each named group has different
labels. */}}
{{- define "numa.groupSelector" -}}
{{- if .Group.name -}}
app.kubernetes.io/name: {{ printf "%s-group" (include "numa.name" . | trunc 57) | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{ include "numa.groupLabel" . }}: {{ .Group.name | quote }}
{{- else -}}
{{ include "numa.selector" . }}
{{- end -}}
{{- end -}}

{{- define "numa.groupLabels" -}}
{{ include "numa.groupSelector" . }}
app.kubernetes.io/part-of: {{ include "numa.name" . | quote }}
{{ include "numa.commonLabels" . }}
{{- end -}}

{{/*
Returns the affinity of a group's pods: the operator's own affinity, which is restricted so that it excludes the nodes
of other groups. A node belongs to another group if it has all labels in that group's selector. A node that lacks one of
these labels, or has a different value for it, does not belong to that group, so each label becomes a separate term.
*/}}
{{- define "numa.affinity" -}}
{{- $terms := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" (list dict) (default dict .Values.affinity) -}}
{{- $others := .Group.others -}}
{{- if not .Group.name -}}
{{- $terms = include "numa.terms" (dict "terms" $terms "selector" (dict (include "numa.groupLabel" .) "") "rest" true) | fromYamlArray -}}
{{- end -}}
{{- range $others -}}
{{- $terms = include "numa.terms" (dict "terms" $terms "selector" .) | fromYamlArray -}}
{{- end -}}
{{- if gt (len $terms) 64 -}}
{{- fail (printf "groups: the nodes in no group would need %d terms of node affinity: select the nodes of each group by one label" (len $terms)) -}}
{{- end -}}
{{- $affinity := deepCopy (default dict .Values.affinity) -}}
{{- if or (not .Group.name) $others -}}
{{- $required := dict "nodeSelectorTerms" $terms -}}
{{- $_ := set $affinity "nodeAffinity" (set (default dict $affinity.nodeAffinity) "requiredDuringSchedulingIgnoredDuringExecution" $required) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}

{{/*
Returns terms that select the same nodes as the given terms, except the nodes that the selector matches. Takes
(dict "terms" TERMS "selector" LABELS). With the key "rest", a node matches a label whatever the label's value is.
*/}}
{{- define "numa.terms" -}}
{{- $left := list -}}
{{- range $term := .terms -}}
{{- range $key, $value := $.selector -}}
{{- $apart := ternary (dict "key" $key "operator" "DoesNotExist") (dict "key" $key "operator" "NotIn" "values" (list $value)) (hasKey $ "rest") -}}
{{- $left = append $left (set (deepCopy $term) "matchExpressions" (append (default list $term.matchExpressions) $apart)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $left -}}
{{- end -}}

{{/* The files in the ConfigMap that a group's pods read. */}}
{{- define "numa.files" -}}
config.yaml: |
  apiVersion: v1alpha1
{{- $given := dict }}
{{- range $key, $value := omit .Values.driverConfig "apiVersion" }}
  {{- if not (kindIs "invalid" $value) }}
    {{- $_ := set $given $key (eq $key "reservedCPUs" | ternary (include "numa.cpuList" $value) $value) }}
  {{- end }}
{{- end }}
{{- with $given }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.hugepageProvision.enabled }}
hugepages.yaml: |
  kind: HugePageProvision
  metadata: {name: {{ include "numa.fullname" . | quote }}}
  spec:
    pages:
      {{- toYaml .Values.hugepageProvision.pages | nindent 6 }}
{{- end }}
{{- end -}}

{{/*
The nodes that NOTES warns about, as the end of a sentence, or nothing. Takes (dict "root" $) and either "observe" or
"unreserved".
*/}}
{{- define "numa.nodesThat" -}}
{{- $root := .root -}}
{{- $named := list -}}
{{- $rest := false -}}
{{- range $group := include "numa.groups" $root | fromYamlArray -}}
{{- $config := (include "numa.scope" (dict "root" $root "group" $group) | fromYaml).Values.driverConfig -}}
{{- $observes := eq ($config.enforcement | default "enforce") "observe" -}}
{{- $reserves := ne (include "numa.cpuList" $config.reservedCPUs) "" -}}
{{- if or (and $.observe $observes) (and $.unreserved (not $reserves)) -}}
{{- if $group.name -}}
{{- $named = append $named $group.name -}}
{{- else -}}
{{- $rest = true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $places := list -}}
{{- if $named -}}
{{- $places = append $places (printf "in %s %s" (ternary "group" "groups" (eq (len $named) 1)) (join ", " $named)) -}}
{{- end -}}
{{- if $rest -}}
{{- $places = append $places (ternary "on nodes of no group" "on all nodes" (gt (len (default list $root.Values.groups)) 0)) -}}
{{- end -}}
{{- with $places }} {{ join " and " . }}{{ end -}}
{{- end -}}
