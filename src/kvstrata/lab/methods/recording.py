"""What some layers of a model computed while it read prose: rows, queries and residual stream, for all methods alike.

The model reads a history and then the text that really follows it, token by token as far as methods are concerned,
through Transformers' own cache and attention. A method that is measured on the recording changes nothing in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstrata.engines.transformers.families.registry import family_of
from kvstrata.engines.transformers.families.view import TransformersView
from kvstrata.engines.transformers.stock import stock_attention, stock_cache, stock_prefill
from kvstrata.errors import ConfigurationError, Reason
from kvstrata.methods.interface import Geometry, StepRows

__all__ = ["LayerRecording", "Recording", "default_layers", "geometry_of", "record"]

_SLICE = 512
_FIRST_LAYER = 2  # several methods leave the first two layers dense
_FORMAT = "kvstrata-recording/1"


@dataclass(frozen=True, eq=False)
class LayerRecording:
    """One layer, over history and steps together, in the model's dtype.

    queries [query_heads, tokens, head_dim]; keys, values [kv_heads, tokens, head_dim], all after rotary positions.
    hidden: [tokens, hidden_size], the residual stream that enters the layer. previous: [steps, hidden_size], the one
    that enters the layer before it during the steps; of the layer itself where there is none before.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden: Tensor
    previous: Tensor

    def rows(self, start: int, stop: int) -> StepRows:
        """Rows [start, stop) as a step of their own, as views."""
        span = slice(start, stop)
        return StepRows(start, self.queries[:, span], self.keys[:, span], self.values[:, span])


@dataclass(frozen=True, eq=False)
class Recording:
    """history: tokens before the first step. steps: tokens after it. source: the model's name. layers: by number."""

    source: str
    dtype: str
    geometry: Geometry
    history: int
    steps: int
    layers: dict[int, LayerRecording]

    def save(self, path: Path) -> None:
        """Write an uncompressed .npz; bfloat16 becomes float32, which loses nothing."""
        about = {
            "format": _FORMAT,
            "source": self.source,
            "dtype": self.dtype,
            "geometry": asdict(self.geometry),
            "history": self.history,
            "steps": self.steps,
        }
        planes = {
            f"{layer}.{name}": tensor.float().numpy()
            for layer, recorded in self.layers.items()
            for name, tensor in vars(recorded).items()
        }
        with path.open("wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **planes)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` wrote. Errors: `ConfigurationError` for another file."""
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"])) if "about" in file else {}
            if about.get("format") != _FORMAT:
                raise ConfigurationError(Reason.INVALID_ARGUMENT, f"{path} is no {_FORMAT}", "record it again")
            dtype = getattr(torch, about["dtype"])
            found: dict[int, dict[str, Tensor]] = {}
            for key in file.files:
                layer, dot, name = key.partition(".")
                if dot:
                    found.setdefault(int(layer), {})[name] = torch.from_numpy(file[key]).to(dtype)
        shape = about["geometry"]
        geometry = Geometry(**{**shape, "windows": tuple(shape["windows"])})
        layers = {layer: LayerRecording(**planes) for layer, planes in sorted(found.items())}
        return cls(about["source"], about["dtype"], geometry, about["history"], about["steps"], layers)


def record(
    model: Any,
    token_ids: Sequence[int],
    steps: int,
    layers: Sequence[int],
    *,
    source: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Recording:
    """Let `model` read `token_ids`, the last `steps` of which are the steps, and keep what `layers` computed.

    Holds the recorded layers, the model's own cache, and one slice of activations. progress: called with (tokens done,
    tokens in all). Blocks for as long as the model reads. Errors: `ConfigurationError` for layers that are not there or
    that see a window only, or more steps than tokens.
    """
    family = family_of(model)
    geometry = geometry_of(model)
    wrong = [layer for layer in layers if not 0 <= layer < geometry.layers or geometry.windows[layer] is not None]
    if wrong or not layers or not 0 < steps < len(token_ids):
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT,
            f"layers={list(layers)} and steps={steps} of {len(token_ids)} tokens cannot be recorded",
            f"name layers without a window below {geometry.layers}, and fewer steps than tokens",
        )
    history = len(token_ids) - steps
    streams: dict[int, list[Tensor]] = {layer: [] for each in layers for layer in (each, max(0, each - 1))}
    with _streams(family.layer_modules(model), streams), stock_attention(model, "sdpa"):
        # `stock_prefill` leaves the last token to whoever generates.
        stock_prefill(model, [*token_ids, token_ids[-1]], stock_cache(model), _SLICE, progress)
    view = TransformersView(model, family)
    positions = torch.arange(len(token_ids), device=model.device)
    recorded: dict[int, LayerRecording] = {}
    joined = {layer: torch.cat(parts) for layer, parts in streams.items()}
    for layer in sorted(layers):
        with torch.inference_mode():
            queries, keys, values = view.project(layer, view.input_norm(layer, joined[layer]))
            queries, keys = view.rotate(layer, queries, positions), view.rotate(layer, keys, positions)
        planes = (queries, keys, values, joined[layer], joined[max(0, layer - 1)][history:])
        recorded[layer] = LayerRecording(*(plane.detach().clone().cpu() for plane in planes))
    dtype = str(model.dtype).removeprefix("torch.")
    return Recording(source, dtype, geometry, history, steps, recorded)


def default_layers(geometry: Geometry, count: int = 6) -> tuple[int, ...]:
    """`count` layers without a window, evenly spread from the third to the last."""
    usable = [layer for layer, window in enumerate(geometry.windows) if window is None]
    usable = [layer for layer in usable if layer >= _FIRST_LAYER] or usable
    places = np.linspace(0, len(usable) - 1, min(count, len(usable)))
    return tuple(usable[round(float(place))] for place in places)


def geometry_of(model: Any) -> Geometry:
    """Shapes of a model's attention. Errors: `UnsupportedError` for a family that is not served."""
    family = family_of(model)
    rules = family.layer_rules
    return Geometry(
        family.layers,
        family.query_heads,
        family.kv_heads,
        family.head_dim,
        family.scale,
        tuple(rule.window for rule in rules),
        any(rule.sinks for rule in rules),
    )


@contextlib.contextmanager
def _streams(modules: Sequence[Any], into: dict[int, list[Tensor]]) -> Iterator[None]:
    with contextlib.ExitStack() as hooks:
        for layer, parts in into.items():
            hook = partial(_keep, parts)
            hooks.callback(modules[layer].register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _keep(parts: list[Tensor], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    parts.append(hidden[0].detach().clone())
