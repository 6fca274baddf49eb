{{- /* Labels; takes (list . "component"). */}}
{{- define "kvindexd.selector" -}}
app.kubernetes.io/name: kvindexd
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "kvindexd.labels" -}}
{{ include "kvindexd.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end }}

{{- define "kvindexd.name" -}}
{{- if contains "kvindexd" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvindexd" (.Release.Name | trunc 40 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvindexd.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvindexd.redisUrl" -}}
{{- if .Values.valkey.enabled }}redis://{{ include "kvindexd.name" . }}-valkey:6379/0
{{- else }}{{ required "redis.url is needed (or valkey.enabled, to try it)" .Values.redis.url }}
{{- end }}
{{- end }}

{{- /* What every pod of kvindexd has beside its containers. */}}
{{- define "kvindexd.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvindexd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kvindexd.spread" -}}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "kvindexd.selector" $ | nindent 6 }}
{{- end }}
{{- end }}

{{- /* Settings of .Values.config as variables. */}}
{{- define "kvindexd.settings" -}}
{{- range $section, $keys := .Values.config }}
{{- range $key, $value := $keys }}
- name: KVINDEXD_{{ upper $section }}__{{ upper $key }}
  value: {{ if or (kindIs "map" $value) (kindIs "slice" $value) }}{{ toJson $value | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvindexd.volumes" -}}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: redis
  secret: {secretName: {{ .Values.redis.existingSecret }}}
{{- end }}

{{- define "kvindexd.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: redis, mountPath: /etc/kvindexd/redis, readOnly: true}
{{- end }}

{{- /* The sidecar of an engine's pod, for charts that have this one as a dependency: an entry of
initContainers. The pod needs the label `model` and the volumes of "kvindexd.sidecarVolumes". */}}
{{- define "kvindexd.sidecar" -}}
- name: kvindexd
  image: {{ include "kvindexd.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [sidecar]
  restartPolicy: Always
  envFrom:
    - configMapRef: {name: {{ include "kvindexd.name" . }}-redis}
  env:
    - {name: KVINDEXD_LOG__FORMAT, value: json}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
    - name: MODEL
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['model']"}}
    - name: KVINDEXD_WORKERS
      value: >-
        [{"worker_id": "$(POD_NAME)", "instance": "$(POD_UID)", "model": "$(MODEL)",
        "address": "$(POD_IP):8000", "kv_events_endpoint": "tcp://127.0.0.1:5557",
        "replay_endpoint": "tcp://127.0.0.1:5558"}]
  ports:
    - {name: kvx-metrics, containerPort: 9400}
  startupProbe:
    httpGet: {path: /healthz, port: kvx-metrics}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    httpGet: {path: /healthz, port: kvx-metrics}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {memory: 512Mi}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    seccompProfile: {type: RuntimeDefault}
    {{- include "kvindexd.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: kvindexd-tmp, mountPath: /tmp}
    - {name: kvindexd-redis, mountPath: /etc/kvindexd/redis, readOnly: true}
{{- end }}

{{- define "kvindexd.sidecarVolumes" -}}
- name: kvindexd-tmp
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
- name: kvindexd-redis
  secret: {secretName: {{ .Values.redis.existingSecret }}}
{{- end }}
