"""Coroutines that run on a loop of their own while the calling thread does other work."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


class BackgroundTasks:
    """Context manager: coroutines given to `add` run concurrently on a second thread.

    Leaving the block waits for all of them and raises the first failure, in the order of adding, after the others
    were cancelled. Leaving it by an exception cancels them all. No thread is started when nothing is added. It also
    works on a thread that runs an event loop, which it then blocks.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._futures: list[concurrent.futures.Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def add(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start `coroutine` now."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="reward-coroutines", daemon=True)
            self._thread.start()
        self._futures.append(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None and self._futures:
                done, _ = concurrent.futures.wait(self._futures, return_when=concurrent.futures.FIRST_EXCEPTION)
                for future in self._futures:
                    if future in done:
                        future.result()
        finally:
            self._stop()

    def _stop(self) -> None:
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
