"""The bill of materials of a release: CycloneDX 1.6 as JSON, the same for the same commit.

It lists what others made (`pins`); each part says in which artefacts it is (`rackloom:in`). Digests are of
the files that the part may come as.
"""

import json
import uuid
from datetime import UTC, datetime
from typing import Any

from deploy.release.pins import Part

Object = dict[str, Any]
_NAMESPACE = uuid.UUID("0d4c7a1e-5f6b-4f0a-9a52-5b8d2f6c1e90")


def sbom(version: str, commit: str, seconds: int, found: list[Part]) -> bytes:
    """The document for a commit that was made `seconds` after the epoch."""
    own = f"pkg:pypi/rackloom@{version}"
    components = [_component(part) for part in found]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{version} {commit}')}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "rackloom",
                "version": version,
                "purl": own,
                "licenses": [{"expression": "Apache-2.0"}],
                "properties": [{"name": "rackloom:commit", "value": commit}],
            },
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": sorted(each["bom-ref"] for each in components)}],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"


def _component(part: Part) -> Object:
    is_library = not part.purl.startswith("pkg:deb/")
    return {
        "type": "library" if is_library else "application",
        "bom-ref": part.purl,
        "name": part.name,
        "version": part.version,
        "purl": part.purl,
        "licenses": [{"expression": part.licence}],
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in part.digests],
        "properties": [{"name": "rackloom:in", "value": where} for where in part.where],
    }
