"""The process that accepts connections: it answers /health, and hands all others over to the server in fair turns.

A server under attack takes hundreds of connections at once, each of which costs its event loop about a millisecond.
Here each costs some microseconds.  So a request for /health waits for no other client, and clients whose connections
wait for the server take turns.  A request for /health is answered here only if it is a plain one, and if the server's
event loop was alive a moment ago.  Everything else is the server's to answer or refuse.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from edgespec.server.hosts import client_of, known, names_of
from edgespec.server.requestlog import LogWriter, line

POSSIBLE = hasattr(socket, "send_fds") and sys.platform != "win32"
HEAD = 1 << 13  # bytes of a request for /health, with its headers
HOLD = 0.05  # seconds to wait for a client's request line, before its connection is handed over in any case
# seconds between two heartbeats of the server's event loop; it counts as stuck after STALE seconds without one
BEAT, STALE = 0.1, 2.0
WAITING = 512  # connections that wait to be handed over
AT_ONCE = 64  # connections that are accepted, or taken by the server, before others have a turn
HEALTH = re.compile(rb"GET /health(\?[!-~]*)? HTTP/1\.[01]")
PLAIN = re.compile(rb"(?P<name>[A-Za-z-]+):[ \t]*(?P<value>[ -~]*)")  # a header that is read here
OTHERS = {b"content-length", b"transfer-encoding", b"origin", b"expect", b"upgrade"}  # headers that are not
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
STATE = struct.Struct("<dqq")  # when the loop beat last, by time.monotonic; texts that run, and that wait
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Front:
    """The process, as the server sees it.

    Args:
        listener: that accepts.
        hosts: names of the server, in addition to its addresses.
        log: whether requests are logged on stderr.

    Attributes:
        channel: brings connections; it does not block.
    """

    def __init__(self, listener: socket.socket, hosts: Iterable[str], log: bool) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.channel.setblocking(False)
        theirs.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
        )  # few are under way: the others wait for their turns
        with theirs, tempfile.TemporaryFile() as file:
            file.write(bytes(mmap.PAGESIZE))  # room that the disk has
            file.flush()
            self._state = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            numbers = (listener.fileno(), theirs.fileno(), file.fileno())
            # what stops a service is the server's to answer, and may be sent to all of its processes
            start = "import signal; [signal.signal(one, signal.SIG_IGN) for one in (signal.SIGINT, signal.SIGTERM)]; "
            start += "import sys; sys.path[:] = sys.argv[2:]; from edgespec.server.front import main; main(sys.argv[1])"
            told = json.dumps([*numbers, list(names_of(hosts)), log])
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, told, *sys.path],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def beat(self, running: int, waiting: int) -> None:
        """Say that the server's loop is alive, and how many texts it has."""
        STATE.pack_into(self._state, 0, time.monotonic(), running, waiting)

    def take(self) -> list[socket.socket] | None:
        """Receive connections that were handed over; None = the process has ended, so no more will come."""
        found: list[socket.socket] = []
        with suppress(BlockingIOError):
            while len(found) < AT_ONCE:
                data, numbers, _, _ = socket.recv_fds(self.channel, 1, 1, CLOSE_ON_EXEC)
                if not data:
                    return found or None
                found += [socket.socket(fileno=number) for number in numbers]
        return found

    def close(self) -> None:
        """End the process, and the connections that wait in it."""
        self.channel.close()
        self._process.kill()
        self._process.wait()


