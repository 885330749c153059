"""Files in which the operator of a node states something: YAML or JSON, a mapping of mappings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rackloom.errors import Refused, why


def read_stated(file: Path, shape: str) -> Mapping[str, Mapping[str, Any]]:
    """What stands in `file`. Raises `Refused` where it is not `shape`, such as "from names to settings"."""
    try:
        found = yaml.safe_load(file.read_text())
    except OSError as error:
        raise Refused(f"{file} cannot be read: {why(error)}", nearest_fix="name a file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Refused(f"{file} is not YAML: {error}", nearest_fix="correct it; see docs/nics.md") from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise Refused(f"{file} is not a mapping {shape}", nearest_fix="see docs/nics.md")
    return {str(name): said for name, said in found.items()}
