"""Writes the rules of operator/ from the files of alerts: `python deploy/monitoring/write_rules.py`."""

from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent
_NAMESPACES = {"site-alerts": "rackloom", "cluster-alerts": "rackloom-system"}


def rules() -> str:
    """A PrometheusRule for each file of alerts."""
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": f"rackloom-{name}", "namespace": namespace},
            "spec": yaml.safe_load((_HERE / f"{name}.yaml").read_text()),
        }
        for name, namespace in _NAMESPACES.items()
    ]
    return "# Written by deploy/monitoring/write_rules.py.\n" + yaml.safe_dump_all(objects, sort_keys=False)


if __name__ == "__main__":
    (_HERE / "operator/rules.yaml").write_text(rules())
