"""The functions of a selector, grouped by subject; LIBRARIES lists them in order of declaration.

The order matters: run-time dispatch takes the first overload of a function that accepts the values.
"""

from rackloom.core.allocate.cel.library.conversions import CONVERSIONS, TIMES
from rackloom.core.allocate.cel.library.kubernetes import FORMATS, KUBERNETES
from rackloom.core.allocate.cel.library.lists import LISTS
from rackloom.core.allocate.cel.library.networks import NETWORKS, URLS
from rackloom.core.allocate.cel.library.operators import OPERATORS, OPTIONALS
from rackloom.core.allocate.cel.library.strings import PATTERNS, STRINGS

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
