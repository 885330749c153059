"""The command line: one thin module per command or group of commands.

Every module imports at its top only what parsing its options and printing help needs. What a command
works with is imported inside its function, because a local command answers within 150 ms. `main` lists
the commands by import path, and imports the module of one command only.
"""
