"""``python -m aiokv doctor``: what this machine can do, what is missing, and the command that mends it."""

from aiokv.doctor.findings import Finding, Report
from aiokv.doctor.look import examine

__all__ = ["Finding", "Report", "examine"]
