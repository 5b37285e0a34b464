"""Streams for asyncio: the tokens of a request, awaited by whoever asked for it, while a thread steps the engine.

The thread lives while there is anything to do. After each step it hands the new tokens over to the event loops, one
call for each loop; a reader takes them from its mailbox whenever it likes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .requests import Token

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(eq=False)
class Mailbox:
    """What has come for one reader. Only its event loop's thread touches the fields below `left`.

    left: samples whose last token is still to come.
    """

    number: int
    loop: asyncio.AbstractEventLoop
    left: int
    tokens: deque[Token] = field(default_factory=deque)
    error: BaseException | None = None
    waiter: asyncio.Future[None] | None = None

    def put(self, what: Token | BaseException | None) -> None:
        """A token, what ended the request instead of one, or None if it ended quietly."""
        if isinstance(what, Token):
            self.tokens.append(what)
            self.left -= what.finish_reason is not None
        else:
            self.error, self.left = what, 0
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def more(self) -> None:
        """Until something comes."""
        self.waiter = self.loop.create_future()
        await self.waiter


Mail = list[tuple[Mailbox, "Token | BaseException | None"]]


def _deliver(mail: Mail) -> None:
    for mailbox, what in mail:
        mailbox.put(what)


class Streams:
    """The streams of one engine that are read. It does not hold the engine, whose memory is free with its last user."""

    def __init__(self) -> None:
        self._open: dict[int, Mailbox] = {}  # by the number of the request
        self._left: deque[int] = deque()  # requests that nobody reads any more
        self._thread: threading.Thread | None = None

    async def stream(self, engine: Engine, tokens: Any, options: dict[str, Any]) -> AsyncIterator[Token]:
        request = engine._make_request(tokens, **options)
        mailbox = Mailbox(-1, asyncio.get_running_loop(), len(request.samples))
        with engine._door:
            number = mailbox.number = engine._enter(request)
            self._open[number] = mailbox
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(engine,), name="tilewise-engine")
                self._thread.start()
        try:
            while mailbox.tokens or mailbox.left:
                if mailbox.tokens:
                    yield mailbox.tokens.popleft()
                else:
                    await mailbox.more()
            if mailbox.error is not None:
                raise mailbox.error
        finally:
            self._open.pop(number, None)
            self._left.append(number)  # the next step, if it is not done yet, cancels it
            if not request.left:
                engine._requests.pop(number, None)

    def _run(self, engine: Engine) -> None:
        """Step while there is anything to do."""
        try:
            while True:
                with engine._turn(), engine._door:  # nobody else is in the midst of a step, or on the way in
                    if not engine.busy:
                        self._thread = None
                        return
                with suppress(Exception):  # of which those who wait for tokens have been told
                    engine.step()
        except BaseException:  # the interpreter ends
            self._thread = None
            raise

    # Within a step, by whoever takes it.

    def forget_left(self) -> Iterable[int]:
        """The requests whose readers have gone since the last step."""
        while self._left:
            yield self._left.popleft()

    def tell(self, found: Iterable[Token]) -> None:
        """New tokens go to their readers."""
        if self._open:
            self._post([(mailbox, token) for token in found if (mailbox := self._open.get(token.request))])

    def ended(self, number: int, error: BaseException | None = None) -> None:
        """A request has ended without another token."""
        mailbox = self._open.get(number)
        if mailbox is not None:
            self._post([(mailbox, error)])

    def fail(self, error: BaseException) -> None:
        """All requests have ended with an error."""
        self._post([(mailbox, error) for mailbox in list(self._open.values())])

    def _post(self, mail: Mail) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, Mail] = {}
        for one in mail:
            by_loop.setdefault(one[0].loop, []).append(one)
        for loop, its_mail in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, its_mail)
            except RuntimeError:  # the loop is closed, nobody can read any more
                for mailbox, _ in its_mail:
                    if self._open.pop(mailbox.number, None) is not None:
                        self._left.append(mailbox.number)
