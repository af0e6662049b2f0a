"""What engines, host tiers and groups of ranks do, for Prometheus; needs ``pip install 'aiokv[metrics]'``.

    exporter = aiokv.metrics.Exporter(engine, labels={"rank": "0"})
    tiers = aiokv.metrics.TierExporter(tier, labels={"rank": "0"})
    pools = aiokv.metrics.PoolExporter(pool)         # or python -m aiokv pool --metrics HOST:PORT
    groups = aiokv.metrics.RankExporter(ranks, labels={"rank": "0"})
    prometheus_client.start_http_server(9000)        # or whatever serves your metrics today

``statistics()`` is read when somebody scrapes, and at no other time: the data path does nothing for
it, and there is no thread or server of aiokv's. Scrapes may come from any thread.
"""

from aiokv.metrics.engines import Exporter
from aiokv.metrics.pools import PoolExporter
from aiokv.metrics.ranks import RankExporter
from aiokv.metrics.tiers import TierExporter

__all__ = ["Exporter", "PoolExporter", "RankExporter", "TierExporter"]
