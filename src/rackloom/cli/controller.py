"""`rackloom controller`: the controllers of ComputeDomains and of gangs."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from rackloom.cli.node_options import listed


def _env(name: str) -> Parameter:
    return Parameter(env_var=name)


def controller(
    *,
    image: Annotated[str, _env("IMAGE_NAME")],
    namespace: Annotated[str, _env("NAMESPACE")] = "rackloom-system",
    daemon_namespace: Annotated[str, _env("IMEX_NAMESPACE")] = "rackloom-imex",
    additional_namespaces: Annotated[str, _env("ADDITIONAL_NAMESPACES")] = "",
    mode: Annotated[Literal["driverManaged", "hostManaged"], _env("IMEX_MODE")] = "driverManaged",
    isolation: Annotated[Literal["domain", "channel"], _env("IMEX_ISOLATION")] = "domain",
    max_nodes_per_imex_domain: Annotated[int, _env("MAX_NODES_PER_IMEX_DOMAIN")] = 18,
    daemon_pull_secrets: Annotated[str, _env("CD_DAEMON_IMAGE_PULL_SECRET_NAMES")] = "",
    daemon_log_verbosity: Annotated[int, _env("LOG_VERBOSITY_CD_DAEMON")] = 4,
    daemon_authentication: Annotated[bool, _env("IMEX_AUTHENTICATION")] = True,
    daemon_priority_class: Annotated[str | None, _env("CD_DAEMON_PRIORITY_CLASS")] = None,
    daemon_cpu: Annotated[str, _env("CD_DAEMON_CPU")] = "50m",
    daemon_memory: Annotated[str, _env("CD_DAEMON_MEMORY")] = "128Mi",
    daemon_guaranteed: Annotated[bool, _env("CD_DAEMON_GUARANTEED")] = False,
    gang_max_spares: Annotated[int, _env("GANG_MAX_SPARES")] = 8,
    gang_clique_label: Annotated[str, _env("GANG_CLIQUE_LABEL")] = "nvidia.com/gpu.clique",
    gang_settle: Annotated[float, _env("GANG_SETTLE_SECONDS")] = 2.0,
    gang_lost_after: Annotated[float, _env("GANG_LOST_AFTER_SECONDS")] = 300.0,
    gang_bind_after: Annotated[float, _env("GANG_BIND_AFTER_SECONDS")] = 120.0,
    gang_retry: Annotated[float, _env("GANG_RETRY_SECONDS")] = 15.0,
    listen: Annotated[str | None, _env("HTTP_ENDPOINT")] = None,
    pod: Annotated[str, _env("POD_NAME")] = "controller",
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
    from rackloom.app.controller import Options, run_controller
    from rackloom.claim.cluster.gang.settings import GangSettings, checked
    from rackloom.claim.cluster.settings import DaemonSettings, Settings
    from rackloom.claim.domain.isolation import ImexMode, Isolation

    requests = {"cpu": daemon_cpu, "memory": daemon_memory}
    daemon = DaemonSettings(
        image=image,
        pull_secrets=listed(daemon_pull_secrets),
        log_verbosity=daemon_log_verbosity,
        max_nodes=max_nodes_per_imex_domain,
        authentication=daemon_authentication,
        priority_class=daemon_priority_class,
        resources={"requests": requests} | ({"limits": requests} if daemon_guaranteed else {}),
    )
    gangs = checked(
        GangSettings(
            settle=gang_settle,
            lost_after=gang_lost_after,
            bind_after=gang_bind_after,
            again=gang_retry,
            max_spares=gang_max_spares,
            clique_label=gang_clique_label,
        )
    )
    settings = Settings(
        daemon=daemon,
        daemon_namespace=daemon_namespace,
        additional_namespaces=listed(additional_namespaces),
        imex_mode=ImexMode(mode),
        isolation=Isolation(isolation),
        gangs=gangs,
    )
    options = Options(identity=pod, namespace=namespace, listen=listen, kubeconfig=kubeconfig)
    run_controller(settings, options, partial(print, flush=True))
