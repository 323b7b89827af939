"""Large values over one redis-py connection, without needless copies.

redis-py connects, authenticates and speaks for all small commands. It would copy a value of 8 MiB two
times on its way out and four times on its way in, so values go over the same connection's socket
directly: out with one gathering send of header and payload, in with one receive straight into the block's
memory. Socket time-outs of the kernel bound each wait; the deadline bounds the whole.

The socket is `Connection._sock`, the one private name of redis-py used here; tests/redis/test_contract.py
pins it.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

# Replies of SET and the heads of GET's replies are short; more than this would only be copied twice.
_BUFFER_BYTES = 4096
_SKIP_BYTES = 1 << 16
# Skipping more than this to save a connection is not worth its time.
_MOST_SKIPPED = 64 << 20
# Bytes of small values that leave in one send.
_BATCH_BYTES = 1 << 19
# Linux takes 1024 buffers in one gathering send.
_MOST_BUFFERS = 768

Buffer = bytes | memoryview


class TaskTimeout(RedisTimeoutError):
    """The task's own time is up, which says nothing about the node."""


class Deadline:
    """A point in time that a whole task must not pass."""

    __slots__ = ("_end",)

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative once it has passed."""
        return self._end - time.monotonic()

    @property
    def is_past(self) -> bool:
        return self.left <= 0

    def check(self) -> None:
        """Raises TaskTimeout once it has passed."""
        if self.left <= 0:
            raise TaskTimeout("the task's time is up")


class Bulk:
    """One value on its way in."""

    __slots__ = ("_wire", "left")

    def __init__(self, wire: Wire, length: int) -> None:
        self._wire = wire
        self.left = length
        """Bytes not read yet."""

    def read(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the value's end. For small counts."""
        count = min(count, self.left)
        self.left -= count
        return self._wire.take(count)

    def into(self, view: memoryview) -> None:
        """Fill `view`, which must not be longer than what is left."""
        self.left -= len(view)
        self._wire.receive(view, with_end=not self.left)

    def skip(self) -> None:
        """Drop the rest, so that the connection can go on with the next reply."""
        if self.left > _MOST_SKIPPED:
            raise RedisConnectionError("a value is too long to skip; the connection starts anew")
        if self.left:
            scratch = memoryview(bytearray(min(self.left, _SKIP_BYTES)))
            while self.left:
                self.into(scratch[: min(self.left, len(scratch))])


