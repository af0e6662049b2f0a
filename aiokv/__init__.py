"""aiokv: an asyncio-native runtime that moves LLM KV cache between processes.

``TransferEngine`` is one rank's runtime. A producer ``offer``s the KV of some blocks, a consumer
``fetch``es it into its own; both are awaited, with deadlines and cancellation that hold on both
sides, and no Python thread on the data path.
"""

from aiokv.config import Config
from aiokv.control.keys import Keys
from aiokv.control.tls import Tls
from aiokv.device.cache import KVCache
from aiokv.engine.arguments import Window
from aiokv.engine.engine import TransferEngine
from aiokv.engine.handle import Progress
from aiokv.engine.statistics import Statistics
from aiokv.engine.transfer import Fetch, Offer
from aiokv.errors import (
    AiokvError,
    BusyError,
    CapacityError,
    ClosedError,
    DeadlineExceeded,
    DeviceError,
    InvalidBlocks,
    LayoutMismatch,
    LocalProtocolError,
    PeerLostError,
    ProtocolError,
    Refused,
    RemoteProtocolError,
    TransferAborted,
)
from aiokv.offload.hashes import block_hashes
from aiokv.offload.lookup import Lookup
from aiokv.offload.settings import TierSettings
from aiokv.offload.sharing.owner import HostPool, PoolStatistics
from aiokv.offload.statistics import Dropped, TierStatistics
from aiokv.offload.tier import HostTier
from aiokv.proto.layout import CacheLayout, GroupLayout
from aiokv.proto.settings import Settings
from aiokv.ranks import Blocks, Failed, Hit, Miss, RankGroup, Severity, Tokens

__all__ = [
    "AiokvError",
    "Blocks",
    "BusyError",
    "CacheLayout",
    "CapacityError",
    "ClosedError",
    "Config",
    "DeadlineExceeded",
    "DeviceError",
    "Dropped",
    "Failed",
    "Fetch",
    "GroupLayout",
    "Hit",
    "HostPool",
    "HostTier",
    "InvalidBlocks",
    "KVCache",
    "Keys",
    "LayoutMismatch",
    "LocalProtocolError",
    "Lookup",
    "Miss",
    "Offer",
    "PeerLostError",
    "PoolStatistics",
    "Progress",
    "ProtocolError",
    "RankGroup",
    "Refused",
    "RemoteProtocolError",
    "Settings",
    "Severity",
    "Statistics",
    "TierSettings",
    "TierStatistics",
    "Tls",
    "Tokens",
    "TransferAborted",
    "TransferEngine",
    "Window",
    "block_hashes",
]

__version__ = "0.1.0"
