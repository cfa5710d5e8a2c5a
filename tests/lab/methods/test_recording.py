"""A recording holds what the model's own attention computed with, and survives a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from kvstrata.errors import ConfigurationError
from kvstrata.lab.methods.recording import Recording, default_layers, geometry_of, record

IDS = [3 + (7 * i) % 190 for i in range(70)]


def test_rows_are_those_of_the_models_own_cache() -> None:
    model = tiny_model("llama")
    seen: list[tuple[int, int]] = []
    recording = record(model, IDS, 6, (0, 2), source="tiny", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(70, 70)]
    assert (recording.history, recording.steps, recording.source) == (64, 6, "tiny")
    with torch.no_grad():
        out = model(torch.tensor([IDS]), use_cache=True, output_hidden_states=True)
    for layer, recorded in recording.layers.items():
        stored = out.past_key_values.layers[layer]
        assert torch.allclose(recorded.keys, stored.keys[0], atol=1e-4)
        assert torch.allclose(recorded.values, stored.values[0], atol=1e-4)
        assert torch.allclose(recorded.hidden, out.hidden_states[layer][0], atol=1e-4)
        assert torch.allclose(recorded.previous, out.hidden_states[max(0, layer - 1)][0, 64:], atol=1e-4)
        # Attention with the recorded queries is what the layer added to the stream, before its output matrix.
        module = model.model.layers[layer].self_attn
        group = recording.geometry.group
        attended = torch.nn.functional.scaled_dot_product_attention(
            recorded.queries[None],
            recorded.keys.repeat_interleave(group, 0)[None],
            recorded.values.repeat_interleave(group, 0)[None],
            is_causal=True,
            scale=recording.geometry.scale,
        )
        projected = module.o_proj(attended[0].transpose(0, 1).flatten(1))
        mlp = model.model.layers[layer]
        middle = recorded.hidden + projected
        after = middle + mlp.mlp(mlp.post_attention_layernorm(middle))
        expected = out.hidden_states[layer + 1][0] if layer < 2 else None
        if expected is not None:
            assert torch.allclose(after, expected, atol=1e-3)
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_the_same(tmp_path: Path, dtype: torch.dtype) -> None:
    recording = record(tiny_model("llama").to(dtype), IDS, 6, (1,))
    recording.save(tmp_path / "recording.npz")
    again = Recording.load(tmp_path / "recording.npz")
    assert (again.geometry, again.history, again.dtype) == (recording.geometry, 64, str(dtype).removeprefix("torch."))
    for name, tensor in vars(recording.layers[1]).items():
        assert torch.equal(getattr(again.layers[1], name), tensor), name
    rows = again.layers[1].rows(64, 66)
    assert (rows.start, rows.stop) == (64, 66)
    assert torch.equal(rows.queries, recording.layers[1].queries[:, 64:66])


def test_layers_are_spread_and_never_windowed() -> None:
    assert default_layers(geometry_of(tiny_model("llama"))) == (2,)
    assert default_layers(geometry_of(tiny_model("gemma3"))) == (3,)


def test_what_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for layers, steps in (((3,), 6), ((), 6), ((0,), 0), ((0,), 70)):
        with pytest.raises(ConfigurationError, match="cannot be recorded"):
            record(model, IDS, steps, layers)
    with pytest.raises(ConfigurationError, match="cannot be recorded"):
        record(tiny_model("gemma3"), IDS, 6, (0,))
    with (tmp_path / "other.npz").open("wb") as file:
        import numpy as np

        np.savez(file, about=np.array("{}"))
    with pytest.raises(ConfigurationError, match="is no kvstrata-recording/1"):
        Recording.load(tmp_path / "other.npz")
