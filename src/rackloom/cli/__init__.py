"""The command line: one thin module per command or group of commands.

Every module imports at its top only the modules that parsing its options and printing help need. A function
imports the modules of its work, because a local command answers within 150 ms. `main` lists the
commands by import path, and imports the module of one command only.
"""
