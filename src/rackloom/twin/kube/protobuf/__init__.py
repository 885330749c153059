"""Bodies of requests in protobuf, which kubectl's typed clients write (`create namespace`, evictions).

A client does not fall back to JSON where a server refuses protobuf (client-go 0.32), so the small objects
that kubectl makes itself are read. `kubectl create -f` and `apply` always write JSON.
"""

from rackloom.twin.kube.protobuf.reading import CONTENT_TYPE, Unreadable, read

__all__ = ["CONTENT_TYPE", "Unreadable", "read"]
