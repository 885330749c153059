"""A program: modules on its input, their bytecode on its output. Run it with `python -I -S`.

Both are what marshal writes: [(path in the image, source)], and [(path in the image, .pyc)]. It is a
process of its own, of nothing but the interpreter, because how marshal writes a name depends on what else
the process holds.
"""

import marshal
import sys
import warnings
from importlib.util import MAGIC_NUMBER, cache_from_source, source_hash

UNCHECKED = (1).to_bytes(4, "little")
"""The flags of a .pyc with the hash of its source that is used without a look at the source (PEP 552)."""


def compiled(path: str, source: bytes) -> list[tuple[str, bytes]]:
    """The path and content of the .pyc; none for what is no module of this Python, a template say."""
    try:
        code = compile(source, f"/{path}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return []
    return [(cache_from_source(path), MAGIC_NUMBER + UNCHECKED + source_hash(source) + marshal.dumps(code))]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    modules = marshal.load(sys.stdin.buffer)  # noqa: S302 (from the program that started this one)
    marshal.dump([pair for path, source in modules for pair in compiled(path, source)], sys.stdout.buffer)