class Wire:
    """A borrowed connection. Any exception leaves it in an unknown state; the lender closes it then.

    Args:
        connection: redis-py connection, connected, with nothing to be read.
        deadline: of the task.
        stall_s: longest wait without a single byte.
        window: bytes under way before the first answer is waited for.
    """

    def __init__(self, connection: Any, deadline: Deadline, stall_s: float, window: int) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._deadline = deadline
        self._stall_s = stall_s
        self._window = window
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._memory = memoryview(self._buffer)
        self._start = 0
        self._stop = 0

    # -- small commands ------------------------------------------------------------------------

    def call(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send all commands, then read all replies; an error reply comes as the exception it would be."""
        self._deadline.check()
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            self._deadline.check()
            try:
                replies.append(connection.read_response())
            except ResponseError as error:
                replies.append(error)
        return replies

    # -- values --------------------------------------------------------------------------------

    def put(self, commands: Iterable[tuple[Buffer, memoryview, Buffer]], replies: list[bytes]) -> None:
        """Send commands that end in one-line replies.

        Args:
            commands: what goes before each payload, the payload, what goes after it. Taken one by one while
                earlier ones are under way, so that the caller can prepare the next meanwhile.
            replies: gets the line of each reply, in order, as they arrive: also of those before an exception.
        """
        self._begin()
        under_way: deque[int] = deque()
        batch: list[Buffer] = []
        size = total = unsent = 0
        for before, payload, after in commands:
            batch += (before, payload, after)
            under_way.append(len(payload))
            total += len(payload)
            size += len(payload)
            unsent += 1
            if size >= _BATCH_BYTES or len(batch) >= _MOST_BUFFERS:
                self._send(batch)
                batch, size, unsent = [], 0, 0
            while total > self._window and len(under_way) > unsent:
                replies.append(self._line())
                total -= under_way.popleft()
        if batch:
            self._send(batch)
        for _ in under_way:
            replies.append(self._line())
        self._end()

    def fetch(
        self,
        commands: Sequence[bytes],
        sizes: Sequence[int],
        take: Callable[[int, Bulk | bytes | None], Callable[[], None] | None],
    ) -> None:
        """Send commands that end in a value each.

        Args:
            commands: packed.
            sizes: expected length of each value.
            take: called with the index and the value, None if there is none, or the line of an error
                reply. It need not read the value to its end. What it returns is called when the next
                command is under way: work on the value while Redis works on the next.
        """
        self._begin()
        count = len(commands)
        sent = under_way = 0
        finish: Callable[[], None] | None = None
        for index in range(count):
            # Small ones in groups. Large ones one at a time: several under way on several connections keep
            # Redis busy, and more only push each other's memory out of its caches.
            try:
                if sent < count and 2 * under_way <= self._window:
                    first = sent
                    while sent < count and (under_way < self._window or sent == index):
                        under_way += sizes[sent]
                        sent += 1
                    self._send([b"".join(commands[first:sent])])
            finally:
                if finish is not None:
                    finish()
                    finish = None
            line = self._line()
            under_way -= sizes[index]
            if line[:1] == b"$":
                length = _number(line[1:])
                if length < 0:
                    take(index, None)
                    continue
                bulk = Bulk(self, length)
                finish = take(index, bulk)
                bulk.skip()
                if self._line():
                    raise InvalidResponse("expected the end of a value")
            elif line[:1] == b"-":
                take(index, line)
            else:
                raise InvalidResponse("expected a value")
        if finish is not None:
            finish()
        self._end()

    def take(self, count: int) -> bytes:
        """The next `count` bytes, at most those of a header."""
        if count > _BUFFER_BYTES:
            raise InvalidResponse(f"a header of {count} bytes is too long")
        while self._stop - self._start < count:
            self._fill()
        start = self._start
        self._start += count
        return bytes(self._memory[start : self._start])

    def receive(self, view: memoryview, with_end: bool = False) -> None:
        """Fill `view` from the connection.

        Args:
            view: where to.
            with_end: the two bytes after a value follow; they are fetched along.
        """
        ready = min(len(view), self._stop - self._start)
        if ready:
            view[:ready] = self._memory[self._start : self._start + ready]
            self._start += ready
        while ready < len(view):
            if with_end and not self._is_tls:
                # The buffer is empty here, or the view would have got more from it.
                got = self._receive_into([view[ready:], self._memory[:2]])
                self._start, self._stop = 0, max(0, got - (len(view) - ready))
            else:
                got = self._receive_into([view[ready:]])
            ready += got

    # -- socket --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let the kernel wait for whole values instead of polling for each piece (TLS cannot)."""
        self._deadline.check()
        self._start = self._stop = 0
        if self._is_tls:
            return
        wait = struct.pack("ll", int(self._stall_s), int(self._stall_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self._socket.settimeout(None)

    def _end(self) -> None:
        """Hand the socket back as redis-py left it."""
        if self._start != self._stop:
            raise InvalidResponse("more came than was asked for")
        if not self._is_tls:
            self._socket.settimeout(self._stall_s)

    def _send(self, buffers: list[Buffer]) -> None:
        if self._is_tls:
            self._send_tls(buffers)
            return
        left = sum(len(buffer) for buffer in buffers)
        while True:
            self._deadline.check()
            try:
                sent = self._socket.sendmsg(buffers)
            except (TimeoutError, BlockingIOError):
                raise RedisTimeoutError("Redis takes no bytes") from None
            except OSError as error:
                raise RedisConnectionError(f"the connection broke while sending: {error.strerror}") from None
            left -= sent
            if not left:
                return
            buffers = _after(buffers, sent)

    def _send_tls(self, buffers: list[Buffer]) -> None:
        # One record for what is small: header, end of the value before.
        small: list[Buffer] = []
        try:
            for buffer in buffers:
                if len(buffer) < _BUFFER_BYTES:
                    small.append(buffer)
                    continue
                if small:
                    self._socket.sendall(b"".join(small))
                    small = []
                self._deadline.check()
                self._socket.sendall(buffer)
            if small:
                self._socket.sendall(b"".join(small))
        except TimeoutError:
            raise RedisTimeoutError("Redis takes no bytes") from None
        except OSError as error:
            raise RedisConnectionError(f"the connection broke while sending: {error.strerror}") from None

    def _receive_into(self, views: list[memoryview], whole: bool = True) -> int:
        self._deadline.check()
        try:
            if self._is_tls:
                got = self._socket.recv_into(views[0])
            else:
                got = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL if whole else 0)[0]
        except (TimeoutError, BlockingIOError):
            raise RedisTimeoutError("Redis sends no bytes") from None
        except OSError as error:
            raise RedisConnectionError(f"the connection broke while receiving: {error.strerror}") from None
        if not got:
            raise RedisConnectionError("Redis closed the connection")
        return got

    def _line(self) -> bytes:
        """The next line, without its end."""
        while True:
            found = self._buffer.find(b"\r\n", self._start, self._stop)
            if found >= 0:
                line = bytes(self._memory[self._start : found])
                self._start = found + 2
                return line
            self._fill()

    def _fill(self) -> None:
        """Get more into the buffer."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start:
            kept = self._stop - self._start
            self._buffer[:kept] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, kept
        elif self._stop == _BUFFER_BYTES:
            raise InvalidResponse("a reply's first line is too long")
        self._stop += self._receive_into([self._memory[self._stop :]], whole=False)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidResponse("expected a length") from None


def _after(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """What is left of `buffers` once `sent` bytes are gone."""
    rest: list[Buffer] = []
    for buffer in buffers:
        if sent >= len(buffer):
            sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[sent:])
            sent = 0
    return rest


def pack(*arguments: bytes) -> bytes:
    """A small command in Redis' protocol."""
    parts = [b"*%d\r\n" % len(arguments)]
    parts += (b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments)
    return b"".join(parts)
