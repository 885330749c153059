"""The functions of a selector, grouped by subject. Importing a module declares its functions.

Run-time dispatch takes the first overload of a function that accepts the values. Functions with overloads
in several modules are `string`, `indexOf` and `lastIndexOf`. Their overloads accept different values.
"""

from rackloom.core.allocate.cel.library import conversions, kubernetes, lists, networks, operators, strings

__all__ = ["conversions", "kubernetes", "lists", "networks", "operators", "strings"]
