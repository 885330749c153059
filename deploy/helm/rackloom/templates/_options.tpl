{{/* Written by deploy/helm/write_chart.py; the reasons stand in deploy/kubernetes. */}}
{{- define "rackloom.env.controller" -}}
{{- $options := .Values.controller.options }}
{{- if hasKey $options "maxNodesPerImexDomain" }}
- name: MAX_NODES_PER_IMEX_DOMAIN
  value: {{ include "rackloom.scalar" $options.maxNodesPerImexDomain | quote }}
{{- end }}
{{- if hasKey $options "daemonPullSecrets" }}
- name: CD_DAEMON_IMAGE_PULL_SECRET_NAMES
  value: {{ include "rackloom.scalar" $options.daemonPullSecrets | quote }}
{{- end }}
{{- if hasKey $options "daemonLogVerbosity" }}
- name: LOG_VERBOSITY_CD_DAEMON
  value: {{ include "rackloom.scalar" $options.daemonLogVerbosity | quote }}
{{- end }}
{{- if hasKey $options "daemonAuthentication" }}
- name: IMEX_AUTHENTICATION
  value: {{ include "rackloom.scalar" $options.daemonAuthentication | quote }}
{{- end }}
{{- if hasKey $options "daemonImexSettings" }}
- name: CD_DAEMON_IMEX_SETTINGS
  value: {{ include "rackloom.scalar" $options.daemonImexSettings | quote }}
{{- end }}
{{- if hasKey $options "daemonPriorityClass" }}
- name: CD_DAEMON_PRIORITY_CLASS
  value: {{ include "rackloom.scalar" $options.daemonPriorityClass | quote }}
{{- end }}
{{- if hasKey $options "daemonCpu" }}
- name: CD_DAEMON_CPU
  value: {{ include "rackloom.scalar" $options.daemonCpu | quote }}
{{- end }}
{{- if hasKey $options "daemonMemory" }}
- name: CD_DAEMON_MEMORY
  value: {{ include "rackloom.scalar" $options.daemonMemory | quote }}
{{- end }}
{{- if hasKey $options "daemonGuaranteed" }}
- name: CD_DAEMON_GUARANTEED
  value: {{ include "rackloom.scalar" $options.daemonGuaranteed | quote }}
{{- end }}
{{- if hasKey $options "gangMaxSpares" }}
- name: GANG_MAX_SPARES
  value: {{ include "rackloom.scalar" $options.gangMaxSpares | quote }}
{{- end }}
{{- if hasKey $options "gangCliqueLabel" }}
- name: GANG_CLIQUE_LABEL
  value: {{ include "rackloom.scalar" $options.gangCliqueLabel | quote }}
{{- end }}
{{- if hasKey $options "gangSettle" }}
- name: GANG_SETTLE_SECONDS
  value: {{ include "rackloom.scalar" $options.gangSettle | quote }}
{{- end }}
{{- if hasKey $options "gangLostAfter" }}
- name: GANG_LOST_AFTER_SECONDS
  value: {{ include "rackloom.scalar" $options.gangLostAfter | quote }}
{{- end }}
{{- if hasKey $options "gangBindAfter" }}
- name: GANG_BIND_AFTER_SECONDS
  value: {{ include "rackloom.scalar" $options.gangBindAfter | quote }}
{{- end }}
{{- if hasKey $options "gangRetry" }}
- name: GANG_RETRY_SECONDS
  value: {{ include "rackloom.scalar" $options.gangRetry | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.controller" -}}
{{- $options := .Values.controller.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- end }}

{{- define "rackloom.env.webhook" -}}
{{- $options := .Values.webhook.options }}
{{- end }}
{{- define "rackloom.args.webhook" -}}
{{- $options := .Values.webhook.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- end }}

{{- define "rackloom.env.node.imex" -}}
{{- $options := .Values.node.imex.options }}
{{- if hasKey $options "healthcheckPort" }}
- name: HEALTHCHECK_PORT
  value: {{ include "rackloom.scalar" $options.healthcheckPort | quote }}
{{- end }}
{{- if hasKey $options "driverRoot" }}
- name: DRIVER_ROOT_CTR_PATH
  value: {{ include "rackloom.scalar" $options.driverRoot | quote }}
{{- end }}
{{- if hasKey $options "hostDriverRoot" }}
- name: NVIDIA_DRIVER_ROOT
  value: {{ include "rackloom.scalar" $options.hostDriverRoot | quote }}
{{- end }}
{{- if hasKey $options "procDevices" }}
- name: ALT_PROC_DEVICES_PATH
  value: {{ include "rackloom.scalar" $options.procDevices | quote }}
{{- end }}
{{- if hasKey $options "cliqueLabel" }}
- name: GPU_CLIQUE_LABEL_ENABLED
  value: {{ include "rackloom.scalar" $options.cliqueLabel | quote }}
{{- end }}
{{- if hasKey $options "hostSocket" }}
- name: IMEX_HOST_SOCKET_PATH
  value: {{ include "rackloom.scalar" $options.hostSocket | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.node.imex" -}}
{{- $options := .Values.node.imex.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- if hasKey $options "fabricFile" }}
- {{ include "rackloom.scalar" $options.fabricFile | printf "--fabric-file=%s" | quote }}
{{- end }}
{{- end }}

{{- define "rackloom.env.node.gpu" -}}
{{- $options := .Values.node.gpu.options }}
{{- if hasKey $options "healthcheckPort" }}
- name: HEALTHCHECK_PORT
  value: {{ include "rackloom.scalar" $options.healthcheckPort | quote }}
{{- end }}
{{- if hasKey $options "driverRoot" }}
- name: DRIVER_ROOT_CTR_PATH
  value: {{ include "rackloom.scalar" $options.driverRoot | quote }}
{{- end }}
{{- if hasKey $options "hostDriverRoot" }}
- name: NVIDIA_DRIVER_ROOT
  value: {{ include "rackloom.scalar" $options.hostDriverRoot | quote }}
{{- end }}
{{- if hasKey $options "procDevices" }}
- name: ALT_PROC_DEVICES_PATH
  value: {{ include "rackloom.scalar" $options.procDevices | quote }}
{{- end }}
{{- if hasKey $options "ncclTopology" }}
- name: NCCL_TOPO_FILE
  value: {{ include "rackloom.scalar" $options.ncclTopology | quote }}
{{- end }}
{{- if hasKey $options "vfio" }}
- name: VFIO_ENABLED
  value: {{ include "rackloom.scalar" $options.vfio | quote }}
{{- end }}
{{- if hasKey $options "consumableShares" }}
- name: CONSUMABLE_SHARES
  value: {{ include "rackloom.scalar" $options.consumableShares | quote }}
{{- end }}
{{- if hasKey $options "vfioBinding" }}
- name: VFIO_BINDING
  value: {{ include "rackloom.scalar" $options.vfioBinding | quote }}
{{- end }}
{{- if hasKey $options "dynamicMig" }}
- name: DYNAMIC_MIG
  value: {{ include "rackloom.scalar" $options.dynamicMig | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.node.gpu" -}}
{{- $options := .Values.node.gpu.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- if hasKey $options "inventoryFile" }}
- {{ include "rackloom.scalar" $options.inventoryFile | printf "--inventory-file=%s" | quote }}
{{- end }}
{{- if hasKey $options "topologyFile" }}
- {{ include "rackloom.scalar" $options.topologyFile | printf "--topology-file=%s" | quote }}
{{- end }}
{{- if hasKey $options "ignoreXid" }}
{{- range $options.ignoreXid }}
- {{ include "rackloom.scalar" . | printf "--ignore-xid=%s" | quote }}
{{- else }}
- --empty-ignore-xid
{{- end }}
{{- end }}
{{- end }}

{{- define "rackloom.env.node.nic" -}}
{{- $options := .Values.node.nic.options }}
{{- if hasKey $options "healthcheckPort" }}
- name: HEALTHCHECK_PORT
  value: {{ include "rackloom.scalar" $options.healthcheckPort | quote }}
{{- end }}
{{- if hasKey $options "nriSocket" }}
- name: NRI_SOCKET
  value: {{ include "rackloom.scalar" $options.nriSocket | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.node.nic" -}}
{{- $options := .Values.node.nic.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- if hasKey $options "leaveOut" }}
{{- range $options.leaveOut }}
- {{ include "rackloom.scalar" . | printf "--leave-out=%s" | quote }}
{{- else }}
- --empty-leave-out
{{- end }}
{{- end }}
{{- if hasKey $options "filter" }}
- {{ include "rackloom.scalar" $options.filter | printf "--filter=%s" | quote }}
{{- end }}
{{- if hasKey $options "moveIbInterfaces" }}
- {{ ternary "--move-ib-interfaces" "--no-move-ib-interfaces" $options.moveIbInterfaces }}
{{- end }}
{{- if hasKey $options "profiles" }}
- {{ include "rackloom.scalar" $options.profiles | printf "--profiles=%s" | quote }}
{{- end }}
{{- if hasKey $options "attributes" }}
- {{ include "rackloom.scalar" $options.attributes | printf "--attributes=%s" | quote }}
{{- end }}
{{- if hasKey $options "cloud" }}
- {{ include "rackloom.scalar" $options.cloud | printf "--cloud=%s" | quote }}
{{- end }}
{{- if hasKey $options "ncclTopology" }}
- {{ include "rackloom.scalar" $options.ncclTopology | printf "--nccl-topology=%s" | quote }}
{{- end }}
{{- if hasKey $options "declared" }}
- {{ include "rackloom.scalar" $options.declared | printf "--declared=%s" | quote }}
{{- end }}
{{- end }}

{{- define "rackloom.env.node.all" -}}
{{- $options := .Values.node.all.options }}
{{- if hasKey $options "healthcheckPort" }}
- name: HEALTHCHECK_PORT
  value: {{ include "rackloom.scalar" $options.healthcheckPort | quote }}
{{- end }}
{{- if hasKey $options "driverRoot" }}
- name: DRIVER_ROOT_CTR_PATH
  value: {{ include "rackloom.scalar" $options.driverRoot | quote }}
{{- end }}
{{- if hasKey $options "hostDriverRoot" }}
- name: NVIDIA_DRIVER_ROOT
  value: {{ include "rackloom.scalar" $options.hostDriverRoot | quote }}
{{- end }}
{{- if hasKey $options "procDevices" }}
- name: ALT_PROC_DEVICES_PATH
  value: {{ include "rackloom.scalar" $options.procDevices | quote }}
{{- end }}
{{- if hasKey $options "imexCliqueLabel" }}
- name: GPU_CLIQUE_LABEL_ENABLED
  value: {{ include "rackloom.scalar" $options.imexCliqueLabel | quote }}
{{- end }}
{{- if hasKey $options "imexHostSocket" }}
- name: IMEX_HOST_SOCKET_PATH
  value: {{ include "rackloom.scalar" $options.imexHostSocket | quote }}
{{- end }}
{{- if hasKey $options "gpuNcclTopology" }}
- name: NCCL_TOPO_FILE
  value: {{ include "rackloom.scalar" $options.gpuNcclTopology | quote }}
{{- end }}
{{- if hasKey $options "gpuVfio" }}
- name: VFIO_ENABLED
  value: {{ include "rackloom.scalar" $options.gpuVfio | quote }}
{{- end }}
{{- if hasKey $options "gpuConsumableShares" }}
- name: CONSUMABLE_SHARES
  value: {{ include "rackloom.scalar" $options.gpuConsumableShares | quote }}
{{- end }}
{{- if hasKey $options "gpuVfioBinding" }}
- name: VFIO_BINDING
  value: {{ include "rackloom.scalar" $options.gpuVfioBinding | quote }}
{{- end }}
{{- if hasKey $options "gpuDynamicMig" }}
- name: DYNAMIC_MIG
  value: {{ include "rackloom.scalar" $options.gpuDynamicMig | quote }}
{{- end }}
{{- if hasKey $options "nicNriSocket" }}
- name: NRI_SOCKET
  value: {{ include "rackloom.scalar" $options.nicNriSocket | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.node.all" -}}
{{- $options := .Values.node.all.options }}
{{- if hasKey $options "kubeconfig" }}
- {{ include "rackloom.scalar" $options.kubeconfig | printf "--kubeconfig=%s" | quote }}
{{- end }}
{{- if hasKey $options "context" }}
- {{ include "rackloom.scalar" $options.context | printf "--context=%s" | quote }}
{{- end }}
{{- if hasKey $options "imexFabricFile" }}
- {{ include "rackloom.scalar" $options.imexFabricFile | printf "--imex.fabric-file=%s" | quote }}
{{- end }}
{{- if hasKey $options "gpuInventoryFile" }}
- {{ include "rackloom.scalar" $options.gpuInventoryFile | printf "--gpu.inventory-file=%s" | quote }}
{{- end }}
{{- if hasKey $options "gpuTopologyFile" }}
- {{ include "rackloom.scalar" $options.gpuTopologyFile | printf "--gpu.topology-file=%s" | quote }}
{{- end }}
{{- if hasKey $options "gpuIgnoreXid" }}
{{- range $options.gpuIgnoreXid }}
- {{ include "rackloom.scalar" . | printf "--gpu.ignore-xid=%s" | quote }}
{{- else }}
- --gpu.empty-ignore-xid
{{- end }}
{{- end }}
{{- if hasKey $options "nicLeaveOut" }}
{{- range $options.nicLeaveOut }}
- {{ include "rackloom.scalar" . | printf "--nic.leave-out=%s" | quote }}
{{- else }}
- --nic.empty-leave-out
{{- end }}
{{- end }}
{{- if hasKey $options "nicFilter" }}
- {{ include "rackloom.scalar" $options.nicFilter | printf "--nic.filter=%s" | quote }}
{{- end }}
{{- if hasKey $options "nicMoveIbInterfaces" }}
- {{ ternary "--nic.move-ib-interfaces" "--nic.no-move-ib-interfaces" $options.nicMoveIbInterfaces }}
{{- end }}
{{- if hasKey $options "nicProfiles" }}
- {{ include "rackloom.scalar" $options.nicProfiles | printf "--nic.profiles=%s" | quote }}
{{- end }}
{{- if hasKey $options "nicAttributes" }}
- {{ include "rackloom.scalar" $options.nicAttributes | printf "--nic.attributes=%s" | quote }}
{{- end }}
{{- if hasKey $options "nicCloud" }}
- {{ include "rackloom.scalar" $options.nicCloud | printf "--nic.cloud=%s" | quote }}
{{- end }}
{{- if hasKey $options "nicNcclTopology" }}
- {{ include "rackloom.scalar" $options.nicNcclTopology | printf "--nic.nccl-topology=%s" | quote }}
{{- end }}
{{- if hasKey $options "nicDeclared" }}
- {{ include "rackloom.scalar" $options.nicDeclared | printf "--nic.declared=%s" | quote }}
{{- end }}
{{- end }}

{{- define "rackloom.env.node.mps" -}}
{{- $options := .Values.node.mps.options }}
{{- if hasKey $options "driverRoot" }}
- name: DRIVER_ROOT_CTR_PATH
  value: {{ include "rackloom.scalar" $options.driverRoot | quote }}
{{- end }}
{{- end }}
{{- define "rackloom.args.node.mps" -}}
{{- $options := .Values.node.mps.options }}
{{- end }}
