{{/* The image of every program: one, which a policy holds IMEX daemons to. */}}
{{- define "rackloom.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* A value as text: Helm reads whole numbers as floats, which it would write as 1e+06. */}}
{{- define "rackloom.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ toString . }}{{ end -}}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end }}

{{/* What the controller and the IMEX plugin must be told alike; nothing where it is the default. */}}
{{- define "rackloom.env.domains" -}}
{{- if ne .Values.imex.isolation "domain" }}
- name: IMEX_ISOLATION
  value: {{ .Values.imex.isolation }}
{{- end }}
{{- if ne .Values.imex.mode "driverManaged" }}
- name: IMEX_MODE
  value: {{ .Values.imex.mode }}
{{- end }}
{{- with .Values.imex.additionalNamespaces }}
- name: ADDITIONAL_NAMESPACES
  value: {{ join "," . | quote }}
{{- end }}
{{- end }}

{{/* Whether the controller decides AdmissionChecks of Kueue, and which ComputeDomains need quota of it. */}}
{{- define "rackloom.env.kueue" -}}
{{- if .Values.kueue.enabled }}
- name: KUEUE_CHECKS
  value: "true"
- name: KUEUE_QUOTA
  value: {{ .Values.kueue.quota }}
{{- end }}
{{- end }}

{{/* Where kubelet and the container runtime look, where that is not the default. */}}
{{- define "rackloom.env.kubelet" -}}
{{- with .Values.node.kubeletRoot }}
{{- if ne . "/var/lib/kubelet" }}
- name: KUBELET_REGISTRAR_DIRECTORY_PATH
  value: {{ printf "%s/plugins_registry" . | quote }}
- name: KUBELET_PLUGINS_DIRECTORY_PATH
  value: {{ printf "%s/plugins" . | quote }}
{{- end }}
{{- end }}
{{- if ne .Values.node.cdiRoot "/var/run/cdi" }}
- name: CDI_ROOT
  value: {{ .Values.node.cdiRoot | quote }}
{{- end }}
{{- end }}
