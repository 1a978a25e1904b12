"""A request on its way: its texts are lined up, and their events become one answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from edgespec.decoding.settings import Grammar, Settings
from edgespec.engine.engine import Engine
from edgespec.engine.request import Request as TextRequest
from edgespec.engine.transcript import Segment, Transcript
from edgespec.runtimes.files.speech import Task
from edgespec.runtimes.text.call_syntax import Event as Piece
from edgespec.server import audio, pictures
from edgespec.server.answers import Choice, Part
from edgespec.server.apis import APIS, Kind
from edgespec.server.audio import AudioRequest
from edgespec.server.call import in_pieces
from edgespec.server.drafts import Drafts
from edgespec.server.errors import ClientDisconnected, Stopped, failure
from edgespec.server.metrics import Metrics
from edgespec.server.queues import FairWorkQueue, refuse
from edgespec.server.reading import ParsedRequest
from edgespec.server.responses import ResponseWriter
from edgespec.server.scheduler import Event, Limits, PendingRequest, Scheduler
from edgespec.server.stored import Stored
from edgespec.server.waiting import cancel_on_disconnect
from edgespec.server.writer import Writer, sse

Found = TypeVar("Found")


@dataclass
class Job:
    """The pending texts of a request, and their events."""

    writer: Writer
    tickets: list[PendingRequest]
    events: asyncio.Queue[tuple[int, Event]]
    owner: str

    def cancel(self) -> None:
        """Cancel all texts of the request, since its client has disconnected."""
        for ticket in self.tickets:
            ticket.cancel()


class Jobs:
    """Requests to an engine.

    Args:
        engine: that answers.
        name: of the model.
        limits: of the server.
        stored: keeps responses.
        metrics: count.
        make_room: see ``Scheduler``.
        shared: whether one client's cached prefixes may speed up another client's texts.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        limits: Limits,
        stored: Stored,
        metrics: Metrics,
        make_room: Callable[[], None],
        shared: bool = False,
    ) -> None:
        self.engine, self.name, self.shared = engine, name, shared
        self.stored, self.metrics = stored, metrics
        self.scheduler = Scheduler(engine, limits, make_room)
        seconds = limits.seconds
        self.transcriber = FairWorkQueue("recordings", seconds, audio.MOST_WAITING, audio.MOST_OF_ONE)
        self.viewer = FairWorkQueue(
            "requests with pictures to be read", seconds, pictures.MOST_WAITING, pictures.MOST_OF_ONE
        )
        self._queues: dict[str, FairWorkQueue] = {}
        self._compiling = ThreadPoolExecutor(1, "edgespec-grammars")

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        queues = (self.transcriber, self.viewer, *self._queues.values())
        return self.scheduler.busy or any(queue.busy for queue in queues)

    def queue(self, what: str, most: int, most_of_one: int) -> FairWorkQueue:
        """Return the queue of an API's jobs, which run one at a time; the first call creates it.

        Args:
            what: description of the jobs for messages, such as ``recordings``.
            most: maximum number of waiting jobs.
            most_of_one: maximum number of waiting jobs of one client.
        """
        if what not in self._queues:
            self._queues[what] = FairWorkQueue(what, self.scheduler.limits.seconds, most, most_of_one)
        return self._queues[what]

    def stop(self, grace: float | None = None) -> None:
        """Accept no more requests, and end those that wait; see ``Scheduler.stop``."""
        self.scheduler.stop(grace)
        for queue in (self.transcriber, self.viewer, *self._queues.values()):
            queue.stop()
        if (work := self.transcriber.doing) is not None:  # it may run for minutes
            work.cancel.set()
            refuse([work.done], Stopped("the server was stopped", "ask again in a moment"))

    def close(self) -> None:
        """End the decoding thread, and all that is left of requests."""
        self.scheduler.close()
        self._compiling.shutdown(cancel_futures=True)

    async def start(self, kind: Kind, read: ParsedRequest, client: str, owner: str = "") -> Job:
        """Queue all texts of a request, or none if one cannot be queued.

        Args:
            kind: of the request.
            read: the parsed request.
            client: who sent it.
            owner: of the answer, if it is stored.

        Raises:
            Busy: the queue is full.
            Stopped: the server stops.
            InvalidRequest: a method that the bundle does not have.
        """
        self.engine.choose_for(read.settings)
        self.engine.adapter_number(read.settings.adapter)
        if (grammar := read.settings.grammar) is not None:  # readers have checked that it compiles within limits
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._compiling, self._require, grammar, read.large)
        prompts: Sequence[Sequence[int]] = read.prompts
        if read.pictures:
            look = pictures.placed(self.engine, read.prompts[0], list(read.pictures), self._owner(client))
            prompts = await self.viewer.results(client, [look])
            read.pictures.clear()  # they are rows now, and large
        pairs = [(prompt, settings) for prompt in prompts for settings in read.each()]
        codec = self.engine.codec
        choices = [
            Choice(index, read.shape, Drafts(codec) if read.drafts else None, read.single, codec)
            for index in range(len(pairs))
        ]
        api = APIS[kind]
        assert api.writer is not None
        writer = api.writer(
            f"{api.prefix}{secrets.token_hex(12)}",
            self.name if read.settings.adapter is None else f"{self.name}:{read.settings.adapter}",
            sum(map(len, read.prompts)),
            choices,
            read.settings.logprobs,
            read.usage,
            read.echo,
        )
        job = Job(writer, [], asyncio.Queue(), owner)
        for index, (prompt, settings) in enumerate(pairs):

            def put(event: Event, index: int = index) -> None:
                job.events.put_nowait((index, event))

            try:
                job.tickets.append(self.submit(prompt, settings, put, client, writer.id))
            except BaseException:
                job.cancel()
                raise
        return job

    def _require(self, grammar: Grammar, large: bool) -> None:
        if large:
            self.engine.guidance.mark_large(grammar)
        else:
            self.engine.guidance.require(grammar)

    def submit(
        self, prompt: Sequence[int], settings: Settings, put: Callable[[Event], None], client: str, request: str
    ) -> PendingRequest:
        """Line up a text; the event loop calls ``put`` with its events."""
        loop = asyncio.get_running_loop()

        def sink(event: Event) -> None:
            if event.chunk is None:
                self.metrics.ended(self.name, event)
            with suppress(RuntimeError):  # the event loop has ended, so no client is waiting
                loop.call_soon_threadsafe(put, event)

        made = TextRequest(self.engine, prompt, settings, owner=self._owner(client))
        return self.scheduler.submit(PendingRequest(made, sink, client, request))

    def _owner(self, client: str) -> str | None:
        """Whose what is computed is: of one client, or of all."""
        return None if self.shared else client

    async def wait(self, request: Request, work: Coroutine[Any, Any, Found]) -> Found:
        """Wait for work of a request, which a client that leaves cancels; texts are counted where they end.

        Raises:
            ClientDisconnected: the client has left.
        """
        try:
            return await cancel_on_disconnect(request, work)
        except ClientDisconnected:
            self.metrics.refused(self.name, "cancelled")
            raise

    async def whole(self, job: Job, request: Request) -> Response:
        """Answer in one piece."""

        async def gather() -> None:
            async for _ in self._events(job):
                pass

        try:
            await cancel_on_disconnect(request, gather())
        finally:
            job.cancel()
        self._keep(job)
        return await in_pieces(job.writer.whole())

    async def transcribe(
        self, client: str, sound: bytes, asked: AudioRequest, task: Task, request: Request
    ) -> Response:
        """Answer with a transcript, as a stream of its segments or in one piece."""
        make = partial(audio.run_of, self.engine, sound, asked, task)
        if asked.stream:
            running = audio.as_it_comes(self.transcriber, client, make)
            return StreamingResponse(self._heard(running), media_type="text/event-stream")
        (found,) = await self.wait(request, self.transcriber.results(client, [make()]))
        self.metrics.transcribed(self.name, found.how)
        text, kind = audio.written(found, asked.response_format)
        return Response(text.encode("utf-8", "replace"), media_type=kind)

    async def _heard(self, running: AsyncIterator[Segment | Transcript]) -> AsyncIterator[bytes]:
        try:
            async for found in running:
                if isinstance(found, Transcript):
                    self.metrics.transcribed(self.name, found.how)
                for event in audio.events(found):
                    yield event
        except Exception as error:
            yield sse(failure(error).body())

    async def stream(self, job: Job) -> AsyncIterator[bytes]:
        """Answer by server-sent events; whatever happens, the stream ends as the API says."""
        writer = job.writer
        for event in writer.opening():
            yield event
        try:
            async for choice, found, said in self._events(job):
                for event in writer.piece(choice, found, said.chunk):
                    yield event
            self._keep(job)
            for event in writer.closing():
                yield event
        except Exception as error:
            for event in writer.failed(failure(error)):
                yield event

    def _keep(self, job: Job) -> None:
        """Store a response that is to be stored."""
        writer = job.writer
        if isinstance(writer, ResponseWriter) and (stored := writer.stored()) is not None:
            self.stored.put(job.owner, writer.id, *stored)

    async def _events(self, job: Job) -> AsyncIterator[tuple[Choice, Sequence[tuple[Piece, Part]], Event]]:
        """Yield the events of a job until every text has ended; an error of one ends all.  Leaving cancels it."""
        left = len(job.tickets)
        try:
            while left:
                index, event = await job.events.get()
                if event.error is not None:
                    raise event.error
                choice = job.writer.choices[index]
                found = choice.add(event)
                if choice.enough:
                    job.tickets[index].cancel()
                left -= event.result is not None
                yield choice, found, event
                await asyncio.sleep(0)  # many events may wait already: others are to be answered between them
        finally:
            job.cancel()
