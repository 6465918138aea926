{{/* Labels of every object. The chart's own win, then the object's, then commonLabels. Of: root, component; labels. */}}
{{- define "carpool.labels" -}}
{{- $own := include "carpool.selector" . | fromYaml }}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion }}
{{- $_ := set $own "app.kubernetes.io/part-of" "carpool" }}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- merge $own (.labels | default dict) .root.Values.commonLabels | toYaml }}
{{- end }}

{{/* What never changes about a component's pods. Of: root, component; shard where there are several. */}}
{{- define "carpool.selector" -}}
app.kubernetes.io/name: carpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .shard }}
carpool.dev/shard: {{ . | quote }}
{{- end }}
{{- end }}

{{/* metadata of a namespaced object. Of: root, component, name; namespace where it isn't the release's; labels. */}}
{{- define "carpool.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "carpool.labels" . | nindent 2 }}
{{- end }}

{{/* A component's ServiceAccount. Of: root, component, values, name. */}}
{{- define "carpool.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "carpool.metadata" . | nindent 2 }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* metadata of a component's Deployment. Of: root, component, values, name. */}}
{{- define "carpool.deployment" -}}
{{ include "carpool.metadata" . }}
{{- with .values.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* metadata of a component's pods. Of: root, component, values. */}}
{{- define "carpool.template" -}}
{{- $labels := set (include "carpool.selector" . | fromYaml) "app.kubernetes.io/part-of" "carpool" }}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" .component -}}
labels:
  {{- merge $labels .values.podLabels .root.Values.commonLabels | toYaml | nindent 2 }}
annotations:
  {{- merge $annotations .values.podAnnotations | toYaml | nindent 2 }}
{{- end }}

{{/* What keeps a drain of nodes from stopping all of a component at once. Of: root, component, values, name. */}}
{{- define "carpool.budget" -}}
{{- if and .values.podDisruptionBudget.enabled (gt (int .values.replicas) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "carpool.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # One that is not ready protects nobody, and must not keep a node from being drained.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "carpool.selector" . | nindent 6 }}
{{- end }}
{{- end }}

{{/* An image's name. Of: image, root. */}}
{{- define "carpool.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* What a component's pod is but for its container. Of: root, component, values. */}}
{{- define "carpool.pod" -}}
serviceAccountName: carpool-{{ .component }}
automountServiceAccountToken: true
enableServiceLinks: false
{{- $secrets := .root.Values.imagePullSecrets }}
{{- if eq .component "injector" }}
{{- range .root.Values.sidecar.imagePullSecrets }}
{{- $secrets = append $secrets (dict "name" .) | uniq }}
{{- end }}
{{- end }}
{{- with $secrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with .root.Values.runAsUser }}
  runAsUser: {{ int . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- if kindIs "invalid" .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range tuple "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "carpool.selector" $ | nindent 8 }}
    # A rollout's new pods are spread among themselves.
    matchLabelKeys: [pod-template-hash]
  {{- end }}
{{- else }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What a component's container is but for its name, command, ports and probes. Of: root, values. */}}
{{- define "carpool.container" -}}
{{- $image := .image | default .root.Values.image -}}
image: {{ include "carpool.image" (dict "root" .root "image" $image) }}
imagePullPolicy: {{ $image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources:
  {{- toYaml .values.resources | nindent 2 }}
{{- end }}

{{/* Bytes of a size: 512Mi, or a number. */}}
{{- define "carpool.bytes" -}}
{{- $units := dict "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 }}
{{- if kindIs "string" . }}
{{- $unit := regexFind "[a-zA-Z]*$" . }}
{{- mul (trimSuffix $unit . | int64) (get $units $unit | default 1) }}
{{- else }}
{{- int64 . }}
{{- end }}
{{- end }}

{{/* Thousandths of a core: 500m, 2 or 0.5. */}}
{{- define "carpool.millicores" -}}
{{- $text := toString . }}
{{- if hasSuffix "m" $text }}
{{- trimSuffix "m" $text | int64 }}
{{- else }}
{{- round (mulf (float64 $text) 1000) 0 | int64 }}
{{- end }}
{{- end }}
