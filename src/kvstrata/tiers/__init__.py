"""Where bytes live. Nothing is imported until it is asked for, so the file tier works without PyTorch.

`kvstrata.tiers.files` keeps chunks as checksummed files; the arenas hold segments in memory.
"""

from __future__ import annotations
