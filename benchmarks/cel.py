"""Selectors per second on one core, and what compiling one costs. Prints one JSON line."""

import json
import time

from rackloom.core.allocate.cel import compiler, environment

EXPRESSION = 'device.attributes["dra.net"].rdma == true && device.attributes["dra.net"].numaNode == 0'
DEVICES = 1000
ROUNDS = 300
COMPILES = 200


def views() -> list[environment.DeviceView]:
    return [
        environment.DeviceView.of(
            "dra.net",
            {"rdma": {"bool": index % 4 != 0}, "numaNode": {"int": index % 2}},
            {"bandwidth": "400G"},
        )
        for index in range(DEVICES)
    ]


def evaluations_per_second() -> float:
    devices = views()
    matches = compiler.compile_selector(EXPRESSION).matches
    start = time.perf_counter()
    for _ in range(ROUNDS):
        for device in devices:
            matches(device)
    return ROUNDS * DEVICES / (time.perf_counter() - start)


def compile_milliseconds() -> float:
    compiler.compile_selector(EXPRESSION)
    start = time.perf_counter()
    for index in range(COMPILES):
        compiler.compile_selector(f"{EXPRESSION} && {index} == {index}")
    return (time.perf_counter() - start) / COMPILES * 1000


if __name__ == "__main__":
    print(
        json.dumps(
            {"evals_per_s": round(evaluations_per_second()), "compile_ms": round(compile_milliseconds(), 3)}
        )
    )
