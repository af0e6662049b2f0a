"""Agreement of the ranks of one group: what a batch of requests comes to, the same on every rank."""

from aiokv.ranks.batch import Batch
from aiokv.ranks.group import RankGroup, RankStatistics
from aiokv.ranks.outcomes import Failed, Hit, Miss, Outcome, Severity
from aiokv.ranks.turn import Turn
from aiokv.ranks.units import Blocks, Tokens

__all__ = [
    "Batch",
    "Blocks",
    "Failed",
    "Hit",
    "Miss",
    "Outcome",
    "RankGroup",
    "RankStatistics",
    "Severity",
    "Tokens",
    "Turn",
]
