"""What a retrieval run leaves behind so that its measures can be computed again, without the model and its tensors.

The scores and values that dense attention saw, the rows that entered for every query head, and the measures that were
reported of them: one JSON object for one layer and one query row.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstrata.errors import ConfigurationError, Reason
from kvstrata.placement.expansion import Support
from kvstrata.placement.shadow import DenseReference, ShadowMeasures, entered

__all__ = ["FORMAT", "read_fixture", "retrieval_fixture", "write_fixture"]

FORMAT = "kvstrata-retrieval-fixture/1"


def retrieval_fixture(
    reference: DenseReference,
    support: Support,
    output: Tensor,
    measures: ShadowMeasures,
    *,
    method: str,
    layer: int,
    position: int,
    candidates: int | None = None,
    fallback: float | None = None,
    index_miss: float | None = None,
    index_stale: float | None = None,
    pool_miss: float | None = None,
) -> dict[str, Any]:
    """Plain values for one query row of one layer; grows with visible rows times head_dim.

    position: of the query row. candidates: units that were scored for each owner. fallback, index_miss, index_stale,
    pool_miss: frequencies over the run, `None` where they were not counted. The quality of generated text is another
    measurement and stays null. Errors: `ValueError` for a reference of several query rows.
    """
    heads, rows, visible = reference.scores.shape
    if rows != 1:
        raise ValueError(f"a fixture holds one query row, not {rows}")
    inside = entered(support, heads, 1, visible)[:, 0]
    kv_heads = reference.values.shape[0]
    owners = support.rows.shape[0]
    return {
        "format": FORMAT,
        "method": method,
        "layer": layer,
        "position": position,
        "owner": str(support.owner),
        "shape": {
            "query_heads": heads,
            "kv_heads": kv_heads,
            "visible": visible,
            "head_dim": reference.values.shape[-1],
        },
        "counts": {
            "candidates": candidates,
            "rows_named": support.named,
            "rows_named_once": support.named - support.duplicates,
        },
        "frequencies": {
            "full_attention_fallback": fallback,
            "index_miss": index_miss,
            "index_stale": index_stale,
            "pool_miss": pool_miss,
        },
        "generation_quality": None,
        "persistent": {"sinks": support.sinks, "recent": support.recent},
        "values": reference.values.tolist(),
        "sink_logits": None if reference.sinks is None else reference.sinks.tolist(),
        "heads": [
            {
                "query_head": head,
                "kv_head": head * kv_heads // heads,
                "owner": head * owners // heads,
                "rows": torch.nonzero(inside[head]).flatten().tolist(),
                "logits": reference.scores[head, 0].tolist(),
                "output": output[head, 0].double().tolist(),
                "measures": {field.name: getattr(measures, field.name)[head, 0].item() for field in fields(measures)},
            }
            for head in range(heads)
        ],
    }


def write_fixture(path: Path, fixture: dict[str, Any]) -> None:
    """Write `fixture` to `path`, which must not exist; an infinite relative error becomes null."""
    text = json.dumps(_finite(fixture), allow_nan=False)
    with path.open("x", encoding="utf-8") as file:
        file.write(text + "\n")


def read_fixture(path: Path) -> tuple[dict[str, Any], ShadowMeasures]:
    """The fixture, and its measures computed anew from rows, scores, values and outputs.

    Errors: `ConfigurationError` for a file of another format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data["format"]
    except (ValueError, KeyError, TypeError):
        found = None
    if found != FORMAT:
        raise ConfigurationError(
            Reason.INVALID_ARGUMENT, f"{path} is no {FORMAT}", "pass a file that `write_fixture` has written"
        )
    heads = data["heads"]
    scores = torch.tensor([[head["logits"]] for head in heads], dtype=torch.float64)
    values = torch.tensor(data["values"], dtype=torch.float64)
    sinks = None if data["sink_logits"] is None else torch.tensor(data["sink_logits"], dtype=torch.float64)
    inside = torch.zeros_like(scores, dtype=torch.bool)
    for place, head in enumerate(heads):
        inside[place, 0, head["rows"]] = True
    output = torch.tensor([[head["output"]] for head in heads], dtype=torch.float64)
    return data, DenseReference.of_scores(scores, values, sinks).measure_rows(inside, output)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    return value
