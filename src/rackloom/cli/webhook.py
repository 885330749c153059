"""`rackloom webhook`: admission of claims and pods."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def _env(name: str) -> Parameter:
    return Parameter(env_var=name)


def webhook(
    *,
    namespace: Annotated[str, _env("NAMESPACE")] = "rackloom-system",
    daemon_namespace: Annotated[str, _env("IMEX_NAMESPACE")] = "rackloom-imex",
    mode: Annotated[Literal["warn", "enforce"], _env("ADMISSION_MODE")] = "warn",
    isolation: Annotated[Literal["domain", "channel"], _env("IMEX_ISOLATION")] = "domain",
    listen: Annotated[str, _env("HTTPS_ENDPOINT")] = "0.0.0.0:8443",
    dns_name: tuple[str, ...] = (),
    pod: Annotated[str, _env("POD_NAME")] = "webhook",
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
    from rackloom.app.webhook import Options, run_webhook
    from rackloom.claim.cluster.admission.desk import AdmissionSettings
    from rackloom.claim.cluster.admission.modes import Mode
    from rackloom.claim.domain.isolation import Isolation

    settings = AdmissionSettings(
        namespace=namespace,
        daemon_namespace=daemon_namespace,
        mode=Mode(mode),
        isolation=Isolation(isolation),
    )
    options = Options(identity=pod, listen=listen, dns_names=dns_name, kubeconfig=kubeconfig)
    run_webhook(settings, options, partial(print, flush=True))
