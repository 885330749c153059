"""Names that gangs are known by, on pods, nodes and plans."""

from rackloom.claim.cluster.admission.marks import GANG_LABEL

GATE = GANG_LABEL
"""The scheduling gate of a pod whose gang is not placed yet."""
TAINT = GANG_LABEL
"""On reserved trays, effect NoSchedule; its value is the UID of the GangPlan."""
FINALIZER = GANG_LABEL
"""On a GangPlan while trays may be reserved for it."""
GROUP_LABEL = "rackloom.dev/gang-group"
"""On pods of gangs with several groups: which of them."""
SIZE_ANNOTATION = "rackloom.dev/gang-size"
"""On every pod of a gang: `18`, or `launcher=1,worker=18`."""
SEGMENT_ANNOTATION = "rackloom.dev/gang-segment"
"""So many members of a group share a clique; without it all of the gang do."""
SPARES_ANNOTATION = "rackloom.dev/gang-spares"
"""Trays to reserve in each clique for members whose tray is lost."""
TRAY_ANNOTATION = "rackloom.dev/gang-tray"
"""On a pod that was let go: the node that it is pinned to."""
RELEASED_ANNOTATION = "rackloom.dev/gang-released"
"""On a pod that was let go: when (RFC 3339)."""
INDEX_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "apps.kubernetes.io/pod-index",
)
"""Where controllers write the rank of a pod: neighbours in rank become neighbours in the plan."""
ONLY_GROUP = "member"
"""The group of a gang that names none."""
