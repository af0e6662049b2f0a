"""Commands of ``python -m aiokv`` that put together what lies in several layers."""
