"""The objects that a ComputeDomain needs: claim templates, shared claim, DaemonSet, NetworkPolicy.

Names, labels, finalizers, device classes and the daemon's environment are those of NVIDIA's DRA driver
0.5. Ownership is a label plus a finalizer, because owner references cannot cross namespaces.

IMEX daemons run as root without capabilities, in a read-only image: the IMEX management device (mode
0400), the pod's hosts file and the certificate belong to root. The admission policy
rackloom-controller-daemons of deploy/kubernetes admits these pods and no others. The NetworkPolicy lets
daemons of the same ComputeDomain reach each other on IMEX's two ports.
"""

from typing import Any

from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, DaemonConfig, ImexConfig, imex_config_json
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.names import AllocationMode, ImexIsolation, ImexMode, isolation_of
from rackloom.core.cluster.objects import Object
from rackloom.core.domains.imex_settings import imex_settings_text
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings

DAEMON_SERVICE_ACCOUNT = "compute-domain-daemon-service-account"
_TLS = "imex-tls"
_SCRATCH = {"run": "/run", "tmp": "/tmp"}  # noqa: S108 (of the container)
"""Directories where NVIDIA's programs may write, in memory."""
_CHECK = {"httpGet": {"path": "/", "port": names.IMEX_PROBE_PORT}}
# nvidia-imex resolves the names of all indexes of the domain, and unassigned ones are in no hosts file. It
# would query the cluster's DNS for each with every search domain, and a server that does not answer could
# delay the daemon for minutes. It needs no other names, so nothing answers at this address.
_DNS = {"dnsPolicy": "None", "dnsConfig": {"nameservers": ["127.0.0.1"]}}
_TOLERATIONS = [
    {"operator": "Exists", "effect": effect} for effect in ("NoSchedule", "NoExecute", "PreferNoSchedule")
]


def workload_template(domain: ComputeDomain, settings: ControllerSettings) -> Object:
    """The template that the user's pods refer to."""
    managed = settings.imex_mode is ImexMode.DRIVER_MANAGED
    isolated = managed and isolation_of(domain.labels, settings.isolation) is ImexIsolation.CHANNEL
    mode = domain.allocation_mode if managed else AllocationMode.SINGLE
    config = ChannelConfig(domain_id=domain.uid, allocation_mode=mode)
    device_class = names.ISOLATED_CHANNEL_CLASS if isolated else names.CHANNEL_CLASS
    spec = _claim_spec(names.CHANNEL_REQUEST, device_class, config)
    meta = _meta(domain.uid, domain.template, domain.namespace, names.TARGET_WORKLOAD)
    return _template(meta, spec)


def daemon_template(domain: ComputeDomain, namespace: str) -> Object:
    """The template of the claims of IMEX daemons, in the namespace of the daemons."""
    config = DaemonConfig(domain_id=domain.uid)
    spec = _claim_spec(names.DAEMON_REQUEST, names.DAEMON_CLASS, config)
    meta = _meta(domain.uid, names.daemon_name(domain.uid), namespace, names.TARGET_DAEMON)
    return _template(meta, spec)


def shared_claim(domain: ComputeDomain) -> Object:
    """The one claim that all pods of a ComputeDomain share in channel mode."""
    config = ChannelConfig(domain_id=domain.uid)
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "ComputeDomain",
        "name": domain.name,
        "uid": domain.uid,
        "controller": True,
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": names.shared_claim_name(domain.uid),
            "namespace": domain.namespace,
            "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid},
            "ownerReferences": [owner],
        },
        "spec": _claim_spec(names.CHANNEL_REQUEST, names.ISOLATED_CHANNEL_CLASS, config),
    }


def daemon_set(domain: ComputeDomain, settings: ControllerSettings, namespace: str) -> Object:
    """The IMEX daemons: none at first, then one on each node where a channel of this domain is prepared.

    The daemons of a clique in channel mode run on all its nodes that no other ComputeDomain holds.
    """
    labels = {names.COMPUTE_DOMAIN_LABEL: domain.uid}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": _meta(domain.uid, names.daemon_name(domain.uid), namespace),
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(domain, settings)},
        },
    }


def network_policy(domain: ComputeDomain, namespace: str) -> Object:
    """Lets daemons of the same ComputeDomain reach each other on IMEX's two ports.

    The policy of the namespace denies everything else. A node always reaches its own pods, and so do the
    probes of its kubelet.
    """
    own = {"podSelector": {"matchLabels": {names.COMPUTE_DOMAIN_LABEL: domain.uid}}}
    ports = [{"protocol": "TCP", "port": port} for port in (names.IMEX_SERVER_PORT, names.IMEX_COMMAND_PORT)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(domain.uid, names.daemon_name(domain.uid), namespace),
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own], "ports": ports}]},
    }


