"""Writes base/crds.yaml from `rackloom.claim.domain.crds`: `python deploy/kubernetes/write_crds.py`."""

from pathlib import Path

import yaml

from rackloom.claim.domain.crds import crds

if __name__ == "__main__":
    text = "# Written by deploy/kubernetes/write_crds.py.\n" + yaml.safe_dump_all(crds(), sort_keys=False)
    (Path(__file__).parent / "base" / "crds.yaml").write_text(text)
