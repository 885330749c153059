import json
from typing import Any

import pytest

from rackloom.core.transfer.kv_cache import BYTES_PER_TOKEN, kv_terms, kv_terms_of_all_models
from rackloom.core.transfer.records import read_nccl, read_nvbandwidth
from rackloom.errors import Refused


def nvbandwidth(*cases: dict[str, Any]) -> str:
    return json.dumps({"nvbandwidth": {"CUDA Runtime Version": 12080, "testcases": list(cases)}})


COPY = {
    "name": "device_to_device_memcpy_read_ce",
    "status": "Passed",
    "bandwidth_matrix": [["N/A", "387.20"], ["386.80", "N/A"]],
}

NCCL = """\
# nThread 1 nGpus 1 minBytes 1073741824 maxBytes 2147483648 step: 2(factor) warmup iters: 5 iters: 20
#                                                  out-of-place                    in-place
#       size      count   type redop root     time  algbw  busbw #wrong     time  algbw  busbw #wrong
#        (B) (elements)                       (us) (GB/s) (GB/s)            (us) (GB/s) (GB/s)
  1073741824  268435456  float   sum   -1  20480.1  52.43  98.30      0  20470.2  52.45  98.35      0
  2147483648  536870912  float   sum   -1  40500.0  53.02  99.42    N/A  40490.9  53.04  99.44    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 98.8775
"""


def test_nvbandwidth_matrices_become_figures() -> None:
    noise = (
        "Running on host a\n"
        + nvbandwidth(COPY, {"name": "multinode", "status": "Waived"})
        + "\nmpirun: done\n"
    )
    found = read_nvbandwidth(noise, "nv.json")
    assert (found.tool, found.file, found.correct) == ("nvbandwidth", "nv.json", True)
    (figure,) = found.figures
    assert figure.name == "device_to_device_memcpy_read_ce"
    assert figure.value == pytest.approx(387.0)
    assert figure.matrix == ((None, 387.2), (386.8, None))


def test_a_failed_test_case_is_kept_as_such() -> None:
    failed = {**COPY, "name": "failing", "status": "Failed"}
    assert read_nvbandwidth(nvbandwidth(COPY, failed), "nv.json").correct is False


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"nvbandwidth": []}', nvbandwidth(), nvbandwidth({**COPY, "bandwidth_matrix": [["fast"]]})],
)
def test_what_is_not_from_nvbandwidth_is_refused(text: str) -> None:
    with pytest.raises(Refused, match=r"nv\.json"):
        read_nvbandwidth(text, "nv.json")


def test_nccl_rows_and_their_average_become_figures() -> None:
    found = read_nccl(NCCL, "nccl.txt")
    assert found.correct is True
    assert [(figure.name, figure.value) for figure in found.figures] == [
        ("average bus bandwidth", 98.8775),
        ("bus bandwidth at 1073741824 bytes", 98.30),
        ("bus bandwidth at 2147483648 bytes", 99.42),
    ]
    assert read_nccl(NCCL.replace(": 0 OK", ": 3 FAILED"), "n").correct is False
    assert read_nccl("\n".join(NCCL.splitlines()[:-2]), "n").correct is None


def test_text_without_a_row_is_refused() -> None:
    with pytest.raises(Refused, match="no row of nccl-tests"):
        read_nccl("# Avg bus bandwidth : 1.0\n", "n.txt")


def test_a_gibibyte_is_8192_tokens_of_llama_3_1_8b() -> None:
    terms = kv_terms("Llama-3.1-8B", 8192, 39.07, 300.0)
    assert terms.cache_bytes == 1 << 30
    assert terms.milliseconds == pytest.approx(27.48, abs=0.01)
    assert terms.ttft_share == pytest.approx(27.48 / 327.48, abs=1e-4)
    assert kv_terms("Llama-3.1-8B", 8192, 39.07, None).ttft_share is None
    assert len(kv_terms_of_all_models(100, 1.0, None)) == len(BYTES_PER_TOKEN)


@pytest.mark.parametrize(
    ("model", "tokens", "prefill"), [("GPT-9", 10, None), ("Qwen3-8B", 0, None), ("Qwen3-8B", 1, 0.0)]
)
def test_kv_terms_of_nothing_are_refused(model: str, tokens: int, prefill: float | None) -> None:
    with pytest.raises(Refused) as refused:
        kv_terms(model, tokens, 1.0, prefill)
    assert refused.value.nearest_fix is not None
