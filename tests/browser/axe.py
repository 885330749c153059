"""axe-core, which finds barriers on a page for people who do not see it or use no mouse.

It is a tool of the tests (MPL-2.0) and is not shipped. `npm pack` fetches it, and its digest is compared
with the pin below. Without npm or a registry, the test reports loudly that nothing was checked.
"""

import base64
import hashlib
import io
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

AXE = "axe-core@4.14.1"
INTEGRITY = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
FETCH_SECONDS = 60
_RUN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.map(
  (one) => `${one.impact} ${one.id}: ${one.help}: ` + one.nodes.slice(0, 3).map((node) =>
    node.html.slice(0, 160) + " " + [...node.any, ...node.all, ...node.none].map((check) => check.message))
)"""


@cache
def program() -> str:
    """The program for browsers. Skips the test if it cannot be fetched, and fails if the digest differs."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = ["npm", "pack", "--silent", AXE]
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=FETCH_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(
                f"NO AXE-CORE ({error}): nobody looked for what the page lacks for people who cannot see it"
            )
        (archive,) = (path.read_bytes() for path in Path(folder).glob("*.tgz"))
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    assert found == INTEGRITY, f"{AXE} has another digest than is pinned"
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        read = members.extractfile("package/axe.min.js")
        assert read is not None
        return read.read().decode()


def violations(page) -> list[str]:
    """The violations that axe finds on a page, in words."""
    # Not as a script element: the policy of the page forbids foreign scripts.
    page.evaluate(program())
    return page.evaluate(_RUN)