def warm_clique(domain: ComputeDomain, settings: ControllerSettings) -> str | None:
    """The clique that a ComputeDomain of the controller keeps warm, or None for those of users."""
    ours = domain.namespace in settings.namespaces
    return domain.labels.get(names.WARM_CLIQUE_LABEL) if ours else None


def _pod_spec(domain: ComputeDomain, settings: ControllerSettings) -> dict[str, Any]:
    daemon = settings.daemon
    spec: dict[str, Any] = {
        "serviceAccountName": DAEMON_SERVICE_ACCOUNT,
        **_DNS,
        # Process 1 is then the runtime's, which reaps processes that commands in the container leave behind.
        "shareProcessNamespace": True,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        **_placement(domain, settings),
        "tolerations": list(_TOLERATIONS),
        "containers": [_container(daemon)],
        "resourceClaims": [
            {"name": names.DAEMON_REQUEST, "resourceClaimTemplateName": names.daemon_name(domain.uid)}
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}} for name in _SCRATCH
    ]
    if daemon.authentication:
        secret = {"secretName": names.imex_secret_name(domain.uid), "defaultMode": 0o400}
        volumes.append({"name": _TLS, "secret": secret})
    spec["volumes"] = volumes
    if daemon.priority_class is not None:
        spec["priorityClassName"] = daemon.priority_class
    if daemon.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in daemon.pull_secrets]
    return spec


def _placement(domain: ComputeDomain, settings: ControllerSettings) -> dict[str, Any]:
    clique_id = warm_clique(domain, settings)
    if clique_id is None:
        return {"nodeSelector": {names.COMPUTE_DOMAIN_LABEL: domain.uid}}
    # A node holds one IMEX session. While a ComputeDomain in domain mode has it, the warm daemon must wait.
    free = {"key": names.COMPUTE_DOMAIN_LABEL, "operator": "DoesNotExist"}
    # nvidia-imex keeps the driver's module loaded, which GPU Operator is about to exchange.
    loaded = {"key": names.GPU_CLIENT_LABEL, "operator": "NotIn", "values": [names.DRIVER_UPGRADE]}
    terms = [{"matchExpressions": [free, loaded]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return {
        "nodeSelector": {names.WARM_CLIQUE_LABEL: clique_id},
        "affinity": {"nodeAffinity": required},
    }


def _container(daemon: ImexDaemonSettings) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": name, "mountPath": path} for name, path in _SCRATCH.items()]
    if daemon.authentication:
        mounts.append({"name": _TLS, "mountPath": "/imexd-tls", "readOnly": True})
    return {
        "name": names.DAEMON_CONTAINER,
        "image": daemon.image,
        "volumeMounts": mounts,
        "securityContext": {
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "command": ["rackloom", "imex", "run"],
        "env": _environment(daemon),
        "resources": {**daemon.resources, "claims": [{"name": names.DAEMON_REQUEST}]},
        "startupProbe": _probe(period=1, failures=1200),
        "livenessProbe": _probe(period=60, failures=20),
        "readinessProbe": _probe(period=10, failures=1),
    }


def _environment(daemon: ImexDaemonSettings) -> list[dict[str, Any]]:
    plain = {
        "LOG_VERBOSITY": str(daemon.log_verbosity),
        "MAX_NODES_PER_IMEX_DOMAIN": str(daemon.max_nodes),
        "NVIDIA_VISIBLE_DEVICES": "void",
        "IMEX_AUTHENTICATION": str(daemon.authentication).lower(),
        "FEATURE_GATES": "",
    }
    if daemon.imex_settings:
        plain[names.IMEX_SETTINGS_VARIABLE] = imex_settings_text(daemon.imex_settings)
    own = {
        "NODE_NAME": "spec.nodeName",
        "POD_IP": "status.podIP",
        "POD_UID": "metadata.uid",
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
    }
    fixed = [{"name": name, "value": value} for name, value in plain.items()]
    return fixed + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in own.items()
    ]


def _probe(*, period: int, failures: int) -> dict[str, Any]:
    return {**_CHECK, "periodSeconds": period, "timeoutSeconds": 10, "failureThreshold": failures}


def _claim_spec(request: str, device_class: str, config: ImexConfig) -> dict[str, Any]:
    opaque = {"driver": names.IMEX_DRIVER, "parameters": imex_config_json(config)}
    exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": 1}
    return {
        "devices": {
            "requests": [{"name": request, "exactly": exactly}],
            "config": [{"requests": [request], "opaque": opaque}],
        }
    }


def _template(meta: dict[str, Any], claim_spec: dict[str, Any]) -> Object:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": meta,
        "spec": {"spec": claim_spec},
    }


def _meta(uid: str, name: str, namespace: str, target: str | None = None) -> dict[str, Any]:
    labels = {names.COMPUTE_DOMAIN_LABEL: uid}
    if target is not None:
        labels[names.TARGET_LABEL] = target
    return {"name": name, "namespace": namespace, "labels": labels, "finalizers": [names.FINALIZER]}
