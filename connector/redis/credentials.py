"""Passwords from files and the environment.

A password never stands in a command line (``--l2-adapter`` is one), a log, a ``repr`` or an error message. It
is read when a connection is made, so that a rotated secret is used from the next connection on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

MAX_SECRET_BYTES = 64 * 1024


class MissingSecret(ValueError):
    """A password cannot be read; the message names the file or the variable."""


class Secret:
    """Text that is not shown."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not pickled")


@dataclass(frozen=True, slots=True)
class PasswordSource:
    """Where a password comes from: a file, else an environment variable, else a URL of the environment.

    Attributes:
        file: its content, without the newline at its end.
        variable: name of the environment variable.
        literal: a password that came with a URL.
    """

    file: Path | None = None
    variable: str | None = None
    literal: Secret | None = field(default=None, repr=False)

    def read(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The password now, or None if there is none.

        Raises:
            MissingSecret: the file or the variable that was named is not there.
        """
        if self.file is not None:
            try:
                with self.file.open("rb") as opened:
                    data = opened.read(MAX_SECRET_BYTES + 1)
            except OSError as error:
                raise MissingSecret(f"password_file: {self.file} cannot be read: {error.strerror}") from None
            if len(data) > MAX_SECRET_BYTES:
                raise MissingSecret(f"password_file: {self.file} is no password, too long")
            try:
                return data.decode().removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                raise MissingSecret(f"password_file: {self.file} is not UTF-8") from None
        if self.variable is not None:
            if self.variable not in environ:
                raise MissingSecret(f"password_env: the environment has no variable {self.variable}")
            return environ[self.variable]
        return None if self.literal is None else self.literal.reveal()


class Credentials(CredentialProvider):
    """User and password for redis-py, read anew for each connection."""

    def __init__(self, username: str | None, password: PasswordSource) -> None:
        self._username = username
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Arguments of AUTH.

        Raises:
            AuthenticationError: the password cannot be read. (redis-py closes the connection for its own
                errors
                only; after any other it would keep one that is open and not authenticated.)
        """
        try:
            password = self._password.read() or ""
        except MissingSecret as error:
            raise AuthenticationError(str(error)) from None
        return (self._username, password) if self._username else (password,)

    def __repr__(self) -> str:
        return f"Credentials(username={self._username!r})"
