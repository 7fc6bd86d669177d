{{/* SPDX-License-Identifier: Apache-2.0 */}}
{{/* Checks that a JSON schema cannot express. Every message names the value and the remedy. */}}
{{- define "numa.checks" -}}
{{- include "numa.checkPeerValues" . -}}
{{- /* Without a cluster, as with "helm template", lookup finds no namespace, and its level is not checked. */ -}}
{{- $namespace := include "numa.namespace" . -}}
{{- $level := dig "metadata" "labels" "pod-security.kubernetes.io/enforce" "privileged" (lookup "v1" "Namespace" "" $namespace) -}}
{{- if ne $level "privileged" -}}
{{- fail (printf "namespace %s: enforces the Pod Security level %s, so the driver's pods would not start: kubectl label --overwrite namespace %s pod-security.kubernetes.io/enforce=privileged" $namespace $level $namespace) -}}
{{- end -}}
{{- range $key := list "nameOverride" "fullnameOverride" "namespaceOverride" -}}
{{- include "numa.text" (list $key (get $.Values $key) "([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?" "must consist of at most 63 lower-case letters, digits and hyphens") -}}
{{- end -}}
{{- range .Values.deviceClasses.hugepageSizes -}}
{{- include "numa.text" (list "deviceClasses.hugepageSizes" . (printf "%s[KMG]i" (include "numa.powerOfTwo" .)) "is not the size of a hugepage: write it as in hugepages-2Mi or hugepages-1Gi") -}}
{{- end -}}
{{- range .Values.networkPolicy.apiServerCIDRs -}}
{{- include "numa.text" (list "networkPolicy.apiServerCIDRs" . "[0-9a-fA-F:.]+/[0-9]{1,3}" "is not a range of addresses: a single address is 10.0.0.1/32 or fd00::1/128") -}}
{{- end -}}
{{- include "numa.checkPods" . -}}
{{- end -}}

{{/* Rejects values of dra-driver-cpu's chart that have another key in this chart. Helm's own message would not name the
new key. */}}
{{- define "numa.checkPeerValues" -}}
{{- $places := dict "image" "frontend.image and backend.image" "resources" "frontend.resources and backend.resources" "kubeletRootDir" "driverConfig.kubeletRootDir" "sysfsOverlay" "driverConfig.sysfsOverlay" "healthzPort" "frontend.port" "extraArgs" "frontend.extraArgs and backend.extraArgs" "extraVolumeMounts" "frontend.extraVolumeMounts and backend.extraVolumeMounts" -}}
{{- range $key, $place := $places -}}
{{- if hasKey $.Values $key -}}
{{- fail (printf "%s: is a value of dra-driver-cpu's chart; use %s here (docs/migration.md)" $key $place) -}}
{{- end -}}
{{- end -}}
{{- if hasKey (default dict .Values.driverConfig) "bindAddress" -}}
{{- fail "driverConfig.bindAddress: is a key of dra-driver-cpu; use frontend.port here (docs/migration.md)" -}}
{{- end -}}
{{- if hasKey .Values "healthzPath" -}}
{{- fail "healthzPath: is a value of dra-driver-cpu's chart; remove it, since the path is always /healthz (docs/migration.md)" -}}
{{- end -}}
{{- if hasKey .Values "args" -}}
{{- $found := list -}}
{{- if kindIs "map" .Values.args -}}
{{- range $key := keys .Values.args | sortAlpha -}}
{{- $note := ternary " (debug, info, warning or error)" "" (eq $key "logLevel") -}}
{{- $found = append $found (printf "driverConfig.%s%s" $key $note) -}}
{{- end -}}
{{- end -}}
{{- fail (printf "args: is a value of dra-driver-cpu's chart; use %s here (docs/migration.md)" (default "driverConfig" (join ", " $found))) -}}
{{- end -}}
{{- end -}}

{{/* Checks that a value matches a pattern. Helm's own message would contain only the pattern. Takes
(list KEY VALUE PATTERN WORDS). */}}
{{- define "numa.text" -}}
{{- if not (regexMatch (printf "^(%s)$" (index . 2)) (toString (index . 1))) -}}
{{- fail (printf "%s: %q %s" (index . 0) (toString (index . 1)) (index . 3)) -}}
{{- end -}}
{{- end -}}

{{- define "numa.powerOfTwo" -}}
(1|2|4|8|16|32|64|128|256|512|1024|2048|4096|8192|16384|32768|65536|131072|262144|524288|1048576)
{{- end -}}

