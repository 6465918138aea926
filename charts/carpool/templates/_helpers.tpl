{{/* What every object carries. Of: root, component. */}}
{{- define "carpool.labels" -}}
{{ include "carpool.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: carpool
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* What never changes about a component's pods. Of: root, component. */}}
{{- define "carpool.selector" -}}
app.kubernetes.io/name: carpool
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* metadata of a namespaced object. Of: root, component, name; namespace where it isn't the release's. */}}
{{- define "carpool.metadata" -}}
name: {{ .name }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "carpool.labels" . | nindent 2 }}
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
{{- with .root.Values.imagePullSecrets }}
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
image: {{ include "carpool.image" (dict "root" .root "image" .root.Values.image) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
resources:
  {{- toYaml .values.resources | nindent 2 }}
{{- end }}
