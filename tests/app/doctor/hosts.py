"""Hosts as files: the published machines, healthy except for a test's changes, and their examination."""

from rackloom.app.doctor import host_findings
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.lab.nodes.host_files import host_files, write_sysroot

SOCKETS = "  sl  local_address rem_address   st\n   0: 00000000:0016 00000000:0000 0A\n"
WELL = {
    "sys/module/nvidia/version": "580.95.05\n",
    "proc/devices": "Character devices:\n  1 mem\n235 nvidia-caps-imex-channels\n\nBlock devices:\n  8 sd\n",
    "proc/1/comm": "systemd\n",
    "proc/1/cgroup": "0::/init.scope\n",
    "proc/1/net/tcp": SOCKETS,
    "etc/systemd/system/multi-user.target.wants/kubelet.service": "",
    "proc/70/comm": "containerd\n",
    "etc/containerd/config.toml": "version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi=true\n",
}


ALONE = SiteSnapshot(at=0.0, layers=())


def examine_host(root, snapshot=ALONE):
    """The findings about a host, and about the cluster that was read too."""
    return examine(snapshot, host=host_findings(root, snapshot))


def laid_out(root, machine, **changes):
    """A healthy host below `root`, with some files changed (None: not there)."""
    write_sysroot(host_files(machine), root)
    for path, text in (WELL | changes).items():
        if text is not None:
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    return root
