"""Prints one reference page: `python -m docs.site.reference log-events`."""

import sys

from docs.site.build import REFERENCES


def main(words: list[str]) -> None:
    """Print the page of this name. Exits with the list of names if there is no such page."""
    if len(words) != 1 or words[0] not in REFERENCES:
        sys.exit(f"usage: python -m docs.site.reference {'|'.join(sorted(REFERENCES))}")
    print(REFERENCES[words[0]](), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
