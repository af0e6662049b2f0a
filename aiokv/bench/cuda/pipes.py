"""Two designs that send KV tensor by tensor over NCCL, written anew to be compared with.

Both are those of early vLLM pipes: a Python thread sends, whoever receives blocks, and each tensor is
preceded by what it is, which goes through the GPU. ``PickledPipe`` pickles that, sends its length and then
itself, and gets the memory to receive into by ``.to(device)``. ``OneTensorPipe`` is what that became: one
small tensor of integers, with one copy to the GPU and one from it.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - what aiokv is compared with does it
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from aiokv.bench.cuda.gpu import Gpu
from aiokv.bench.cuda.rawnccl import RawPair

__all__ = ["OneTensorPipe", "PickledPipe", "Pipe", "Stages"]

#: Integers of the small tensor: type, number of axes, and the axes.
_WORDS = 16


class Stages:
    """Where the time goes: nanoseconds by the name of the step, and how often there was one."""

    def __init__(self) -> None:
        self.spent: dict[str, int] = {}
        self._since = 0

    def begin(self) -> None:
        """The next step begins now."""
        self._since = time.perf_counter_ns()

    def end(self, name: str) -> None:
        """It is over, and the next one begins."""
        now = time.perf_counter_ns()
        self.add(name, now - self._since)
        self._since = now

    def add(self, name: str, nanoseconds: int) -> None:
        """So much went to a step."""
        self.spent[name] = self.spent.get(name, 0) + nanoseconds


class Pipe(Protocol):
    """One end."""

    stages: Stages

    def send(self, tensor: Any) -> Future[None]:  # noqa: ANN401
        """Have the thread send a tensor."""

    def recv(self) -> Any:  # noqa: ANN401
        """The next tensor, complete."""


class _Sending:
    """A thread that sends one tensor after another."""

    def __init__(self, gpu: Gpu, raw: RawPair) -> None:
        self._torch, self._raw = gpu.torch, raw
        self._executor = ThreadPoolExecutor(1)
        self.stages = Stages()

    def _submit(self, send: Callable[[Any], None], tensor: Any) -> Future[None]:  # noqa: ANN401
        return self._executor.submit(self._run, send, tensor, time.perf_counter_ns())

    def _run(self, send: Callable[[Any], None], tensor: Any, submitted: int) -> None:  # noqa: ANN401
        now = time.perf_counter_ns()
        self.stages.add("sender: waiting for its turn and the thread", now - submitted)
        self.stages.begin()
        send(tensor)

    def _send(self, tensor: Any) -> None:  # noqa: ANN401
        self._raw.send(tensor.data_ptr(), tensor.nbytes)

    def _recv(self, tensor: Any) -> None:  # noqa: ANN401
        self._raw.recv(tensor.data_ptr(), tensor.nbytes)

    def _await_copies(self) -> None:
        """Copies to the GPU are on the thread's current stream, which NCCL's knows nothing of."""
        self._torch.cuda.current_stream().synchronize()


class PickledPipe(_Sending):
    """The older design."""

    def send(self, tensor: Any) -> Future[None]:  # noqa: ANN401
        """Have the thread send a tensor."""
        return self._submit(self._send_now, tensor)

    def _send_now(self, tensor: Any) -> None:  # noqa: ANN401
        torch, stages = self._torch, self.stages
        words = pickle.dumps({"dtype": tensor.dtype, "shape": tuple(tensor.shape)})
        length = torch.tensor([len(words)], dtype=torch.int64).to("cuda")
        metadata = torch.frombuffer(bytearray(words), dtype=torch.uint8).to("cuda")
        self._await_copies()
        stages.end("sender: metadata pickled and copied to the GPU")
        self._send(length)
        self._send(metadata)
        self._raw.synchronize()
        stages.end("sender: metadata sent")
        self._send(tensor.to("cuda"))
        self._raw.synchronize()
        stages.end("sender: tensor sent")

    def recv(self) -> Any:  # noqa: ANN401
        """The next tensor, complete."""
        torch, stages = self._torch, self.stages
        stages.begin()
        length = torch.empty(1, dtype=torch.int64, device="cuda")
        self._recv(length)
        self._raw.synchronize()
        stages.end("receiver: waiting for the next tensor")
        metadata = torch.empty(int(length.item()), dtype=torch.uint8, device="cuda")
        self._recv(metadata)
        self._raw.synchronize()
        what = pickle.loads(metadata.cpu().numpy().tobytes())  # noqa: S301 - from the process beside this
        stages.end("receiver: metadata received, copied to the host and unpickled")
        tensor = torch.empty(what["shape"], dtype=what["dtype"]).to("cuda")
        self._await_copies()
        stages.end("receiver: memory by .to(device)")
        self._recv(tensor)
        self._raw.synchronize()
        stages.end("receiver: tensor received")
        return tensor


class OneTensorPipe(_Sending):
    """The newer design."""

    def __init__(self, gpu: Gpu, raw: RawPair) -> None:
        super().__init__(gpu, raw)
        torch = gpu.torch
        self._types = [torch.bfloat16, torch.float16, torch.float32, torch.uint8]
        self._metadata = torch.empty(_WORDS, dtype=torch.int64, device="cuda")

    def send(self, tensor: Any) -> Future[None]:  # noqa: ANN401
        """Have the thread send a tensor."""
        words = [self._types.index(tensor.dtype), tensor.dim(), *tensor.shape]
        words += [0] * (_WORDS - len(words))
        return self._submit(lambda sent: self._send_now(sent, words), tensor)

    def _send_now(self, tensor: Any, words: list[int]) -> None:  # noqa: ANN401
        self._metadata.copy_(self._torch.tensor(words, dtype=self._torch.int64))
        self._await_copies()
        self.stages.end("sender: metadata copied to the GPU")
        self._send(self._metadata)
        self._send(tensor)
        self._raw.synchronize()
        self.stages.end("sender: metadata and tensor sent")

    def recv(self) -> Any:  # noqa: ANN401
        """The next tensor, complete."""
        torch, stages = self._torch, self.stages
        stages.begin()
        self._recv(self._metadata)
        self._raw.synchronize()
        stages.end("receiver: waiting for the next tensor, and metadata received")
        words = self._metadata.cpu().tolist()
        shape = words[2 : 2 + words[1]]
        tensor = torch.empty(shape, dtype=self._types[words[0]], device="cuda")
        stages.end("receiver: metadata copied to the host, memory")
        self._recv(tensor)
        self._raw.synchronize()
        stages.end("receiver: tensor received")
        return tensor
