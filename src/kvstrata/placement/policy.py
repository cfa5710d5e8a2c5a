"""How a method is used: its budget, what always stays, which layers stay dense, and from which length it begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvstrata.contract.budget import EstimatedMass, Persistent, Rows, SelectionBudget, Threshold
from kvstrata.contract.encoding import digest
from kvstrata.contract.method import ComputeSite, Mode
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.calibration import Calibration
from kvstrata.methods.interface import Geometry, Method, require_at_least
from kvstrata.placement.gate import GateConfig

__all__ = ["SelectionPolicy"]


@dataclass(frozen=True)
class SelectionPolicy:
    """What an approximate request does. Immutable; part of the lineage of the rows computed under it.

    method, budget: which rows, and how many for each K/V head, persistent ones included. persistent: rows that always
    enter. min_history: visible rows, in tokens, below which every step attends to everything. dense_layers: layers that
    always do; `None` for the method's own. layer_budgets: (layer, budget) where a layer has another one. site: where
    chosen rows are reduced; `None` for the method's own. seed: of the method's randomness. gate: what is decided about
    a selection before its answer is published; `None` accepts each. calibration: what the gate knows of the method's
    estimates; samples of the wider budget (`kvstrata.placement.gate.widened`) belong into it too, or none is tried.

    Errors: `ConfigurationError` naming the field, also for a budget that does not cover the persistent rows.
    """

    method: Method[Any]
    budget: SelectionBudget
    persistent: Persistent = field(default_factory=Persistent)
    min_history: int = 1024
    dense_layers: tuple[int, ...] | None = None
    layer_budgets: tuple[tuple[int, SelectionBudget], ...] = ()
    site: ComputeSite | None = None
    seed: int = 0
    gate: GateConfig | None = None
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"method={self.method!r} is no method",
                "pass one of kvstrata.methods, e.g. Quest(page_size=16)",
            )
        if not isinstance(self.persistent, Persistent):
            raise _invalid("persistent", self.persistent, "Persistent(sinks=..., recent=...)")
        require_at_least("min_history", self.min_history, 1)
        require_at_least("seed", self.seed, 0)
        if self.dense_layers is not None:
            _require_layers("dense_layers", self.dense_layers)
        pairs: Any = self.layer_budgets
        if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise _invalid("layer_budgets", pairs, "a tuple of (layer, budget)")
        _require_layers("layer_budgets", tuple(layer for layer, _ in pairs))
        for budget in (self.budget, *(budget for _, budget in self.layer_budgets)):
            self._require_room(budget)
            self.method.require_budget(budget)
        for name, kind in (("site", ComputeSite), ("gate", GateConfig), ("calibration", Calibration)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise _invalid(name, value, f"of the type {kind.__name__}, or None")
        if self.calibration is not None and self.gate is None:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                "a calibration is given and no gate that would use it",
                "pass gate=GateConfig()",
            )

    @property
    def mode(self) -> Mode:
        """APPROXIMATE: a policy that chooses rows is never exact."""
        return Mode.APPROXIMATE

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest over method, version, configuration and all settings here."""
        return digest("selection-policy/1", (self.method.digest, self)).hex()

    @property
    def lineage(self) -> str:
        """What all lineages begin with that rows computed under this policy have."""
        return f"policy:{self.digest}"

    def lineage_of(self, run: str) -> str:
        """The lineage of rows from the first choice of one history on. run: no other history's, without a slash.

        Which rows the steps before left out depends on how these were cut and where the index was built: the same
        tokens under the same policy make other rows in another history.
        """
        return f"{self.lineage}/{run}"

    def budget_of(self, layer: int) -> SelectionBudget:
        """The budget of `layer`."""
        return dict(self.layer_budgets).get(layer, self.budget)

    def dense(self, geometry: Geometry) -> frozenset[int]:
        """Layers that attend to everything: by policy, and those whose window bounds their rows anyway."""
        named = self.method.dense(geometry) if self.dense_layers is None else self.dense_layers
        return frozenset(named) | {layer for layer, window in enumerate(geometry.windows) if window is not None}

    def require(self, geometry: Geometry) -> None:
        """Errors: `UnsupportedError` or `ConfigurationError` when a model of that shape cannot be served so."""
        for layer in (*(self.dense_layers or ()), *(layer for layer, _ in self.layer_budgets)):
            if not 0 <= layer < geometry.layers:
                raise ConfigurationError(
                    Reason.INVALID_ARGUMENT, f"layer {layer} is named of a model with {geometry.layers} layers"
                )
        self.method.require(geometry)

    def _require_room(self, budget: object) -> None:
        if not isinstance(budget, SelectionBudget):
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"budget={budget!r} says no rows",
                "pass Rows(512), Fraction(0.1), Threshold(5.0, cap=512) or EstimatedMass(0.95, cap=512)",
            )
        rows = budget.rows if isinstance(budget, Rows) else None
        rows = budget.cap if isinstance(budget, Threshold | EstimatedMass) else rows
        if rows is not None and rows < self.persistent.rows:
            raise ConfigurationError(
                Reason.INVALID_ARGUMENT,
                f"a budget of {rows} rows is less than the {self.persistent.rows} persistent ones "
                f"(sinks={self.persistent.sinks}, recent={self.persistent.recent})",
                "pass a larger budget, or Persistent(sinks=..., recent=...) with fewer rows",
            )


def _require_layers(field: str, layers: Any) -> None:
    numbers = isinstance(layers, tuple) and all(type(layer) is int and layer >= 0 for layer in layers)
    if not numbers or len(set(layers)) != len(layers):
        raise _invalid(field, layers, "a tuple of layers, each once, counted from 0")


def _invalid(field: str, value: object, wanted: str) -> ConfigurationError:
    return ConfigurationError(Reason.INVALID_ARGUMENT, f"{field} must be {wanted}, got {value!r}")
