"""What an operator chooses for the GPU plugin."""

from pathlib import Path

from rackloom.claim.node.gpu.driver_files import DriverFiles
from rackloom.claim.node.gpu.shares import Shares
from rackloom.claim.node.values import Value

GPU_DRIVER = "gpu.nvidia.com"


class GpuSettings(Value, frozen=True, kw_only=True):
    """Of one node."""

    node: str
    mps_home: Path
    """A directory for each MPS daemon."""
    files: DriverFiles = DriverFiles()
    shares: Shares = Shares()