class _Acceptor:
    """The process itself.

    Args:
        listener: that accepts.
        channel: takes what is handed over, and ends with the server.
        state: what the server says of itself, as ``STATE``.
        hosts: names of the server, as ``known`` takes them.
        log: takes a line of each request that is answered here.
    """

    def __init__(
        self,
        listener: socket.socket,
        channel: socket.socket,
        state: mmap.mmap,
        hosts: Sequence[str],
        log: Callable[[str], None],
    ) -> None:
        self._listener, self._channel, self._state, self._hosts, self._log = listener, channel, state, hosts, log
        # connections without a request line, the oldest first: accepted at
        self._silent: dict[socket.socket, float] = {}
        self._turns: dict[str, deque[socket.socket]] = {}  # those to be handed over, by client; the first one is next
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(channel, selectors.EVENT_READ)
        self._full = False  # whether the channel is full

    def run(self) -> None:
        """Serve until the server ends."""
        while True:
            first = next(iter(self._silent.values()), None)
            for key, ready in self._selector.select(
                None if first is None else max(0.0, first + HOLD - time.monotonic())
            ):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                elif sock is not self._channel:
                    self._look(sock)
                elif ready & selectors.EVENT_READ:  # the server never writes: this means that it has ended
                    return
            until = time.monotonic() - HOLD
            while self._silent and (oldest := next(iter(self._silent.items())))[1] <= until:
                self._line_up(oldest[0])
            self._hand_over()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in NO_ROOM:
                    for one in list(self._silent)[:AT_ONCE]:
                        self._line_up(one)
                    self._drop()
                return  # else it has gone already
            sock.setblocking(False)
            self._silent[sock] = time.monotonic()
            self._selector.register(sock, selectors.EVENT_READ)
            self._look(sock)

    def _look(self, sock: socket.socket) -> None:
        """Peek at a client's request, leaving it unread for the server."""
        try:
            said = sock.recv(HEAD, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._forget(sock)
            sock.close()
        elif not said.startswith(b"GET /health"[: len(said)]):
            self._line_up(sock)
        elif said.endswith(b"\r\n\r\n"):
            since = self._silent[sock]
            if (answer := self._answer(said)) is None:
                self._line_up(sock)
                return
            self._forget(sock)
            with suppress(OSError):
                client = sock.getpeername()[0]
                sock.recv(len(said))
                sock.send(answer)  # a new connection has room for it
                self._log(line(client, "GET", "/health", 200, "", len(answer.partition(b"\r\n\r\n")[2]), since))
            sock.close()

    def _answer(self, said: bytes) -> bytes | None:
        """Return the answer to a request; None = the server is to answer."""
        first, *headers = said[:-4].split(b"\r\n")
        found = [PLAIN.fullmatch(one) for one in headers]
        names = [one["name"].lower() for one in found if one]
        hosts = [
            one["value"].decode().strip() for one, name in zip(found, names, strict=False) if one and name == b"host"
        ]
        if not HEALTH.fullmatch(first) or None in found or OTHERS.intersection(names):
            return None
        beaten, running, waiting = STATE.unpack_from(self._state)
        if len(hosts) != 1 or not known(hosts[0], self._hosts) or time.monotonic() > beaten + STALE:
            return None
        body = json.dumps({"status": "ok", "running": running, "waiting": waiting}, separators=(",", ":")).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        return head.encode() + b"\r\n\r\n" + body

    def _forget(self, sock: socket.socket) -> None:
        del self._silent[sock]
        self._selector.unregister(sock)

    def _line_up(self, sock: socket.socket) -> None:
        """Let a connection wait for its client's turn; where too many wait, the client with most loses its last."""
        self._forget(sock)
        try:
            client = client_of(sock.getpeername()[0])
        except OSError:  # it has gone
            sock.close()
            return
        self._turns.setdefault(client, deque()).append(sock)
        if sum(map(len, self._turns.values())) > WAITING:
            self._drop()

    def _drop(self) -> None:
        """Close the last connection of the client that has most waiting."""
        if self._turns:
            client, waiting = max(self._turns.items(), key=lambda one: len(one[1]))
            waiting.pop().close()
            if not waiting:
                del self._turns[client]

    def _hand_over(self) -> None:
        while self._turns:
            client, waiting = next(iter(self._turns.items()))
            try:
                socket.send_fds(self._channel, [b"."], [waiting[0].fileno()])
            except BlockingIOError:
                self._wait_for_room(True)
                return
            except OSError:  # the server has ended
                return
            waiting.popleft().close()
            del self._turns[client]
            if waiting:
                self._turns[client] = waiting  # after the others
        self._wait_for_room(False)

    def _wait_for_room(self, full: bool) -> None:
        if full != self._full:
            self._full = full
            self._selector.modify(self._channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if full else 0))


def main(told: str) -> None:
    """Accept connections: what the process does.

    Args:
        told: as JSON, the descriptors of the listening socket, of the channel and of the state, the hosts, and whether
            to log.
    """
    listener, channel, state, hosts, log = json.loads(told)
    accepts, ours = (socket.socket(fileno=number) for number in (listener, channel))
    for one in (accepts, ours):
        one.setblocking(False)
    memory = mmap.mmap(state, mmap.PAGESIZE, access=mmap.ACCESS_READ)
    _Acceptor(accepts, ours, memory, hosts, LogWriter(_log) if log else lambda _: None).run()


def _log(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())
