"""When the files of `--kv-experiment-state` are read and written, and whether that succeeded."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from kvpolicy.experiments.replica import state_file
from kvpolicy.experiments.replica.state_file import StateFileError
from kvpolicy.sglang_ext.face.errors import Refused

logger = logging.getLogger(__name__)

EVERY = 30.0  # seconds between two writes of running time or evidence


class Keeper:
    """Keeps where an experiment stands, and what was seen of it; without a file, nothing.

    Attributes:
        file: the state file; None for none.
    """

    def __init__(self, file: Path | None) -> None:
        """
        Raises:
            Refused: another server has the file.
        """
        self.file = file
        self._claim = self._claimed()  # held as long as the process runs
        self._unsaved: set[Path] = set()  # files that could not be written
        self._changes = 0  # number of changes of where it stands, those by time left out
        self._standing_at = (0.0, 0)  # seconds it had run, and its step, when last written
        self._writing = threading.Lock()
        # Time of the last write of evidence, and the sum of the counts in it.
        self._evidence_at = (-math.inf, 0)
        if file is None:
            logger.warning(
                "--kv-experiment-state is not given: a restart forgets that an arm was rolled "
                "back or the experiment was aborted, and what was seen."
            )

    def _claimed(self) -> IO[str] | None:
        try:
            return None if self.file is None else state_file.claim(self.file)
        except StateFileError as error:
            raise Refused(
                f"--kv-experiment-state {self.file}: {error}; give each server a file of its own"
            ) from None

    @property
    def up_to_date(self) -> bool:
        """Whether the latest state, and evidence when it was last due, could be written."""
        return self.file is not None and not self._unsaved

    def standing(self) -> dict[str, Any] | None:
        """Where it stood before a restart; None if that is not known.

        Raises:
            StateFileError: the file cannot be read, or holds something else.
        """
        return None if self.file is None else state_file.load(self.file)

    @property
    def evidence_file(self) -> Path | None:
        """The file with what was seen; None for none."""
        return None if self.file is None else state_file.evidence_file(self.file)

    def keep(self, saved: Mapping[str, Any], seconds: float, step: int) -> None:
        """Write where it stands after a change; evidence follows soon.

        Args:
            seconds, step: how long it has run, and steps taken.
        """
        if self.file is None:
            return
        self._evidence_at = (-math.inf, self._evidence_at[1])
        self._changes += 1
        self._standing_at = (seconds, step)
        try:
            self._write(self.file, saved, self._changes)
        except StateFileError as error:
            self._failed(self.file, error)
        else:
            self._unsaved.discard(self.file)

    def _write(self, file: Path, saved: Mapping[str, Any], changes: int) -> None:
        """Write where it stood after `changes` changes, unless there is a later one."""
        with self._writing:
            if changes == self._changes:
                state_file.save(file, saved)

    async def keep_time(
        self, saved: Callable[[], Mapping[str, Any]], seconds: float, step: int
    ) -> None:
        """Write how long it has run, every `EVERY` seconds and after each step.

        What could not be written is tried again.
        """
        written_seconds, written_step = self._standing_at
        if self.file is None or (
            seconds < written_seconds + EVERY
            and step == written_step
            and self.file not in self._unsaved
        ):
            return
        self._standing_at = (seconds, step)
        try:
            await asyncio.to_thread(self._write, self.file, saved(), self._changes)
        except StateFileError as error:
            self._failed(self.file, error)
        else:
            self._unsaved.discard(self.file)

    async def keep_evidence(self, saved: Callable[[], Mapping[str, Any]], count: int) -> None:
        """Write what was seen, if it is time to and there is something new.

        Args:
            count: number of requests at their stages, which grows with what was seen.
        """
        now, file = time.monotonic(), self.evidence_file
        written_at, written_count = self._evidence_at
        if file is None or now < written_at + EVERY or count == written_count:
            return
        self._evidence_at = (now, count)
        try:
            await asyncio.to_thread(state_file.save, file, saved())
        except StateFileError as error:
            self._evidence_at = (now, -1)
            self._failed(file, error)
        else:
            self._unsaved.discard(file)

    def _failed(self, file: Path, error: StateFileError) -> None:
        """Log once that a file cannot be written; nothing else stops."""
        if file not in self._unsaved:
            self._unsaved.add(file)
            logger.error(
                "--kv-experiment-state: %s: %s. The experiment goes on; a restart would forget "
                "what has changed since.",
                file,
                error,
            )
