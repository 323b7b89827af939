"""Errors of the gateway's own, in the shape OpenAI's clients understand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType


class ApiError(Exception):
    """Ends a request with an error answer.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type``.
        code: names the reason, for programs and for metrics.
        message: for people; never holds what the client sent.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers

    @property
    def kind(self) -> str:
        known = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return known.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """The answer's JSON."""
        said = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": said}).encode()

    def event(self) -> bytes:
        """The same in a stream that had begun."""
        return b"data: " + self.body() + b"\n\n"


class ClientGone(Exception):
    """The client hung up; nobody is left to answer."""
