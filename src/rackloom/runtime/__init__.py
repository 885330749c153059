"""Needs of every program: log, traces, files, foreign text, other programs."""
