"""`rackloom controller` and `rackloom webhook`: the control-plane processes on Kubernetes.

Almost every option may be set by an environment variable, which is how a Deployment configures them. The
controller's options fall into four groups: where it runs, the IMEX daemons that it creates, how
ComputeDomains are isolated, and the timing of gangs. `app.controller` and `app.webhook` are imported when
a command runs.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rackloom.cli.common import split_names


def _controller_env(name: str) -> Parameter:
    return Parameter(env_var=name)


def controller(
    *,
    image: Annotated[str, _controller_env("IMAGE_NAME")],
    namespace: Annotated[str, _controller_env("NAMESPACE")] = "rackloom-system",
    daemon_namespace: Annotated[str, _controller_env("IMEX_NAMESPACE")] = "rackloom-imex",
    additional_namespaces: Annotated[str, _controller_env("ADDITIONAL_NAMESPACES")] = "",
    mode: Annotated[Literal["driverManaged", "hostManaged"], _controller_env("IMEX_MODE")] = "driverManaged",
    isolation: Annotated[Literal["domain", "channel"], _controller_env("IMEX_ISOLATION")] = "domain",
    max_nodes_per_imex_domain: Annotated[int, _controller_env("MAX_NODES_PER_IMEX_DOMAIN")] = 18,
    daemon_pull_secrets: Annotated[str, _controller_env("CD_DAEMON_IMAGE_PULL_SECRET_NAMES")] = "",
    daemon_log_verbosity: Annotated[int, _controller_env("LOG_VERBOSITY_CD_DAEMON")] = 4,
    daemon_authentication: Annotated[bool, _controller_env("IMEX_AUTHENTICATION")] = True,
    daemon_priority_class: Annotated[str | None, _controller_env("CD_DAEMON_PRIORITY_CLASS")] = None,
    daemon_cpu: Annotated[str, _controller_env("CD_DAEMON_CPU")] = "50m",
    daemon_memory: Annotated[str, _controller_env("CD_DAEMON_MEMORY")] = "128Mi",
    daemon_guaranteed: Annotated[bool, _controller_env("CD_DAEMON_GUARANTEED")] = False,
    gang_max_spares: Annotated[int, _controller_env("GANG_MAX_SPARES")] = 8,
    gang_clique_label: Annotated[str, _controller_env("GANG_CLIQUE_LABEL")] = "nvidia.com/gpu.clique",
    gang_settle: Annotated[float, _controller_env("GANG_SETTLE_SECONDS")] = 2.0,
    gang_lost_after: Annotated[float, _controller_env("GANG_LOST_AFTER_SECONDS")] = 300.0,
    gang_bind_after: Annotated[float, _controller_env("GANG_BIND_AFTER_SECONDS")] = 120.0,
    gang_retry: Annotated[float, _controller_env("GANG_RETRY_SECONDS")] = 15.0,
    listen: Annotated[str | None, _controller_env("HTTP_ENDPOINT")] = None,
    pod: Annotated[str, _controller_env("POD_NAME")] = "controller",
    kubeconfig: Path | None = None,
) -> None:
    """Give each ComputeDomain its claim templates and IMEX daemons, and whole-rack jobs their trays.

    Parameters
    ----------
    image
        Image of the IMEX daemons' pods; in a cluster, the one this runs from.
    namespace
        Namespace of this program, for the election.
    daemon_namespace
        Where IMEX daemons run, with their certificates: a namespace in which nothing else does.
    additional_namespaces
        Where earlier installations left daemons, separated by commas. Those keep running until their
        ComputeDomain is deleted; new ones are never made there.
    mode
        Who runs nvidia-imex: the driver, one per ComputeDomain, or the host.
    isolation
        What a job gets: an IMEX domain of its own (domain), or a channel of a shared one (channel). The label
        rackloom.dev/imex-isolation of nodes and ComputeDomains is stronger.
    max_nodes_per_imex_domain
        How many nodes of one clique an IMEX domain can hold.
    daemon_pull_secrets
        Names of image pull secrets, separated by commas.
    daemon_log_verbosity
        Passed to the daemons.
    daemon_authentication
        Mutual TLS between the daemons of a ComputeDomain.
    daemon_priority_class
        Priority class of the daemons' pods.
    daemon_cpu
        CPU that a daemon requests.
    daemon_memory
        Memory that a daemon requests.
    daemon_guaranteed
        Limit daemons to what they request, which makes them the last to be evicted.
    gang_max_spares
        Spare trays that all whole-rack jobs of a namespace may keep together; 0 for none.
    gang_clique_label
        Label of nodes that says which of them share memory over NVLink.
    gang_settle
        Seconds between the reservation of trays and the look whether somebody came to them meanwhile.
    gang_lost_after
        Seconds after which a tray that is not ready counts as lost, and its members move.
    gang_bind_after
        Seconds after which a member that was let go and is not bound is looked after.
    gang_retry
        Seconds between two attempts to place a job that does not fit.
    listen
        HOST:PORT of /metrics and /healthz.
    pod
        Name of this pod, for the election.
    kubeconfig
        How to reach the API server; default: as the service account of this pod.
    """
    from rackloom.app.controller import ControllerOptions, run_controller
    from rackloom.core.domains.names import ImexIsolation, ImexMode
    from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
    from rackloom.core.gangs.spec import GangSettings, checked_gang_settings

    requests = {"cpu": daemon_cpu, "memory": daemon_memory}
    daemon = ImexDaemonSettings(
        image=image,
        pull_secrets=split_names(daemon_pull_secrets),
        log_verbosity=daemon_log_verbosity,
        max_nodes=max_nodes_per_imex_domain,
        authentication=daemon_authentication,
        priority_class=daemon_priority_class,
        resources={"requests": requests} | ({"limits": requests} if daemon_guaranteed else {}),
    )
    gangs = checked_gang_settings(
        GangSettings(
            settle=gang_settle,
            lost_after=gang_lost_after,
            bind_after=gang_bind_after,
            again=gang_retry,
            max_spares=gang_max_spares,
            clique_label=gang_clique_label,
        )
    )
    settings = ControllerSettings(
        daemon=daemon,
        daemon_namespace=daemon_namespace,
        additional_namespaces=split_names(additional_namespaces),
        imex_mode=ImexMode(mode),
        isolation=ImexIsolation(isolation),
        lost_after=gang_lost_after,
    )
    options = ControllerOptions(identity=pod, namespace=namespace, listen=listen, kubeconfig=kubeconfig)
    run_controller(settings, gangs, options, partial(print, flush=True))


def _webhook_env(name: str) -> Parameter:
    return Parameter(env_var=name)


def webhook(
    *,
    namespace: Annotated[str, _webhook_env("NAMESPACE")] = "rackloom-system",
    daemon_namespace: Annotated[str, _webhook_env("IMEX_NAMESPACE")] = "rackloom-imex",
    mode: Annotated[Literal["warn", "enforce"], _webhook_env("ADMISSION_MODE")] = "warn",
    isolation: Annotated[Literal["domain", "channel"], _webhook_env("IMEX_ISOLATION")] = "domain",
    listen: Annotated[str, _webhook_env("HTTPS_ENDPOINT")] = "0.0.0.0:8443",
    dns_name: tuple[str, ...] = (),
    pod: Annotated[str, _webhook_env("POD_NAME")] = "webhook",
    kubeconfig: Path | None = None,
) -> None:
    """Validate device configs, keep the pods of a ComputeDomain together, and hold back those that are early.

    Parameters
    ----------
    namespace
        Namespace of this program: the certificate is kept there, and nothing in it is changed or refused.
    daemon_namespace
        Where IMEX daemons run, as the controller has it; nothing in it is changed or refused either.
    mode
        Whether what is wrong is a warning or a denial.
    isolation
        What a ComputeDomain without the label rackloom.dev/imex-isolation gets; as the controller has it.
    listen
        HOST:PORT of HTTPS.
    dns_name
        Name by which the API server calls the webhook; default: that of its service.
    pod
        Name of this pod, for the election.
    kubeconfig
        How to reach the API server; default: as the service account of this pod.
    """
    from rackloom.app.webhook import WebhookOptions, run_webhook
    from rackloom.claim.cluster.admission.reviews import AdmissionMode
    from rackloom.claim.cluster.admission.webhook import AdmissionSettings
    from rackloom.core.domains.names import ImexIsolation

    settings = AdmissionSettings(
        namespace=namespace,
        daemon_namespace=daemon_namespace,
        mode=AdmissionMode(mode),
        isolation=ImexIsolation(isolation),
    )
    options = WebhookOptions(identity=pod, listen=listen, dns_names=dns_name, kubeconfig=kubeconfig)
    run_webhook(settings, options, partial(print, flush=True))
