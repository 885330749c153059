"""Writes the CRDs of base/ from the code: `python deploy/kubernetes/write_crds.py`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from rackloom.core.domains.crds import domain_crds
from rackloom.core.gangs.crd import gang_crd


def write(name: str, documents: Iterable[dict[str, Any]]) -> None:
    """Write one file of base/."""
    text = "# Written by deploy/kubernetes/write_crds.py.\n" + yaml.safe_dump_all(documents, sort_keys=False)
    (Path(__file__).parent / "base" / name).write_text(text)


if __name__ == "__main__":
    write("crds.yaml", domain_crds())
    write("crd-gangs.yaml", (gang_crd(),))
