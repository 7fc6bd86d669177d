{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{- define "numa.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "numa.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "numa.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "numa.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "numa.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "numa.serviceAccount" -}}
{{- default (include "numa.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "numa.selector" -}}
app.kubernetes.io/name: {{ include "numa.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "numa.labels" -}}
{{ include "numa.selector" . }}
{{ include "numa.commonLabels" . }}
{{- end -}}

{{- define "numa.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels that all of the driver's pods have, in every group. */}}
{{- define "numa.everyPod" -}}
app.kubernetes.io/part-of: {{ include "numa.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* The image of a component. A digest replaces the tag, and a mirror replaces the registry. Takes
(dict "image" IMAGE "root" $). */}}
{{- define "numa.image" -}}
{{- $repository := .image.repository -}}
{{- with (default dict .root.Values.global).imageRegistry -}}
{{- /* The part before the first slash is a registry if it contains a dot or a port, or is localhost. */ -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A CPU list as text: YAML reads a single CPU as a number. */}}
{{- define "numa.cpuList" -}}
{{- if not (kindIs "invalid" .) -}}{{- toString . | trim -}}{{- end -}}
{{- end -}}

{{/* Host paths: those in the configuration, else the services' defaults. */}}
{{- define "numa.kubeletRoot" -}}
{{- default "/var/lib/kubelet" .Values.driverConfig.kubeletRootDir | clean -}}
{{- end -}}
{{- define "numa.cdiDir" -}}
{{- default "/var/run/cdi" .Values.driverConfig.cdiDir | clean -}}
{{- end -}}
{{- define "numa.runDir" -}}
{{- default "/run/dra-driver-numa" .Values.driverConfig.runDir | clean -}}
{{- end -}}
{{- define "numa.nriSocket" -}}
{{- default "/var/run/nri/nri.sock" .Values.driverConfig.nriSocket | clean -}}
{{- end -}}
{{- define "numa.cgroupRoot" -}}
{{- default "/sys/fs/cgroup" .Values.driverConfig.cgroupRoot | clean -}}
{{- end -}}

{{/* Converts a page size from any of its spellings to that of Kubernetes: 2048kB becomes 2Mi. */}}
{{- define "numa.pageSize" -}}
{{- $count := regexFind "^[0-9]+" . | int64 -}}
{{- $unit := regexFind "[kKmMgG]" . | upper -}}
{{- range list "K" "M" -}}
{{- if and (eq $unit .) (gt $count 0) (eq (mod $count 1024) 0) -}}
{{- $count = div $count 1024 -}}
{{- $unit = ternary "M" "G" (eq . "K") -}}
{{- end -}}
{{- end -}}
{{- printf "%d%si" $count $unit -}}
{{- end -}}

{{/* Page sizes in the hugepagesOnDemand of all groups, as a YAML list in the spelling of Kubernetes (2Mi). */}}
{{- define "numa.onDemandSizes" -}}
{{- $sizes := list -}}
{{- range $group := include "numa.groups" . | fromYamlArray -}}
{{- $scope := include "numa.scope" (dict "root" $ "group" $group) | fromYaml -}}
{{- range $scope.Values.driverConfig.hugepagesOnDemand -}}
{{- $sizes = append $sizes (include "numa.pageSize" .size) -}}
{{- end -}}
{{- end -}}
{{- $sizes | uniq | toYaml -}}
{{- end -}}

{{/* Security context of a container. It has no capabilities except those in .add (a list). The driver's containers run
as root, because root owns the sockets and cgroup files. */}}
{{- define "numa.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
  {{- with .add }}
  add: [{{ join ", " . }}]
  {{- end }}
readOnlyRootFilesystem: true
{{- end -}}

{{/* Security context of the driver's containers. On a node without AppArmor, the kubelet rejects a pod that names a
profile, so none is named by default. */}}
{{- define "numa.driverSecurity" -}}
{{ include "numa.containerSecurity" . }}
{{- with .root.Values.appArmorProfile }}
appArmorProfile: {type: {{ . }}}
{{- end }}
{{- end -}}

{{/* Address of the page that alerts link to. If the operator has set none, a released chart uses the page of its
version in the repository that it was released from. */}}
{{- define "numa.runbookURL" -}}
{{- if .Values.metrics.prometheusRule.runbookURL -}}
{{- .Values.metrics.prometheusRule.runbookURL -}}
{{- else if .Chart.Home -}}
{{- printf "%s/blob/v%s/docs/symptoms.md" .Chart.Home .Chart.Version -}}
{{- end -}}
{{- end -}}

{{/* The probes of a container, without those set to null. Takes (dict "probes" PROBES "port" PORT). */}}
{{- define "numa.probes" -}}
{{- range $kind, $path := dict "startup" "/healthz" "liveness" "/healthz" "readiness" "/readyz" }}
{{- with get $.probes $kind }}
{{- printf "\n%sProbe:" $kind }}
  httpGet:
    path: {{ $path }}
    port: {{ $.port }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Names of hugepage classes contain the page size in lower case and without the i: 2Mi becomes 2m. */}}
{{- define "numa.shortSize" -}}
{{- . | lower | trimSuffix "i" -}}
{{- end -}}

{{- define "numa.env" -}}
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: POD_UID
  valueFrom:
    fieldRef:
      fieldPath: metadata.uid
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Names of all classes, as a YAML list. */}}
{{- define "numa.classNames" -}}
- dra.cpu
{{- range $suffix := ternary (list "" "-far") (list "") .Values.deviceClasses.farMemory }}
- dra.memory{{ $suffix }}
{{- range $.Values.deviceClasses.hugepageSizes }}
- dra.hugepages-{{ include "numa.shortSize" . }}{{ $suffix }}
{{- end }}
{{- end }}
{{- end -}}
