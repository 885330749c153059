"""`rackloom imex run`: the IMEX daemon of a ComputeDomain on one node.

Node, pod and ComputeDomain come from the environment that the device plugin and the DaemonSet set. The
options give the daemon's files and programs, and how it names peers.
"""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter, validators

from rackloom.cli.common import Kubeconfig, KubeContext, with_common_flags
from rackloom.core.cluster.names import IMEX_PROBE_PORT, IMEX_SETTINGS_VARIABLE

app = App(name="imex", help="Supervise NVIDIA's IMEX daemon in a pod of a ComputeDomain.")

Directory = Annotated[Path, Parameter(env_var="IMEX_DIRECTORY")]
TlsDirectory = Annotated[Path, Parameter(env_var="IMEX_TLS_DIRECTORY")]
Program = Annotated[str, Parameter(env_var="IMEX_PROGRAM")]
ControlProgram = Annotated[str, Parameter(env_var="IMEX_CTL_PROGRAM")]
ProbePort = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535))]


@app.command
@with_common_flags
def run(
    *,
    directory: Directory = Path("/imexd"),
    tls_directory: TlsDirectory = Path("/imexd-tls"),
    authentication: Annotated[bool, Parameter(env_var="IMEX_AUTHENTICATION")] = True,
    peers: Annotated[Literal["dns", "ip"], Parameter(env_var="IMEX_PEERS")] = "dns",
    nodes: Annotated[int, Parameter(env_var="IMEX_NODES")] = 0,
    program: Program = "nvidia-imex",
    control_program: ControlProgram = "nvidia-imex-ctl",
    hosts: Path = Path("/etc/hosts"),
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    probe_port: ProbePort = IMEX_PROBE_PORT,
    settings: Annotated[str, Parameter(env_var=IMEX_SETTINGS_VARIABLE)] = "",
) -> None:
    """Join the clique of this ComputeDomain and keep nvidia-imex running with its peers.

    The node, the pod and the ComputeDomain come from the environment that the device plugin and the
    DaemonSet set.

    Parameters
    ----------
    directory
        Directory for the daemon's configuration.
    tls_directory
        Directory with tls.key, tls.crt and ca.crt of the domain.
    authentication
        Accept only daemons with a certificate of this domain.
    peers
        How the node file names peers. `dns` survives moving pods, `ip` needs a restart for each move.
    nodes
        With `ip`: the number of nodes that must have joined before any daemon starts.
    program
        NVIDIA's daemon.
    control_program
        NVIDIA's control tool.
    hosts
        The hosts file of the pod.
    probe_port
        Port for kubelet's probes, over HTTP at the pod's address. The answer is 200 if nvidia-imex is READY
        or if the node has no NVLink fabric.
    settings
        Settings of nvidia-imex as NAME=VALUE, separated by commas. docs/compute-domains.md lists them.
    """
    from rackloom.app.imex import ImexDaemonOptions, run_imex
    from rackloom.core.domains.imex_settings import read_imex_settings

    run_imex(
        ImexDaemonOptions(
            directory=directory,
            hosts=hosts,
            tls_directory=tls_directory if authentication else None,
            mode=peers,
            quorum=nodes,
            program=program.split(),
            control_program=control_program.split(),
            kubeconfig=kubeconfig,
            context=context,
            probe_port=probe_port,
            settings=read_imex_settings(settings),
        )
    )
