"""The manifest of one history that can be searched: everything that a look-up and a gather rely on."""

from __future__ import annotations

from dataclasses import dataclass

from kvstrata.contract.capability import TierCapability
from kvstrata.contract.manifest.directory_state import DirectoryState
from kvstrata.contract.manifest.publication import IndexPublication, SelectorPublication
from kvstrata.contract.manifest.source import SourceBinding
from kvstrata.contract.manifest.tensor import TensorContract

__all__ = ["RetrievalManifest"]


@dataclass(frozen=True, slots=True)
class RetrievalManifest:
    """What held when it was issued. Its holder shows it with every call, and each call checks that it still holds."""

    generation: int
    source: SourceBinding
    tensor: TensorContract
    tiers: tuple[TierCapability, ...]
    directory: DirectoryState
    selector: SelectorPublication
    index: IndexPublication
