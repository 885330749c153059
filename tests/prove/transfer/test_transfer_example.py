"""The example of the KV-cache transfer: its kustomize output, and its script between two processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.core.transfer.transfer_values import RESULT_FIELDS
from tests.ports import reserved_ports
from tests.waiting import PATIENCE

from rackloom.prove.transfer.installation import nixl_missing_reason

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE = EXAMPLES / "nixl-kv-transfer"
SCRIPT = EXAMPLE / "nixl_benchmark.py"
needs_nixl = pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))


def built(directory: Path) -> dict[tuple[str, str], Any]:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")
    done = subprocess.run(
        [program, "kustomize", str(directory)], capture_output=True, text=True, check=True, timeout=60
    )
    objects = list(yaml.safe_load_all(done.stdout))
    return {(obj["kind"], obj["metadata"]["name"]): obj for obj in objects}


def test_kustomize_builds_what_the_example_promises() -> None:
    objects = built(EXAMPLE)
    assert set(objects) == {
        ("ConfigMap", "nixl-benchmark"),
        ("NetworkPolicy", "nixl-kv-target"),
        ("Pod", "nixl-kv-initiator"),
        ("Pod", "nixl-kv-target"),
        ("ResourceClaimTemplate", "h100-4gpu-4nic-numa-aligned"),
        ("ResourceClaimTemplate", "h100-4gpu-4nic-numa-unaligned"),
        ("Service", "nixl-kv-target"),
    }
    scripts = objects["ConfigMap", "nixl-benchmark"]["data"]
    assert scripts["nixl_benchmark.py"] == SCRIPT.read_text()
    assert scripts["run_bench.sh"] == (EXAMPLE / "run_bench.sh").read_text()
    assert objects["Service", "nixl-kv-target"]["spec"]["clusterIP"] == "None"
    for role, other in (("initiator", "target"), ("target", "initiator")):
        pod = objects["Pod", f"nixl-kv-{role}"]["spec"]
        (claim,) = pod["resourceClaims"]
        assert claim["resourceClaimTemplateName"] == "h100-4gpu-4nic-numa-aligned"
        (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["labelSelector"]["matchLabels"] == {"app": f"nixl-kv-{other}"}


def test_the_jobs_replace_the_pods() -> None:
    objects = built(EXAMPLES / "nixl-kv-transfer-jobs")
    kinds = [kind for kind, _ in objects]
    assert kinds.count("Job") == 2
    assert "Pod" not in kinds
    assert ("ConfigMap", "nixl-benchmark") in objects


def test_the_script_of_the_pods_takes_the_arguments_they_give() -> None:
    for directory in (EXAMPLE, EXAMPLES / "nixl-kv-transfer-jobs"):
        for (kind, _), obj in built(directory).items():
            if kind in ("Pod", "Job"):
                spec = obj["spec"] if kind == "Pod" else obj["spec"]["template"]["spec"]
                arguments = spec["containers"][0]["command"][2:]
                asked = run(*arguments, "--help")
                assert asked.returncode == 0, asked.stderr


def run(*arguments: str, secret: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(secret),
        check=False,
    )


def environment(secret: str | None) -> dict[str, str]:
    quiet = {name: value for name, value in os.environ.items() if name != "NIXL_BENCHMARK_SECRET"}
    return (
        quiet
        | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        | ({"NIXL_BENCHMARK_SECRET": secret} if secret else {})
    )


def pair(
    op: str, secrets: tuple[str | None, str | None], target_size: str = "65536"
) -> tuple[subprocess.CompletedProcess[str], int]:
    """The completed initiator, and the exit code of the target."""
    with reserved_ports() as port:
        return pair_on(str(port), op, secrets, target_size)


def pair_on(
    port: str, op: str, secrets: tuple[str | None, str | None], target_size: str
) -> tuple[subprocess.CompletedProcess[str], int]:
    common = ("--device", "cpu", "--op", op, "--port", port, "--batch-size", "4", "--timeout-seconds", "60")
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--mode", "target", "--block-size", target_size, *common],
        env=environment(secrets[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as target:
        try:
            done = run(
                *("--mode", "initiator", "--target-host", "127.0.0.1", "--block-size", "65536"),
                *("--iters", "3", "--warmup-iters", "1", *common),
                secret=secrets[0],
            )
            code = target.wait(PATIENCE)
        finally:
            target.kill()
    return done, code


@pytest.mark.slow
@pytest.mark.nixl
@needs_nixl
@pytest.mark.parametrize("op", ["WRITE", "READ"])
def test_two_processes_move_a_verified_buffer_and_print_the_seeds_fields(op: str) -> None:
    done, code = pair(op, ("s" * 32, "s" * 32))
    assert (done.returncode, code) == (0, 0), done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert list(result)[: len(RESULT_FIELDS)] == RESULT_FIELDS
    assert result["verified"] is True
    assert result["total_bytes"] == 4 * 65536
    assert "unauthenticated" not in done.stdout


@pytest.mark.slow
@pytest.mark.nixl
@needs_nixl
@pytest.mark.parametrize("theirs", ["t" * 32, None])
def test_another_secret_moves_nothing(theirs: str | None) -> None:
    done, code = pair("WRITE", ("s" * 32, theirs))
    assert done.returncode != 0
    assert code != 0
    assert "RESULT" not in done.stdout
    assert "NIXL_BENCHMARK_SECRET" in done.stderr or "peer" in done.stderr


@pytest.mark.slow
@pytest.mark.nixl
@needs_nixl
def test_another_size_is_told() -> None:
    done, code = pair("WRITE", (None, None), target_size="4096")
    assert done.returncode != 0
    assert code != 0
    assert "another size" in done.stderr
    assert "unauthenticated" in done.stdout


def test_run_bench_stops_where_the_pod_sees_other_nics_than_allocated() -> None:
    done = subprocess.run(
        ["/bin/bash", str(EXAMPLE / "run_bench.sh"), "--help"],
        env={**os.environ, "EXPECTED_NICS": "4096"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "its claim allocated 4096" in done.stderr