{{/* Rejects a class that exists already and does not belong to this release. Helm up to 3.17 does not know
resource.k8s.io/v1: it would adopt the class without changing it, and the release would use another driver's selectors.
Takes (list ROOT NAME). */}}
{{- define "numa.checkClass" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- /* Helm's lookup fails if the API is not served. In that case, the class cannot exist. */ -}}
{{- if $root.Capabilities.APIVersions.Has "resource.k8s.io/v1/DeviceClass" -}}
{{- with lookup "resource.k8s.io/v1" "DeviceClass" "" $name -}}
{{- $owner := printf "%s/%s" (dig "annotations" "meta.helm.sh/release-namespace" "" .metadata) (dig "annotations" "meta.helm.sh/release-name" "" .metadata) -}}
{{- if ne $owner (printf "%s/%s" $root.Release.Namespace $root.Release.Name) -}}
{{- fail (printf "DeviceClass %s exists and does not belong to this release, and Helm would not change its selectors. Delete it; allocated claims no longer need it: kubectl delete deviceclass %s. If another release of this chart owns it, set deviceClasses.create=false instead" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "numa.inGroup" -}}
{{- with .Group.name }}group {{ . }}: {{ end -}}
{{- end -}}

{{/* Checks of the values that a group may override. */}}
{{- define "numa.checkGroup" -}}
{{- $in := include "numa.inGroup" . -}}
{{- range $key := list "kubeletRootDir" "cdiDir" "runDir" "nriSocket" "cgroupRoot" "sysfsOverlay" -}}
{{- $path := get $.Values.driverConfig $key | toString -}}
{{- if regexMatch "(^|/)[.][.](/|$)" $path -}}
{{- fail (printf "%sdriverConfig.%s: %s must be an absolute path without '..'" $in $key $path) -}}
{{- end -}}
{{- if regexMatch "[:\"\\\\]" $path -}}
{{- fail (printf "%sdriverConfig.%s: %s must contain no colon, quote or backslash, since it is mounted" $in $key $path) -}}
{{- end -}}
{{- end -}}
{{- include "numa.checkFormerNames" . -}}
{{- include "numa.checkDirectories" . -}}
{{- include "numa.checkSockets" . -}}
{{- include "numa.checkFiles" . -}}
{{- end -}}

{{/* Former names of settings, which are still accepted. The services have the same table; see
numa_contract/names.py. */}}
{{- define "numa.formerSettings" -}}
minSharedCPUs: withheldCPUs
sharedPool: poolGrowth
{{- end -}}

{{/* Returns the value of a setting under its former name, or nothing if it is not set. sharedPool was a map with the
single key "grow". Takes (list DRIVERCONFIG KEY). */}}
{{- define "numa.formerValue" -}}
{{- $value := get (index . 0) (index . 1) -}}
{{- if kindIs "map" $value -}}{{- $value = get $value "grow" -}}{{- end -}}
{{- if not (kindIs "invalid" $value) -}}{{- $value -}}{{- end -}}
{{- end -}}

{{/* Rejects a setting that is given under its present and its former name. A group inherits driverConfig, so one name
may come from the group and the other from driverConfig. */}}
{{- define "numa.checkFormerNames" -}}
{{- range $former, $present := include "numa.formerSettings" . | fromYaml -}}
{{- $value := get $.Values.driverConfig $present -}}
{{- if and (include "numa.formerValue" (list $.Values.driverConfig $former)) (hasKey $.Values.driverConfig $present) (not (kindIs "invalid" $value)) -}}
{{- fail (printf "%sdriverConfig.%s: is the former name of driverConfig.%s, and both are given; remove %s" (include "numa.inGroup" $) $former $present $former) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Each path must be under one of a few parents, so that a typo does not mount /boot or /root into the pod. */}}
{{- define "numa.checkDirectories" -}}
{{- $in := include "numa.inGroup" . -}}
{{- $nri := dir (include "numa.nriSocket" .) -}}
{{- $places := dict "driverConfig.kubeletRootDir" (include "numa.kubeletRoot" .) "driverConfig.cdiDir" (include "numa.cdiDir" .) "driverConfig.runDir" (include "numa.runDir" .) "the directory of driverConfig.nriSocket" $nri "driverConfig.cgroupRoot" (include "numa.cgroupRoot" .) -}}
{{- $volatile := list "/run" "/var/run" -}}
{{- $parents := dict "driverConfig.kubeletRootDir" (list "/var/lib" "/var/snap" "/var/data" "/data" "/mnt" "/opt" "/srv") "driverConfig.cgroupRoot" (list "/sys/fs/cgroup") -}}
{{- range $key, $path := $places -}}
{{- $allowed := default $volatile (get $parents $key) -}}
{{- $inside := and (eq $path "/sys/fs/cgroup") (has $path $allowed) -}}
{{- range $parent := $allowed -}}
{{- $inside = or $inside (hasPrefix (printf "%s/" $parent) $path) -}}
{{- end -}}
{{- if not $inside -}}
{{- fail (printf "%s%s: %s is mounted into the pod and must be a separate directory under %s%s" $in $key $path (join ", " $allowed) (ternary ", which a reboot empties, since claims do not survive a reboot" "" (eq $key "driverConfig.cdiDir"))) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "driverConfig.cdiDir" "driverConfig.runDir" -}}
{{- $path := get $places $key -}}
{{- if regexMatch "^(/var)?/run/(containerd|crio|dbus|docker|lock|log|mount|netns|systemd|udev|user)(/|$)" $path -}}
{{- fail (printf "%s%s: %s belongs to another program on the node: choose a separate directory" $in $key $path) -}}
{{- end -}}
{{- end -}}
{{- range $key, $path := $places -}}
{{- range $other, $above := omit $places $key -}}
{{- $inner := regexReplaceAll "^/var/run/" (printf "%s/" $path) "/run/" -}}
{{- $outer := regexReplaceAll "^/var/run/" (printf "%s/" $above) "/run/" -}}
{{- if hasPrefix $outer $inner -}}
{{- fail (printf "%s%s: %s must not be %s (%s) or be inside it: choose a separate directory" $in $key $path $other $above) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The path of a unix socket may have at most 107 bytes (unix(7)). The paths of the driver's own sockets contain the
pod's UID, which has 36 bytes. */}}
{{- define "numa.checkSockets" -}}
{{- $in := include "numa.inGroup" . -}}
{{- $uid := repeat 36 "x" -}}
{{- $sockets := dict "driverConfig.kubeletRootDir" (printf "%s/plugins_registry/dra.memory/reg-%s.sock" (include "numa.kubeletRoot" .) $uid) "driverConfig.runDir" (printf "%s/%s/state.sock" (include "numa.runDir" .) $uid) "driverConfig.nriSocket" (include "numa.nriSocket" .) -}}
{{- range $key, $path := $sockets -}}
{{- if gt (len $path) 107 -}}
{{- fail (printf "%s%s: the socket path %s would have %d bytes, but the kernel allows 107: shorten the path by %d, for example with a symbolic link on the nodes" $in $key $path (len $path) (sub (len $path) 107)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks a CPU list by the same rules as numa_contract/cpuset.py. Takes (list KEY LIST). */}}
{{- define "numa.checkCPUs" -}}
{{- $key := index . 0 -}}
{{- $cpus := index . 1 -}}
{{- include "numa.text" (list $key $cpus "([0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*)?" "is not a list of CPUs, such as \"0-1,64-65\"; on the command line: --set-string driverConfig.reservedCPUs='0-1\\,64-65'") -}}
{{- $free := 0 -}}
{{- range $item := ternary (splitList "," $cpus) list (ne $cpus "") -}}
{{- $bounds := splitList "-" $item -}}
{{- $lowest := first $bounds | atoi -}}
{{- $highest := last $bounds | atoi -}}
{{- if or (lt $lowest $free) (lt $highest $lowest) -}}
{{- fail (printf "%s: %q must be in ascending order and contain no CPU twice" $key $cpus) -}}
{{- end -}}
{{- if gt $highest 8191 -}}
{{- fail (printf "%s: %q contains a CPU above 8191, the highest number in Linux" $key $cpus) -}}
{{- end -}}
{{- $free = add1 $highest | int -}}
{{- end -}}
{{- end -}}

{{- define "numa.checkFiles" -}}
{{- $in := include "numa.inGroup" . -}}
{{- include "numa.checkCPUs" (list (printf "%sdriverConfig.reservedCPUs" $in) (include "numa.cpuList" .Values.driverConfig.reservedCPUs)) -}}
{{- $nodes := list -}}
{{- range .Values.driverConfig.reservedMemory -}}
{{- if has (int .numaNode) $nodes -}}
{{- fail (printf "%sdriverConfig.reservedMemory: names NUMA node %d twice: write both limits into one entry" $in (int .numaNode)) -}}
{{- end -}}
{{- $nodes = append $nodes (int .numaNode) -}}
{{- end -}}
{{- range .Values.hugepageProvision.pages -}}
{{- include "numa.text" (list (printf "%shugepageProvision.pages" $in) .size (printf "%s[kKmMgG](i|[bB])?" (include "numa.powerOfTwo" .)) "is not the size of a hugepage, which is a power of two, such as 2Mi or 1Gi") -}}
{{- end -}}
{{- range $name := list "frontend" "backend" -}}
{{- $image := (get $.Values $name).image -}}
{{- include "numa.text" (list (printf "%s%s.image.tag" $in $name) $image.tag "([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?" "is not a tag") -}}
{{- include "numa.text" (list (printf "%s%s.image.digest" $in $name) $image.digest "(sha256:[0-9a-f]{64})?" "is not a digest: sha256: and 64 hexadecimal digits") -}}
{{- end -}}
{{- range $name, $ours := dict "frontend" "dra-frontend" "backend" "nri-backend" -}}
{{- $image := include "numa.image" (dict "image" (get $.Values $name).image "root" $) -}}
{{- if not (regexMatch "^[a-z0-9]+([._:/-]+[a-z0-9]+)*[:@]" $image) -}}
{{- $key := ternary "global.imageRegistry" (printf "%s%s.image.repository" $in $name) (ne (lower (default "" (default dict $.Values.global).imageRegistry)) (default "" (default dict $.Values.global).imageRegistry)) -}}
{{- fail (printf "%s: %s cannot be pulled: write registry and repository in lower case, such as registry.example.com/%s" $key $image $ours) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.hugepageProvision.enabled (not .Values.hugepageProvision.pages) -}}
{{- fail (printf "%shugepageProvision.pages: is empty although hugepageProvision.enabled is true" $in) -}}
{{- end -}}
{{- $pools := ternary .Values.hugepageProvision.pages list .Values.hugepageProvision.enabled -}}
{{- range $one := .Values.driverConfig.hugepagesOnDemand -}}
{{- range $pools -}}
{{- $same := eq (include "numa.pageSize" .size) (include "numa.pageSize" $one.size) -}}
{{- if and $same (or (kindIs "invalid" .node) (eq (int .node) (int $one.numaNode))) -}}
{{- fail (printf "%shugepageProvision.pages: sets pages of %s on NUMA node %d, which driverConfig.hugepagesOnDemand frees again: remove one of them, or keep pages with driverConfig.reservedMemory" $in $one.size (int $one.numaNode)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.driverConfig.pagePort -}}
{{- if has (int .) (list (int $.Values.frontend.port) (int $.Values.backend.port)) -}}
{{- fail (printf "%sdriverConfig.pagePort: %d is already frontend.port or backend.port: choose another port, such as 8082" $in (int .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "numa.checkPods" -}}
{{- if eq (int .Values.frontend.port) (int .Values.backend.port) -}}
{{- fail (printf "frontend.port and backend.port are both %d: the containers share the pod's network, so choose different ports" (int .Values.backend.port)) -}}
{{- end -}}
{{- range $key := keys (include "numa.selector" . | fromYaml) -}}
{{- if hasKey (default dict $.Values.podLabels) $key -}}
{{- fail (printf "podLabels: %s is a label of the DaemonSet's selector and cannot be set" $key) -}}
{{- end -}}
{{- end -}}
{{- with .Values.updateStrategy.rollingUpdate -}}
{{- if and $.Values.hostNetwork (not (has (toString .maxSurge) (list "0" "0%"))) -}}
{{- fail "hostNetwork: two instances cannot listen on the same ports of a node: set updateStrategy.rollingUpdate to {maxSurge: 0, maxUnavailable: 10%}" -}}
{{- end -}}
{{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) -}}
{{- fail "updateStrategy.rollingUpdate: maxSurge and maxUnavailable are both 0, so nothing could ever be updated" -}}
{{- end -}}
{{- if not (or (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%"))) -}}
{{- fail "updateStrategy.rollingUpdate: with maxSurge, maxUnavailable must be 0" -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.updateStrategy.type "OnDelete") .Values.updateStrategy.rollingUpdate -}}
{{- fail "updateStrategy: type OnDelete requires rollingUpdate: null" -}}
{{- end -}}
{{- if and .Values.resourceQuota.enabled (not .Values.priorityClassName) -}}
{{- fail "resourceQuota: applies to pods with a priority class, but priorityClassName is empty" -}}
{{- end -}}
{{- if and .Values.metrics.prometheusRule.enabled (not (include "numa.runbookURL" .)) -}}
{{- fail "metrics.prometheusRule.runbookURL: is empty, but each alert links to a section of docs/symptoms.md; set it to the address of that page, such as https://REPOSITORY/blob/main/docs/symptoms.md" -}}
{{- end -}}
{{- $classes := include "numa.classNames" . | fromYamlArray -}}
{{- if ne (len $classes) (len (uniq $classes)) -}}
{{- fail (printf "deviceClasses: a class is named twice: %s" (join ", " $classes)) -}}
{{- end -}}
{{- end -}}
