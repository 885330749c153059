"""The rights of every account in a cluster that could take it over, from the manifests."""

from deploy.kubernetes import rights
from docs.site.reference.markdown import made_from


def page() -> str:
    """The table of each account, and where the policies are that narrow its rights."""
    parts = [
        "# Rights of accounts",
        made_from("the manifests of `deploy`"),
        "Every account that a folder of `deploy` installs by kustomize or Helm, and its rights on objects "
        "that could take over a cluster. [Admission and permissions](../docs/admission.md#accounts) names "
        "the policies that narrow them to single objects and fields.",
        rights.table(),
    ]
    return "\n\n".join(parts)
