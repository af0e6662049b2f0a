"""Prefill and decode as two processes of this host, and whether they answer as one process would.

Starts both, sends them several prompts at once, shows the answers as they come and what the
transfers did; then runs the same prompts in this process alone, and compares token for token.

    python examples/pair.py
    python examples/pair.py --model tiny-random     # needs no weights, and answers nonsense
    python examples/pair.py --device cuda           # on a GPU, or on two where there are two
    python examples/pair.py --tp 2                  # two ranks prefill and one decodes, and the reverse
    python examples/pair.py --trace pair.json       # what the transfers did, for https://ui.perfetto.dev
"""

from __future__ import annotations

if __name__ == "__main__":
    import signal

    # Importing torch takes seconds, and until then there is nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import torch
import uvloop
from rich.console import Console

from aiokv.tracing import merge
from serving.channel import Message, RequestFailed, request
from serving.model import Model, load, prepare, usual
from serving.options import add_model, count, lacking
from serving.paged import PagedCache, memory
from serving.parallel import answer, gpu_of, groups
from serving.report import table, verdicts

LONG = "long"
SCRIPTS = ("prefill.py", "decode.py")


class Stopped(Exception):
    """Whoever waited for the answers doesn't any more."""


def requests(model: Model, block_size: int) -> dict[str, list[int]]:
    """Prompts, as tokens: a usual one, and those at which a transfer might go wrong."""
    chat = model.tokenizer.chat
    # Each further word is one token or a few: some number of them fills the last block to its end.
    polite = (chat("Name three colours." + " Please" * words + ".") for words in range(100 * block_size))
    story = Path(__file__).with_name("story.txt").read_text()
    return {
        "usual": chat("What does a harbour pilot do?"),
        "one token": model.tokenizer.encode("Once")[:1],
        "whole blocks": next(tokens for tokens in polite if len(tokens) % block_size == 0),
        LONG: chat(f"Here is a story.\n\n{story}\nSummarise this story in one sentence."),
    }


