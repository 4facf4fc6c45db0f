"""Scheduled jobs: compaction at intervals, in a separate process.

The job is the ordinary command `millstream pipeline compact` with this server's own address. One job runs at a time. It
ends with the server, and is stopped after `LONGEST_SECONDS`. In a cluster only one node runs jobs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Final

from millstream.config import PipelineSection
from millstream.tasks import Supervisor, end
from millstream.tiers.objects import CREDENTIAL_VARIABLES, ObjectStoreSettings

logger = logging.getLogger("millstream.scheduled_jobs")

LONGEST_SECONDS: Final = 6 * 3600.0
STOP_SECONDS: Final = 2.0
OUTPUT_BYTES_MAX: Final = 64 << 10


class ScheduledJobs:
    """`is_ours` returns whether this node currently starts the jobs."""

    def __init__(
        self,
        url: str,
        pipeline: PipelineSection,
        store: ObjectStoreSettings,
        supervisor: Supervisor,
        *,
        is_ours: Callable[[], bool],
    ) -> None:
        self._every_seconds = pipeline.compact_every
        self._is_ours = is_ours
        self._supervisor = supervisor
        self._command = [
            sys.executable, "-m", "millstream.pipeline", "compact", "--json", "--url", url, "--master", pipeline.master
        ]  # fmt: skip
        self._environment = dict(os.environ)
        for name, variable in CREDENTIAL_VARIABLES.get(store.backend, {}).items():
            if store.options.get(name):
                self._environment[variable] = store.options[name]
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._every_seconds > 0:
            self._task = self._supervisor.start("scheduled jobs", self._run_forever)

    async def stop(self) -> None:
        await end(self._task)
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def _run_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_seconds)
            if not self._is_ours():
                continue
            try:
                await self._compact()
            except OSError as error:
                logger.warning("compaction could not be started: %s", error)

    async def _compact(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdout=pipe, stderr=pipe, env=self._environment, start_new_session=True
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), LONGEST_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            logger.warning("compaction took longer than %.0f hours and was stopped", LONGEST_SECONDS / 3600)
            return
        if process.returncode == 0:
            summary = json.loads(output[-OUTPUT_BYTES_MAX:])
            if summary["groups"]:
                logger.info("compacted %(segments_before)d segments into %(segments_after)d", summary)
        else:
            lines = errors[-OUTPUT_BYTES_MAX:].decode(errors="replace").strip().splitlines()
            logger.warning("compaction failed: %s", " ".join(lines[-2:]))
