"""The functions of a selector, one module per subject."""

from rackloom.claim.allocate.cel.library.conversions import CONVERSIONS
from rackloom.claim.allocate.cel.library.formats import FORMATS
from rackloom.claim.allocate.cel.library.kubernetes import KUBERNETES
from rackloom.claim.allocate.cel.library.lists import LISTS
from rackloom.claim.allocate.cel.library.networks import NETWORKS
from rackloom.claim.allocate.cel.library.operators import OPERATORS
from rackloom.claim.allocate.cel.library.optionals import OPTIONALS
from rackloom.claim.allocate.cel.library.patterns import PATTERNS
from rackloom.claim.allocate.cel.library.strings import STRINGS
from rackloom.claim.allocate.cel.library.times import TIMES
from rackloom.claim.allocate.cel.library.urls import URLS

LIBRARIES = (
    OPERATORS,
    CONVERSIONS,
    STRINGS,
    PATTERNS,
    LISTS,
    OPTIONALS,
    TIMES,
    KUBERNETES,
    NETWORKS,
    URLS,
    FORMATS,
)
