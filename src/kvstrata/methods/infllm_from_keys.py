"""InfLLM's units over actual positions, from stored keys alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from kvstrata.contract.method import MethodContract, QueryVariant
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.infllm import InfLLM
from kvstrata.methods.infllm_index import InfLLMIndex, RepresentativeRule
from kvstrata.methods.interface import MethodContext, StepRows

__all__ = ["InfLLMFromKeys"]


@dataclass(frozen=True)
class InfLLMFromKeys(InfLLM):
    """InfLLM over actual positions, with representatives that stored keys alone tell: it can begin on a history that
    was restored, and needs no copy of the keys. Not in the paper."""

    contract: ClassVar[MethodContract] = replace(
        InfLLM.contract,
        name="infllm_from_keys",
        representation="mean of a unit's representative keys",
        variant=QueryVariant.ACTUAL,
        append_equals_build=True,
        rebuilds=True,
        needs_hidden=False,
        all_rows="equals exact attention",
        workload="decode over one long history",
    )

    rule: RepresentativeRule = RepresentativeRule.KEYS
    reposition: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule is not RepresentativeRule.KEYS:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, f"InfLLMFromKeys.rule must be KEYS, which needs no queries, got {self.rule!r}"
            )
        if self.reposition:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT, "InfLLMFromKeys.reposition must be False: stored keys carry their positions"
            )

    def observe(self, ctx: MethodContext, layer: int, index: InfLLMIndex | None, rows: StepRows) -> InfLLMIndex | None:
        """Nothing: the keys come with `build`."""
        return index

    def build(self, ctx: MethodContext, layer: int, index: InfLLMIndex | None) -> InfLLMIndex:
        """From the stored keys, of which it reads all once."""
        index = self._empty(ctx)
        index.take(ctx.keys(layer, 0, ctx.visible), None)
        return index
