"""A generator that runs ahead in a thread of its own, so that reading goes on while its consumer computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")

_POLL_SECONDS = 0.1


def ahead(items: Iterable[Item], size: int) -> Generator[Item, None, None]:
    """The same items, of which up to `size` (at least 1) are made before they are asked for.

    An exception comes out where its item would have. Closing the iterator, or leaving it, ends the thread after the item it is
    at. `items` is used, and closed if it is a generator, in the thread alone.
    """
    ready: queue.Queue[tuple[bool, Item | BaseException | None]] = queue.Queue(size)
    stopped = threading.Event()

    def put(more: bool, value: Item | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put((more, value), timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(True, item):
                    return
        except BaseException as error:
            put(False, error)
        else:
            put(False, None)
        finally:
            if isinstance(items, Generator):
                items.close()

    thread = threading.Thread(target=work, name="draftloom-ahead", daemon=True)
    thread.start()
    try:
        while True:
            more, value = ready.get()
            if more:
                yield value  # type: ignore[misc]  # an item, by `more`
            elif value is None:
                return
            else:
                raise value  # type: ignore[misc]  # an exception, by `more`
    finally:
        stopped.set()
        thread.join()
