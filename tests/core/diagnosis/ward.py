"""The site that tests of the doctor break: two racks of four trays at work, and the tray with the fault."""

from tests.core.diagnosis.healthy import healthy, machine, node, serial, slot

WELL = healthy(racks=2, trays=4)
TRAY = 1
NODE = node(0, TRAY)
MACHINE = machine(0, TRAY)


def of_tray(gpu):
    return gpu.place.chassis_serial == serial(0) and gpu.place.slot == slot(TRAY)


def is_module(number):
    return lambda gpu: of_tray(gpu) and gpu.place.module_id == number


def of_node(record):
    return record.name == NODE
