"""A file for the textfile collector of Prometheus' node exporter, replaced whole or not at all."""

from pathlib import Path

from prometheus_client import CollectorRegistry, write_to_textfile

from rackloom.errors import Refused


def write_registry(file: Path, registry: CollectorRegistry) -> None:
    """Put the series of `registry` into `file`. Raises Refused if it cannot be written."""
    try:
        write_to_textfile(str(file), registry)
    except OSError as error:
        raise Refused(
            f"{file} could not be written: {error.strerror}",
            nearest_fix="name a .prom file in the collector's directory",
        ) from error
