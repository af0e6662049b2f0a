"""How an engine is set up; see ``config.config``."""

from aiokv.config.config import Config

__all__ = ["Config"]