@asynccontextmanager
async def children(
    *arguments: str, device: str = "cpu", trace: Path | None = None
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """The processes of the pair, prefill first. They end when this context, or this process, does."""
    own = {script: [f"--device={gpu_of(device, number)}"] for number, script in enumerate(SCRIPTS)}
    if trace:
        for script, options in own.items():
            options.append(f"--trace={side(trace, script)}")
    one_gpu = gpu_of(device, 0) == gpu_of(device, 1)
    starting = [
        asyncio.ensure_future(started(script, *arguments, *own[script], one_gpu=one_gpu))
        for script in SCRIPTS
    ]
    patience = 10.0
    try:
        # Shielded: one that is started just when we are cancelled must be ended, too.
        yield [await asyncio.shield(each) for each in starting]
    except BaseException:
        patience = 1.0  # nobody wants what they are still at
        raise
    finally:
        await asyncio.gather(*(end(each, patience) for each in starting), return_exceptions=True)


def side(trace: Path, script: str) -> Path:
    """Where one process of the pair writes its side of the trace."""
    return trace.with_name(f"{trace.name}.{Path(script).stem}")


def join_trace(trace: Path) -> None:
    """Both sides in one file."""
    sides = [side(trace, script) for script in SCRIPTS]
    merge(sides, trace)
    for each in sides:
        each.unlink()


async def started(script: str, *arguments: str, one_gpu: bool) -> asyncio.subprocess.Process:
    """Start one process of the pair."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name(script)),
        "--listen=127.0.0.1:0",
        "--with-parent",
        *arguments,
        env=environment(script, arguments, one_gpu=one_gpu),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for this process, which then ends them
    )


def environment(script: str, arguments: Sequence[str], *, one_gpu: bool) -> dict[str, str]:
    """What a process of the pair finds in its environment."""
    found = dict(os.environ)
    if "--transport=nccl" in arguments and one_gpu:
        # NCCL refuses two processes on one GPU. Under different names they pass for two hosts, and it goes
        # by sockets.
        found |= {"NCCL_HOSTID": script, "NCCL_SOCKET_IFNAME": found.get("NCCL_SOCKET_IFNAME", "lo")}
    return found


async def end(starting: asyncio.Future[asyncio.subprocess.Process], patience: float) -> None:
    """End a child, and wait until it has; after so many seconds it isn't asked any more."""
    process = await starting
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(patience):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def reachable(process: asyncio.subprocess.Process, script: str) -> str:
    """Where a child takes requests, once it does."""
    if process.stdout is None:
        raise ValueError("the process was started without a pipe")
    line = await process.stdout.readline()
    if not line:
        raise RequestFailed(f"{script} ended before it was ready")
    address: str = json.loads(line)["listen"]
    return address


async def ask(console: Console, decode: str, name: str, message: Message) -> Message | None:
    """Send one request, and show the answer line by line under its name.

    Returns:
        The last reply; None where the request failed, which is shown in place of an answer.
    """
    line = ""
    try:
        async with request(decode, message) as replies:
            while "answer" not in (reply := await replies.next()):
                *full, line = (line + reply["text"]).split("\n")
                if len(line) > 60 and " " in line:
                    head, _, line = line.rpartition(" ")
                    full.append(head)
                for shown in filter(str.strip, full):
                    tell(console, f"{name:>12} | {shown}")
    except (RequestFailed, OSError, ValueError) as error:
        tell(console, f"{name:>12} | failed: {error}")
        return None
    tell(console, f"{name:>12} | {line}")
    return reply


def tell(console: Console, line: str) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def alone(
    model: Model, prompts: dict[str, list[int]], options: argparse.Namespace, stop: threading.Event
) -> dict[str, list[int]]:
    """The answers of one process that does it all, through the same paged attention.

    Raises:
        Stopped: ``stop`` was set.
    """

    def go_on(_: int) -> None:
        if stop.is_set():
            raise Stopped

    answers = {}
    with memory(model.layout(options.blocks, options.block_size), model.device) as cache:
        for name, prompt in prompts.items():
            kv = PagedCache(cache, range(options.blocks), on_layer=go_on)
            answer = [model.next_token(prompt, kv)]
            while answer[-1] != model.tokenizer.eos and len(answer) < options.limit:
                answer.append(model.next_token(answer[-1:], kv))
            answers[name] = answer
    return answers


async def main(options: argparse.Namespace) -> int:
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console()
    names = ("model", "blocks", "block_size", "threads") + (("transport",) if options.transport else ())
    passed_on = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    async with children(*passed_on, device=options.device, trace=options.trace) as processes:
        model = await asyncio.to_thread(load, options.model, options.device)
        gc.freeze()  # what stays till the end; looking through it then would take a second or two
        prompts = requests(model, options.block_size)
        prefill, decode = [
            await reachable(process, script) for process, script in zip(processes, SCRIPTS, strict=True)
        ]
        async with asyncio.TaskGroup() as group:
            asked = {
                name: group.create_task(
                    ask(console, decode, name, {"tokens": tokens, "limit": options.limit, "prefill": prefill})
                )
                for name, tokens in prompts.items()
            }
    if options.trace:
        await asyncio.to_thread(join_trace, options.trace)
    replies = {name: reply for name, task in asked.items() if (reply := task.result()) is not None}
    if replies:
        console.print(table(prompts, replies))
        tell(console, "Now the same in one process ...")
    stop = threading.Event()
    try:
        answered = {name: prompts[name] for name in replies}
        expected = await asyncio.to_thread(alone, model, answered, options, stop)
    finally:
        stop.set()
    good = True
    for fine, line in verdicts(list(prompts), replies, expected, LONG):
        tell(console, line)
        good = good and fine
    return 0 if good else 1


async def parallel(options: argparse.Namespace) -> int:
    """The same with several ranks on one side, each with some of the heads, and then on the other."""
    if task := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console()
    answers: dict[str, dict[str, list[int]]] = {}
    async with groups((options.tp, 1), options) as (several, single):
        model = await asyncio.to_thread(load, options.model, options.device)
        prompts = requests(model, options.block_size)
        for prefill, decode in ((several, single), (single, several)):
            what = f"{len(prefill.listens)} prefill and {len(decode.listens)} decode ranks"
            tell(console, f"{what}:")
            answers[what] = {}
            for name, tokens in prompts.items():
                found = answers[what][name] = await answer(prefill, decode, tokens, options.limit)
                tell(console, f"{name:>12} | {model.tokenizer.decode(found)}")
    tell(console, "Now the same in one process ...")
    expected = await asyncio.to_thread(alone, model, prompts, options, threading.Event())
    for what, answered in answers.items():
        told = "equal: the" if answered == expected else "DIFFERENT: not all"
        tell(console, f"{told} answers of {what} are those of one process alone")
    return 0 if all(answered == expected for answered in answers.values()) else 1


def parsed(line: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # --threads holds for the comparison, too: the order of additions, and so the rounding, depends on it.
    add_model(parser)
    parser.add_argument(
        "--limit", type=count, default=48, help="tokens of an answer, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write there what the transfers did, for https://ui.perfetto.dev (default: nothing is written)",
    )
    parser.add_argument(
        "--tp",
        type=count,
        default=1,
        metavar="RANKS",
        help="split the heads of the model, by default tiny-random, over so many ranks: first those of "
        "prefill, then those of decode (default: %(default)s)",
    )
    options = parser.parse_args(line)
    if options.tp > 1 and options.trace:
        parser.error("argument --tp: without --trace")
    return options


def start(options: argparse.Namespace) -> int:
    """Do it all; gives the exit status."""
    torch.set_num_threads(options.threads)
    if why := lacking(options):
        print(f"failed: {why}", file=sys.stderr)
        return 2
    # The three KV heads of SmolLM2 are no even share for two ranks.
    options.model = options.model or ("tiny-random" if options.tp > 1 else usual(options.device))
    try:
        prepare(options.model)
        return uvloop.run(parallel(options) if options.tp > 1 else main(options))
    except RequestFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError) as why:
        print("stopped", file=sys.stderr)
        return 128 + (signal.SIGINT if isinstance(why, KeyboardInterrupt) else signal.SIGTERM)


if __name__ == "__main__":
    chosen = parsed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(start(chosen))
