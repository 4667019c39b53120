{{- define "kvsight.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvsight.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvsight.labels" -}}
{{ include "kvsight.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "kvsight.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "kvsight.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "kvsight.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- /* Variables of every container. The argument has the keys root and env. */ -}}
{{- define "kvsight.env" -}}
- name: KVSIGHT_KAFKA
  value: {{ required "kafka.bootstrap: the brokers of an existing Kafka cluster, HOST:PORT,..." .root.Values.kafka.bootstrap | quote }}
{{- range $name, $value := merge (dict) .env .root.Values.env }}
- name: {{ $name }}
  value: {{ include "kvsight.text" $value | quote }}
{{- end }}
{{- end -}}

{{- /* The pod's fields that all deployments share. */ -}}
{{- define "kvsight.pod" -}}
serviceAccountName: {{ include "kvsight.serviceAccount" . }}
automountServiceAccountToken: false
{{- /* a service named kvsight would set KVSIGHT_PORT, which is a setting */}}
enableServiceLinks: false
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A value as text: whole numbers without an exponent. */ -}}
{{- define "kvsight.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}
