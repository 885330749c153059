"""`rackloom controller`, `webhook`, `webhook-certificates` and `crds`: the control plane on Kubernetes.

Almost every option may be set by an environment variable, which is how a Deployment configures them. The
controller's options form four groups: where it runs, the IMEX daemons that it creates, how
ComputeDomains are isolated, and the timing of gangs. `app.controller` and `app.webhook` are imported when
a command runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rackloom.cli.common import (
    NAMESPACE,
    Kubeconfig,
    KubeContext,
    announce,
    env_parameter,
    split_names,
    with_common_flags,
)

if TYPE_CHECKING:
    from rackloom.core.domains.settings import ImexDaemonSettings
    from rackloom.core.gangs.snapshot import GangSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DaemonParameters:
    """The pods of IMEX daemons."""

    image: Annotated[str, env_parameter("IMAGE_NAME")]
    "Image of the IMEX daemons' pods. In a cluster, give the image of this program."
    max_nodes_per_imex_domain: Annotated[int, env_parameter("MAX_NODES_PER_IMEX_DOMAIN")] = 18
    "The maximum number of nodes of one clique in an IMEX domain."
    daemon_pull_secrets: Annotated[str, env_parameter("CD_DAEMON_IMAGE_PULL_SECRET_NAMES")] = ""
    "Names of image pull secrets, separated by commas."
    daemon_log_verbosity: Annotated[int, env_parameter("LOG_VERBOSITY_CD_DAEMON")] = 4
    "Log verbosity of the daemons."
    daemon_authentication: Annotated[bool, env_parameter("IMEX_AUTHENTICATION")] = True
    "Mutual TLS between the daemons of a ComputeDomain."
    daemon_imex_settings: Annotated[str, env_parameter("CD_DAEMON_IMEX_SETTINGS")] = ""
    (
        "Settings of nvidia-imex as NAME=VALUE, separated by commas: LOG_LEVEL, IMEX_WAIT_FOR_QUORUM and"
        " IMEX_NODE_DISCONNECTED_GRACE_TIME. They apply to new ComputeDomains."
    )
    daemon_priority_class: Annotated[str | None, env_parameter("CD_DAEMON_PRIORITY_CLASS")] = None
    "Priority class of the daemons' pods."
    daemon_cpu: Annotated[str, env_parameter("CD_DAEMON_CPU")] = "50m"
    "CPU that a daemon requests."
    daemon_memory: Annotated[str, env_parameter("CD_DAEMON_MEMORY")] = "128Mi"
    "Memory that a daemon requests."
    daemon_guaranteed: Annotated[bool, env_parameter("CD_DAEMON_GUARANTEED")] = False
    "Limit daemons to their requests, so that they are the last to be evicted."

    def settings(self) -> "ImexDaemonSettings":
        """The settings for the controller. Raises Refused for settings that Rackloom does not pass on."""
        from rackloom.core.domains.imex_settings import read_imex_settings
        from rackloom.core.domains.settings import ImexDaemonSettings

        requests = {"cpu": self.daemon_cpu, "memory": self.daemon_memory}
        return ImexDaemonSettings(
            image=self.image,
            pull_secrets=split_names(self.daemon_pull_secrets),
            log_verbosity=self.daemon_log_verbosity,
            max_nodes=self.max_nodes_per_imex_domain,
            authentication=self.daemon_authentication,
            imex_settings=read_imex_settings(self.daemon_imex_settings),
            priority_class=self.daemon_priority_class,
            resources={"requests": requests} | ({"limits": requests} if self.daemon_guaranteed else {}),
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DomainParameters:
    """The namespaces of IMEX daemons, and how ComputeDomains are isolated."""

    daemon_namespace: Annotated[str, env_parameter("IMEX_NAMESPACE")] = "rackloom-imex"
    "Namespace of the IMEX daemons and their certificates. Nothing else may run in it."
    additional_namespaces: Annotated[str, env_parameter("ADDITIONAL_NAMESPACES")] = ""
    (
        "Namespaces with daemons of earlier installations, separated by commas. Those keep running until"
        " their ComputeDomain is deleted. No new ones are created there."
    )
    mode: Annotated[Literal["driverManaged", "hostManaged"], env_parameter("IMEX_MODE")] = "driverManaged"
    "The driver runs one nvidia-imex per ComputeDomain (driverManaged), or the host runs one (hostManaged)."
    isolation: Annotated[Literal["domain", "channel"], env_parameter("IMEX_ISOLATION")] = "domain"
    (
        "Each job gets its own IMEX domain (domain), or a channel of a shared one (channel). The label"
        " rackloom.dev/imex-isolation of nodes and ComputeDomains overrides this."
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GangParameters:
    """Whole-rack jobs and their timing."""

    gang_max_spares: Annotated[int, env_parameter("GANG_MAX_SPARES")] = 8
    "Maximum number of spare trays for all whole-rack jobs of a namespace together, 0 for none."
    gang_clique_label: Annotated[str, env_parameter("GANG_CLIQUE_LABEL")] = "nvidia.com/gpu.clique"
    "Node label that has the same value on all nodes that share memory over NVLink."
    gang_settle: Annotated[float, env_parameter("GANG_SETTLE_SECONDS")] = 2.0
    "Seconds from the reservation of trays to the check that no other pod was bound to them in between."
    gang_lost_after: Annotated[float, env_parameter("GANG_LOST_AFTER_SECONDS")] = 300.0
    "Seconds after which a tray that is not ready counts as lost, and its members move."
    gang_bind_after: Annotated[float, env_parameter("GANG_BIND_AFTER_SECONDS")] = 120.0
    "Seconds after which an ungated member that is not bound is examined."
    gang_retry: Annotated[float, env_parameter("GANG_RETRY_SECONDS")] = 15.0
    """Minimum seconds between two attempts to place a job that does not fit. An attempt follows each change
    that makes room, and a wait of 20 times this."""

    def settings(self) -> "GangSettings":
        """The settings for the controller. Raises Refused for invalid values."""
        from rackloom.core.gangs.snapshot import GangSettings, checked_gang_settings

        return checked_gang_settings(
            GangSettings(
                settle=self.gang_settle,
                lost_after=self.gang_lost_after,
                bind_after=self.gang_bind_after,
                again=self.gang_retry,
                max_spares=self.gang_max_spares,
                clique_label=self.gang_clique_label,
            )
        )


@with_common_flags
def controller(
    *,
    daemon: DaemonParameters,
    domains: DomainParameters = DomainParameters(),
    gangs: GangParameters = GangParameters(),
    kueue_checks: Annotated[bool, env_parameter("KUEUE_CHECKS")] = False,
    kueue_quota: Annotated[Literal["none", "labelled", "all"], env_parameter("KUEUE_QUOTA")] = "none",
    namespace: Annotated[str, NAMESPACE, env_parameter("NAMESPACE")] = "rackloom-system",
    listen: Annotated[str | None, env_parameter("HTTP_ENDPOINT")] = None,
    pod: Annotated[str, env_parameter("POD_NAME")] = "controller",
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
) -> None:
    """Give each ComputeDomain its claim templates and IMEX daemons, and whole-rack jobs their trays.

    Parameters
    ----------
    daemon
        The pods of IMEX daemons.
    domains
        The namespaces of IMEX daemons, and how ComputeDomains are isolated.
    gangs
        Whole-rack jobs and their timing.
    kueue_checks
        Decide AdmissionChecks of Kueue that name rackloom.dev/placement as controller (docs/kueue.md).
    kueue_quota
        ComputeDomains that need quota of Kueue: none, those labelled with a queue, or all (docs/kueue.md).
    namespace
        Namespace of this program, for the leader election.
    listen
        HOST:PORT of /metrics and /healthz.
    pod
        Name of this pod, for the leader election.
    """
    from rackloom.app.controller import ControllerOptions, run_controller
    from rackloom.core.cluster.names import ImexIsolation, ImexMode
    from rackloom.core.domains.settings import ControllerSettings, QuotaMode

    settings = ControllerSettings(
        daemon=daemon.settings(),
        daemon_namespace=domains.daemon_namespace,
        additional_namespaces=split_names(domains.additional_namespaces),
        imex_mode=ImexMode(domains.mode),
        isolation=ImexIsolation(domains.isolation),
        lost_after=gangs.gang_lost_after,
        quota=QuotaMode(kueue_quota),
    )
    options = ControllerOptions(
        identity=pod,
        namespace=namespace,
        listen=listen,
        kubeconfig=kubeconfig,
        context=context,
        kueue_checks=kueue_checks,
    )
    run_controller(settings, gangs.settings(), options, announce)


@with_common_flags
def webhook(
    *,
    namespace: Annotated[str, NAMESPACE, env_parameter("NAMESPACE")] = "rackloom-system",
    daemon_namespace: Annotated[str, env_parameter("IMEX_NAMESPACE")] = "rackloom-imex",
    mode: Annotated[Literal["warn", "enforce"], env_parameter("ADMISSION_MODE")] = "warn",
    isolation: Annotated[Literal["domain", "channel"], env_parameter("IMEX_ISOLATION")] = "domain",
    listen: Annotated[str, env_parameter("HTTPS_ENDPOINT")] = "0.0.0.0:8443",
    pod: Annotated[str, env_parameter("POD_NAME")] = "webhook",
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
) -> None:
    """Validate device configs, keep the pods of a ComputeDomain together, and hold back early pods.

    Parameters
    ----------
    namespace
        Namespace of this program. Its certificate is read there. Objects in it are never changed or refused.
    daemon_namespace
        Namespace of IMEX daemons, as set for the controller. Objects in it are never changed or refused.
    mode
        Warn about invalid objects, or deny them.
    isolation
        Isolation of a ComputeDomain without the label rackloom.dev/imex-isolation, as set for the controller.
    listen
        HOST:PORT of HTTPS.
    pod
        Name of this pod, for the leader election.
    """
    from rackloom.app.webhook import WebhookOptions, run_webhook
    from rackloom.claim.cluster.admission.reviews import AdmissionMode
    from rackloom.claim.cluster.admission.webhook import AdmissionSettings
    from rackloom.core.cluster.names import ImexIsolation

    settings = AdmissionSettings(
        namespace=namespace,
        daemon_namespace=daemon_namespace,
        mode=AdmissionMode(mode),
        isolation=ImexIsolation(isolation),
    )
    options = WebhookOptions(identity=pod, listen=listen, kubeconfig=kubeconfig, context=context)
    run_webhook(settings, options, announce)


@with_common_flags
def webhook_certificates(
    *,
    namespace: Annotated[str, NAMESPACE, env_parameter("NAMESPACE")] = "rackloom-system",
    dns_name: tuple[str, ...] = (),
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
) -> None:
    """Issue the webhook's certificate if it is due, and make the API server trust its authority.

    A Job runs this under a separate account, so that the webhook needs no right to change webhook
    configurations.

    Parameters
    ----------
    namespace
        Namespace of the webhook's Secrets.
    dns_name
        Name by which the API server calls the webhook. The default is that of its service.
    """
    from rackloom.app.webhook import run_issuer

    run_issuer(namespace, dns_name, kubeconfig, context)


@with_common_flags
def crds() -> None:
    """Print the CustomResourceDefinitions that the controller needs, as YAML.

    `rackloom crds | kubectl apply --server-side -f -` installs or upgrades them. They are the same as in
    deploy/kubernetes/base.
    """
    import yaml

    from rackloom.core.domains.crds import domain_crds
    from rackloom.core.gangs.crd import gang_crd

    print(yaml.safe_dump_all((*domain_crds(), gang_crd()), sort_keys=False), end="")
