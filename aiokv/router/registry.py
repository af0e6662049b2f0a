"""Which instances there are: who registered, whom to believe, and whose time is over. Time is an argument.

An instance is a member from its first report on. It is given requests once it was found at the HTTP
address that it names, and until it says BYE or was silent for three of its own intervals. Time is a monotonic
clock's, in nanoseconds; whoever owns the registry sweeps it when ``next_at`` says so, also when nobody
reports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from aiokv.router.messages import VERSION, Report, Role

__all__ = ["INTERVALS", "Answer", "Group", "Member", "Registry", "checked_url"]

#: Reports that may be lost in a row.
INTERVALS = 3
_TOMBSTONES = 1024


@dataclass(eq=False, slots=True)
class Member:
    """One instance, as the router knows it.

    Attributes:
        report: Its last one.
        sender: The key that it came with; empty where there are none.
        joined_at: When the first one came (ns).
        heard_at: When the last one came (ns).
        verified: It was found at its HTTP address.
        suspect: It couldn't be reached; not chosen until it reports and was found again.
        in_flight: Requests of this router's that it has.
        served: Requests that it was given so far.
        rate: KV bytes a second that it moved between its last two reports.
        why: Why it isn't verified; empty while that is not known.
    """

    report: Report
    sender: str
    joined_at: int
    heard_at: int
    verified: bool = False
    suspect: bool = False
    in_flight: int = 0
    served: int = 0
    rate: float = 0.0
    why: str = ""

    @property
    def incarnation(self) -> bytes:
        """Who it is."""
        return self.report.incarnation

    @property
    def role(self) -> Role:
        """What it does."""
        return self.report.role

    @property
    def http(self) -> str:
        """Base of its URLs."""
        return self.report.http

    @property
    def eligible(self) -> bool:
        """Whether it may be given requests."""
        return self.verified and not self.report.draining and not self.suspect

    @property
    def busy(self) -> int:
        """Requests that it has, as far as is known: its own word is old by up to an interval."""
        return max(self.in_flight, self.report.load.running + self.report.load.waiting)

    @property
    def expires_at(self) -> int:
        """When its time is over unless it reports (ns)."""
        return self.heard_at + round(INTERVALS * self.report.interval * 1e9)


class Answer(NamedTuple):
    """What becomes of a report."""

    #: None where the report is refused or was overtaken by a later one.
    member: Member | None
    #: Why it is refused; empty where it isn't.
    why: str = ""
    #: Whoever is at its HTTP address is to be asked, and ``verified`` or ``unverified`` called.
    ask: bool = False


class Group(NamedTuple):
    """Instances that can exchange KV: one model, one fingerprint."""

    fingerprint: str
    prefills: list[Member]
    decodes: list[Member]


@dataclass(slots=True)
class Registry:
    """The members.

    Args:
        most: As many as there may be.
    """

    most: int = 1024
    members: dict[bytes, Member] = field(default_factory=dict)
    #: Incarnations that said BYE, or whose place another one took: no report brings them back, be it a late
    #: one, or that of the second of two that are told the same address.
    _left: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def report(self, report: Report, now: int, sender: str = "") -> Answer:
        """An instance reported.

        Args:
            report: As it came.
            now: The time (ns).
            sender: The key that it came with.
        """
        member = self.members.get(report.incarnation)
        if member is None:
            if why := self._objection(report):
                return Answer(None, why)
            member = Member(report, sender, now, now)
            self.members[report.incarnation] = member
            return Answer(member, ask=True)
        if why := _changed(member, report, sender):
            return Answer(None, why)  # and it counts for nothing: who really is there goes on reporting
        if report.number <= member.report.number:
            return Answer(None)
        self._refresh(member, report, now)
        return Answer(member, ask=not member.verified)

    def _objection(self, report: Report) -> str:
        if report.version != VERSION:
            return f"this router speaks version {VERSION} of its protocol, not {report.version}"
        if report.incarnation in self._left:
            return "this incarnation has said goodbye, or another one is at its address now"
        if len(self.members) >= self.most:
            return f"there are {self.most} instances already"
        try:
            checked_url(report.http)
        except ValueError as error:
            return str(error)
        if report.probe and not report.probe.startswith("/"):
            return f"{report.probe!r} is no path"
        if report.role == "prefill" and not report.engines:
            return "a prefill instance has to say where its transfer engines are"
        return ""

    @staticmethod
    def _refresh(member: Member, report: Report, now: int) -> None:
        passed = now - member.heard_at
        moved = report.load.bytes_moved - member.report.load.bytes_moved
        member.rate = moved / passed * 1e9 if passed > 0 and moved > 0 else 0.0
        member.report = report
        member.heard_at = max(now, member.heard_at)
        if member.suspect:  # it lives; whether its server does is to be asked
            member.suspect = member.verified = False

    def verified(self, incarnation: bytes) -> list[Member]:
        """It is at its HTTP address. Gives those that were there before it, which are gone."""
        member = self.members.get(incarnation)
        if member is None:
            return []
        member.verified, member.why = True, ""
        before = [each for each in self.members.values() if each.http == member.http and each is not member]
        for each in before:
            del self.members[each.incarnation]
            self._bury(each.incarnation)
        return before

    def outdone(self, member: Member) -> str:
        """Why it is not believed that a member that was only probed is at its address; empty if it is."""
        shown = any(
            each.http == member.http and each.verified and not each.report.probe
            for each in self.members.values()
        )
        return f"another one has shown that it is at {member.http}" if member.report.probe and shown else ""

    def unverified(self, incarnation: bytes, why: str) -> None:
        """Somebody else, or nobody, is at its HTTP address; asked again after its next report."""
        member = self.members.get(incarnation)
        if member is not None and not member.verified:
            member.why = why

    def suspect(self, incarnation: bytes) -> None:
        """It couldn't be reached."""
        member = self.members.get(incarnation)
        if member is not None:
            member.suspect = True

    def bye(self, incarnation: bytes, sender: str = "") -> Member | None:
        """It said goodbye; gives it, if it was a member and speaks for itself."""
        member = self.members.get(incarnation)
        if member is not None and member.sender != sender:
            return None
        self._bury(incarnation)
        return self.members.pop(incarnation, None)

    def _bury(self, incarnation: bytes) -> None:
        self._left[incarnation] = None
        while len(self._left) > _TOMBSTONES:
            self._left.popitem(last=False)

    def sweep(self, now: int) -> list[Member]:
        """Those whose time is over; they are members no more."""
        over = [each for each in self.members.values() if each.expires_at <= now]
        for each in over:
            del self.members[each.incarnation]
        return over

    def next_at(self) -> int | None:
        """When somebody's time is over unless they report (ns); None while there is nobody."""
        return min((each.expires_at for each in self.members.values()), default=None)

    def stalled(self, now: int) -> None:
        """This process stood still: what it didn't hear meanwhile is held against nobody."""
        for each in self.members.values():
            each.heard_at = max(each.heard_at, now)

    def models(self) -> list[str]:
        """Names of the models that requests can be for, sorted."""
        named = {name for each in self.members.values() if each.verified for name in each.report.models}
        return sorted(named)

    def groups(self, model: str, without: Collection[Member] = ()) -> list[Group]:
        """Where requests for a model can go: those groups that have instances of both roles."""
        found: dict[str, Group] = {}
        for each in self._serving(model):
            if each.eligible and each not in without:
                group = found.setdefault(each.report.fingerprint, Group(each.report.fingerprint, [], []))
                (group.prefills if each.role == "prefill" else group.decodes).append(each)
        return [group for group in found.values() if group.prefills and group.decodes]

    def context(self, model: str) -> int:
        """Tokens that a prompt for a model may have, at most, wherever it goes; 0: not known."""
        return max((each.report.context for each in self._serving(model)), default=0)

    def lacking(self, model: str) -> str:
        """Why there is no group for a model that is served, in words."""
        serving = list(self._serving(model))
        able = [each for each in serving if each.verified]
        if able and all(each.report.draining for each in able):
            return f"all instances of {model!r} are draining"
        here = {each.role for each in serving if each.eligible}
        missing = [role for role in ("prefill", "decode") if role not in here]
        if missing:
            return f"no {' and no '.join(missing)} instance of {model!r} can take requests"
        return f"no prefill and decode instance of {model!r} have the same KV layout"

    def _serving(self, model: str) -> Iterator[Member]:
        return (each for each in self.members.values() if model in each.report.models)


def _changed(member: Member, report: Report, sender: str) -> str:
    """What a report says otherwise than its incarnation's first one did; empty if nothing."""
    if sender != member.sender:
        return "this incarnation came with another key"
    for name in ("role", "address", "http", "engines", "models", "fingerprint", "token", "probe"):
        if getattr(report, name) != getattr(member.report, name):
            return f"{name} is not what this incarnation reported before"
    return ""


def checked_url(url: str) -> SplitResult:
    """The base of an instance's URLs, if it is ``http://host:port``.

    Raises:
        ValueError: It is something else.
    """
    try:
        found = urlsplit(url)
        port = found.port
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    plain = found.scheme in ("http", "https") and found.hostname and port
    if not plain or found.path or found.query or found.fragment or "@" in found.netloc or not url.isascii():
        raise ValueError(f"{url!r} is not http://host:port")
    if any(letter.isspace() or not letter.isprintable() for letter in url):
        raise ValueError(f"{url!r} is not http://host:port")
    return found
