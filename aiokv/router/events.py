"""Server-sent events, cut where one ends: what goes on to a client is never half of one."""

from __future__ import annotations

__all__ = ["Events"]

#: Bytes of one event, at most.
_MOST = 1 << 20
_ERROR = (b'data: {"error"', b'data:{"error"')


class Events:
    """Takes a stream's bytes as they come, gives back whole events.

    Attributes:
        told: There was an event with data; the others are comments.
        ended: The stream said that it is over, by ``[DONE]`` or an error.
        failed: By an error.
    """

    def __init__(self) -> None:
        self._kept = b""
        self.told = False
        self.ended = False
        self.failed = False

    def feed(self, data: bytes) -> bytes:
        """All that is whole by now; empty where nothing is.

        Raises:
            ValueError: An event has no end.
        """
        if self._kept:
            data = self._kept + data
        end = data.rfind(b"\n\n") + 2
        if end == 1:
            end = data.rfind(b"\r\n\r\n") + 4
            if end == 3:
                end = 0
        self._kept = data[end:]
        if len(self._kept) > _MOST:
            raise ValueError(f"an event of more than {_MOST} bytes")
        piece = data[:end]
        if piece:
            self._look(piece)
        return piece

    def _look(self, piece: bytes) -> None:
        if not self.told:
            self.told = piece.startswith(b"data:") or b"\ndata:" in piece
        last = piece[max(0, piece.rstrip().rfind(b"\n") + 1) :].strip()
        if last in (b"data: [DONE]", b"data:[DONE]"):
            self.ended = True
        if piece.startswith(_ERROR) or last.startswith(_ERROR):
            self.ended = self.failed = True
