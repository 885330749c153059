"""Reference pages that are generated from the code: a module each, whose `page` returns Markdown.

They are made when the site is, so they cannot be older than the code. `tests/docs/test_reference.py` compares
each with the running program: its help, its answers, its registries, its objects.
"""
