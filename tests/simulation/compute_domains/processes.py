"""Tasks that outlive their process, and files that are made durable as crash points."""

import asyncio
import contextvars
import os
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from rackloom.lab.virtual.event_loop import SimLoop, SimTask
from rackloom.lab.virtual.process import CrashPoints, Process, T, current_process


def _task_name(task: "asyncio.Task[Any]") -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_name()))


class ProcessTasks:
    """The tasks of all processes, and of their tasks. `make` is a task factory of the event loop."""

    def __init__(self) -> None:
        self._of: dict[Process, set[asyncio.Task[Any]]] = {}

    def make(
        self,
        loop: SimLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        context: contextvars.Context | None = None,
    ) -> "asyncio.Task[T]":
        """A task of the process that creates it."""
        task = SimTask(work, loop=loop, context=context)
        life = current_process()
        if life is not None:
            mine = self._of.setdefault(life, set())
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    def of_the_dead(self) -> Iterator[str]:
        """The tasks that ended processes still run, by name."""
        for life, tasks in self._of.items():
            if not life.is_alive:
                for task in tasks:
                    yield f"{life.name} has ended, and {_task_name(task)} goes on"


@contextmanager
def files_as_crash_points(steps: CrashPoints) -> Iterator[None]:
    """Take a step wherever a process makes something durable, instead of the sync."""

    def synced(_handle: int) -> None:
        life = current_process()
        if life is not None:
            steps.take_as(life)

    with patch.object(os, "fsync", synced):
        yield
