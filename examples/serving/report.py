"""What the pair shows at its end: a table of the transfers, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from serving.channel import Message

__all__ = ["overlapped", "table", "verdicts"]

#: Title, unit, and what it means where the title alone doesn't say it.
COLUMNS = (
    ("prompt", "tokens", ""),
    ("KV", "MiB", ""),
    ("via", "", "the transport that moved the KV"),
    ("prefill", "ms", "the forward of the prompt alone"),
    ("trans-\nfer", "ms", "from written to landed, summed over the layers"),
    ("rate", "GB/s", "KV by transfer"),
    ("over-\nlapped", "layers", "landed before the prefill had ended"),
    ("exposed", "ms", "last layer landed, less prefill's end; below 0: all there before"),
    ("first\ntoken", "ms", "since the request came in, with its wait for the others"),
)


def overlapped(reply: Message) -> int:
    """Layers whose KV had landed in one process before the other had ended the prompt's forward.

    The times are CLOCK_MONOTONIC, which all processes of one host share.
    """
    return sum(landed < reply["prefill"]["ended"] for landed in reply["landed"])


def table(prompts: dict[str, list[int]], replies: dict[str, Message]) -> Table:
    """What the transfers did, with a caption that says what each column is."""
    meanings = [(title.replace("-\n", "").replace("\n", " "), text) for title, _, text in COLUMNS if text]
    shown = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        caption="\n".join(f"{title:>11}: {text}" for title, text in meanings),
        caption_justify="left",
    )
    shown.add_column("request", no_wrap=True)
    for title, _, _ in COLUMNS:
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_row("", *(unit for _, unit, _ in COLUMNS), style="dim")
    for name, reply in replies.items():
        prefill, landed = reply["prefill"], reply["landed"]
        transfer = sum(landed) - sum(prefill["ready"])
        shown.add_row(
            name,
            f"{len(prompts[name])}",
            f"{reply['bytes'] / 2**20:.2f}",
            reply["transport"],
            f"{(prefill['ended'] - prefill['began']) / 1e6:.0f}",
            f"{transfer / 1e6:.1f}",
            f"{reply['bytes'] / transfer:.2f}",
            f"{overlapped(reply)}/{len(landed)}",
            f"{(max(landed) - prefill['ended']) / 1e6:.1f}",
            f"{(reply['tokens_at'][0] - reply['asked']) / 1e6:.0f}",
        )
    return shown


def verdicts(
    names: list[str], replies: dict[str, Message], expected: dict[str, list[int]], long: str
) -> Iterator[tuple[bool, str]]:
    """Whether all is as it should be, and a line that says so.

    Args:
        names: The requests.
        replies: Those of them that were answered.
        expected: What one process alone answers to these.
        long: The request of which some layers must have landed before its prefill had ended.
    """
    failed = [name for name in names if name not in replies]
    if failed:
        yield False, f"FAILED: {len(failed)} of {len(names)} requests: {', '.join(failed)}"
    wrong = [name for name, reply in replies.items() if reply["answer"] != expected[name]]
    if wrong:
        told = f"{len(wrong)} of {len(replies)} answers are not those of one process alone"
        yield False, f"DIFFERENT: {told}: {', '.join(wrong)}"
        for name in wrong:
            yield (
                False,
                f"  {name}: the pair answered {replies[name]['answer']}, one process {expected[name]}",
            )
    elif replies:
        tokens = sum(len(reply["answer"]) for reply in replies.values())
        told = f"all {len(replies)} answers{' that came' if failed else ''}"
        yield True, f"equal: {told} ({tokens} tokens) are those of one process alone"
    if long in replies:
        early, layers = overlapped(replies[long]), len(replies[long]["landed"])
        word = "overlapped" if early else "NOT OVERLAPPED"
        told = f"{early} of {layers} layers of {long!r} landed before its prefill had ended"
        yield early > 0, f"{word}: {told}"
