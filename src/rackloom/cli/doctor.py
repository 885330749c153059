"""`rackloom doctor`: find problems in all layers, with evidence and a command that fixes each.

Exit code 1 if anything is wrong or unknown. If the examination fails, the textfile for Prometheus reports the
failure: a monitor must not keep reading an old success.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import ArgumentCollection, Group, Parameter

from rackloom.cli.common import (
    NAMESPACE,
    Flag,
    Format,
    KubeContext,
    Output,
    emit,
    progress,
    with_common_flags,
)
from rackloom.cli.kubectl_plugin import is_kubectl_plugin

if TYPE_CHECKING:
    from rackloom.app.doctor import DoctorResult


def _require_one_site(named: ArgumentCollection) -> None:
    if sum(source.has_tokens for source in named) > 1:
        raise ValueError("--home and --config name two sites: give one of them")


_SITE_GROUP = Group(validator=_require_one_site)


@with_common_flags
def doctor(
    *,
    home: Annotated[Path | None, Parameter(group=_SITE_GROUP)] = None,
    config: Annotated[Path | None, Parameter(group=_SITE_GROUP)] = None,
    cluster: Flag = False,
    kubeconfig: Annotated[
        Path | None,
        Parameter(
            help="The cluster on the same machines, in place of the configured one; alone, only the cluster "
            "is examined."
        ),
    ] = None,
    context: KubeContext = None,
    transfers: Path | None = None,
    namespace: Annotated[str | None, NAMESPACE] = None,
    sysroot: Path | None = None,
    output: Output = "table",
    textfile: Path | None = None,
    evidence: Literal["ncp"] | None = None,
    runbook: str | None = None,
) -> int:
    """Examine a site over all layers: switch fabrics, tenants' records, the cluster, measured transfers.

    Nothing is changed. Exit code 0 if everything is as it should be, 1 if anything is wrong or unknown.
    JSON and YAML are an object with `ok`, `simulated` and `findings`.

    Parameters
    ----------
    home
        Home of a `rackloom up`, running or not. Default: the one that `rackloom up` uses. Its `kubeconfig`
        and `transfers` are examined too.
    config
        TOML file of a `rackloom serve`. Its database is read, with the cluster and transfers that it names.
    cluster
        The cluster of the current kubeconfig, in place of the configured one. Alone, only the cluster is
        examined. This is the default of `kubectl rackloom doctor`.
    transfers
        Directory with records that `rackloom transfer run --save` wrote, in place of the configured one.
    namespace
        Namespace in which the controller runs IMEX daemons. IMEX reports of pods elsewhere are ignored.
        Default: the configured namespace, else rackloom-imex.
    sysroot
        Path of a GPU host's own /, such as /host in a pod. Default: this host, if NVIDIA's driver is loaded.
        Alone, only that host is examined.
    textfile
        Also write the result for the textfile collector of Prometheus' node exporter.
    evidence
        Print the results of an acceptance suite instead. ncp is NVIDIA's suite for cloud partners.
    runbook
        Examine nothing, and print the runbook of this name: the meaning of a finding, how to see it, and how
        to fix it. Each finding names its runbook.
    """
    if runbook is not None:
        return _print_runbook(runbook, output)
    import gc

    from rackloom.app.doctor import DoctorSources, diagnose

    named = (home, config, kubeconfig, context, transfers, sysroot)
    sources = DoctorSources(
        home=home,
        config=config,
        cluster=cluster or (is_kubectl_plugin() and not any(named)),
        kubeconfig=kubeconfig,
        context=context,
        transfers=transfers,
        namespace=namespace,
        sysroot=sysroot,
    )
    # A large site has millions of objects and no cycles. A search for cycles takes a fifth of the time.
    gc.disable()
    try:
        examined = diagnose(sources, progress)
    except Exception:
        # Replace an old success, which a monitor would otherwise keep reading.
        if textfile is not None:
            import time

            from rackloom.app.doctor_metrics import write_failed_textfile

            write_failed_textfile(textfile, time.time())
        raise
    finally:
        gc.enable()
    if textfile is not None:
        from rackloom.app.doctor_metrics import write_textfile

        write_textfile(textfile, examined.snapshot, examined.findings)
    if evidence == "ncp":
        from rackloom.core.diagnosis.acceptance import acceptance

        emit(acceptance(examined.snapshot), "yaml" if output == "yaml" else "json", str)
    else:
        _print_result(examined, output)
    return 1 if examined.findings else 0


def _print_runbook(name: str, output: Format) -> int:
    from rackloom.core.diagnosis.catalogue import runbook_name
    from rackloom.core.diagnosis.runbooks import runbook_text, runbooks
    from rackloom.errors import Refused

    found = runbooks().get(runbook_name(name))
    if found is None:
        raise Refused(f"there is no runbook {name}", nearest_fix=f"name one of {', '.join(runbooks())}")
    text = runbook_text(found)
    emit({"runbook": runbook_name(name), "text": text}, output, lambda: text)
    return 0


def _print_result(examined: "DoctorResult", output: Format) -> None:
    from rackloom.core.diagnosis.report import render_findings

    value = {
        "ok": not examined.findings,
        "simulated": bool(examined.snapshot.simulated),
        "findings": examined.findings,
    }
    emit(
        value,
        output,
        lambda: render_findings(examined.snapshot, examined.findings, examined.host),
    )
