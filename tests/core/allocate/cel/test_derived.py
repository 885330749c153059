"""Expressions of derived attributes: each value, error and cost is that of upstream's own compiler.

derived.json was recorded by `upstream derivations` (benchmarks/peers) with
k8s.io/dynamic-resource-allocation 0.37.2, on the device of the driver d that it holds.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.derived import compile_derived
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.objects import Device, DeviceAttribute

RECORDED = json.loads(Path(__file__).with_name("derived.json").read_text())
DEVICE = DeviceView.of_device("d", msgspec.convert(RECORDED["device"], Device))


@pytest.mark.parametrize("answer", RECORDED["answers"], ids=lambda answer: answer["expression"])
def test_the_answer_is_upstreams(answer: dict[str, Any]) -> None:
    if "refused" in answer:
        with pytest.raises(errors.CompileError):
            compile_derived(answer["expression"])
        return
    program = compile_derived(answer["expression"])
    assert program.max_cost == answer["max_cost"]
    if "failed" in answer:
        with pytest.raises(errors.EvaluationError):
            program.evaluate(DEVICE)
        return
    value = program.evaluate(DEVICE)
    expected = msgspec.convert(answer["value"], DeviceAttribute)
    # JSON leaves out an empty list.
    assert value == expected or (value.strings, expected) == ((), DeviceAttribute())
