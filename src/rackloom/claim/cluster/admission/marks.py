"""Names that admission writes on pods."""

import hashlib

WATCHED_LABEL = "rackloom.dev/claim-admission"
"""On pods that claim a channel, or were gated: those that the gate controller follows."""
WATCHED = "true"
CHANNEL_LABEL = "rackloom.dev/channel-template"
"""On pods that claim a channel; its value stands for the template, and so for the ComputeDomain."""
GANG_LABEL = "rackloom.dev/gang"
"""On pods that are placed together by somebody else, who sees to their clique."""
CHANNEL_CONDITION = "rackloom.dev/ChannelClaim"
"""A pod condition: False where the pod can never get the channel that it claims."""
GATE = "rackloom.dev/claim-template"
"""The scheduling gate of a pod whose claim template does not exist yet."""
_LONGEST_VALUE = 63
"""Characters of a label's value; a template's name may have 253."""


def channel_label(template: str) -> str:
    """What CHANNEL_LABEL says of a pod with a channel of this template: its name, or a hash of a long one."""
    if len(template) <= _LONGEST_VALUE:
        return template
    return f"sha256-{hashlib.sha256(template.encode()).hexdigest()[:48]}"
