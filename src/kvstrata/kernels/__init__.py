"""How numbers are computed: partial states and their merge, attention over block tables, moving rows.

Native code is chosen at run time and is optional; each kernel has a readable PyTorch reference it is tested against.
"""

from kvstrata.kernels.block_table import BlockTable
from kvstrata.kernels.decode import DecodeAttention
from kvstrata.kernels.native import KernelReport, available_levels, describe
from kvstrata.kernels.prefill import PrefillWorkspace, prefill_attention, prefill_workspace_bytes
from kvstrata.kernels.state import PartialState

__all__ = [
    "BlockTable",
    "DecodeAttention",
    "KernelReport",
    "PartialState",
    "PrefillWorkspace",
    "available_levels",
    "describe",
    "prefill_attention",
    "prefill_workspace_bytes",
]
