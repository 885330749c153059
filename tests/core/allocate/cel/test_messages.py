"""Messages in selectors: each answer and cost is that of upstream's own compiler.

messages.json was recorded by `upstream answers` (benchmarks/peers) with k8s.io/dynamic-resource-allocation
0.37.2, on a device of the driver dra.net without attributes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rackloom.core.allocate.cel import compiler, environment, errors

RECORDED = json.loads(Path(__file__).with_name("messages.json").read_text())
DEVICE = environment.DeviceView.of("dra.net", {}, {})
LEFT_OUT = ("protobuf.Any{", "protobuf.Empty{", "NullValue.NULL_VALUE", "DRADevice{")
"""The parts that library/messages.py documents as left out."""


@pytest.mark.parametrize("answer", RECORDED, ids=lambda answer: answer["expression"])
def test_the_answer_is_upstreams(answer: dict[str, Any]) -> None:
    expression = answer["expression"]
    refused = "refused" in answer or any(name in expression for name in LEFT_OUT)
    if refused:
        with pytest.raises(errors.CompileError):
            compiler.compile_selector(expression)
        return
    program = compiler.compile_selector(expression)
    found = program.evaluate(DEVICE)
    assert (program.max_cost, found.cost) == (answer["max_cost"], answer["cost"])
    if "failed" in answer:
        for ask in (found.truth, lambda: program.matches(DEVICE)):
            with pytest.raises(errors.EvaluationError):
                ask()
        return
    assert found.truth() is program.matches(DEVICE) is answer["matches"]


def test_a_message_that_cannot_be_built_is_refused_with_those_that_can() -> None:
    with pytest.raises(errors.CompileError, match=r"undeclared reference.*\n.*\n.*\n.*BoolValue, "):
        compiler.compile_selector("google.protobuf.Any{} == null")


@pytest.mark.parametrize("seconds", [-(2**63), -62_135_596_801, 253_402_300_800, 2**63 - 1])
def test_a_timestamp_outside_the_years_of_protobuf_is_an_error(seconds: int) -> None:
    program = compiler.compile_selector(
        f"google.protobuf.Timestamp{{seconds: {seconds}}}.getFullYear() == 1970"
    )
    with pytest.raises(errors.EvaluationError, match="timestamp overflow"):
        program.matches(DEVICE)
