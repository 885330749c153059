"""The switches of upstream's allocator: off means refused, ignored or ineligible, exactly as there."""

import msgspec


class Features(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", forbid_unknown_fields=True):
    """Allocator features; the defaults are those of Kubernetes 1.36 and later."""

    admin_access: bool = True
    consumable_capacity: bool = True
    device_binding_and_status: bool = True
    device_taints: bool = True
    list_type_attributes: bool = False
    partitionable_devices: bool = True
    prioritized_list: bool = True
