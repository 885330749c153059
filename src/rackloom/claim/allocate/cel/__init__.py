"""CEL as Kubernetes has it for device selectors: compile once, ask of many devices."""

from rackloom.claim.allocate.cel.device import DeviceView
from rackloom.claim.allocate.cel.errors import CompileError, EvaluationError
from rackloom.claim.allocate.cel.program import Program, compile  # noqa: A004 - read as cel.compile

__all__ = ["CompileError", "DeviceView", "EvaluationError", "Program", "compile"]
