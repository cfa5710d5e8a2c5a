"""A conversion happens once, is complete or absent, and keeps every weight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_gemma_gguf import BOS, EOS, LAYERS, TOKENS, cut, tiny_gemma, write_tiny_gemma_gguf

from kvstrata.engines.transformers.gguf_conversion import _exclusive, convert_once
from kvstrata.engines.transformers.loading import load_model
from kvstrata.errors import ModelLoadError, Reason

DIGEST = "ab" * 32


def test_second_conversion_is_the_first(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    gguf, cache = tiny_gguf(), tmp_path / "cache"
    stages: list[tuple[str, float]] = []
    first = convert_once(gguf, DIGEST, cache, lambda stage, done: stages.append((stage, done)))
    assert stages[0] == ("reading the tokenizer", 0.0)
    assert stages[-1] == ("converted", 1.0)
    assert [done for _, done in stages] == sorted(done for _, done in stages)

    stages.clear()
    assert convert_once(gguf, DIGEST, cache, lambda stage, done: stages.append((stage, done))) == first
    assert stages == []
    assert list(cache.glob("models/*.partial")) == []
    assert list((cache / "models").iterdir()) == [first]


def test_weights_and_template_survive(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    from gguf import GGUFReader, dequantize

    gguf = tiny_gguf()
    loaded = load_model(gguf, dtype="float32", cache_dir=tmp_path / "cache")
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(gguf).tensors}
    for name, key in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ]:
        assert torch.equal(loaded.model.state_dict()[key], torch.from_numpy(stored[name].copy())), name
    assert loaded.model.config.num_key_value_heads == 2
    text = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert text == "<|im_start|>the"
    # "th" is a merge of its own, after three special tokens and 256 bytes.
    assert loaded.tokenizer("th").input_ids == [259]


def test_killed_conversion_leaves_nothing_in_use(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    gguf, cache = tiny_gguf(), tmp_path / "cache"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from kvstrata.engines.transformers.gguf_conversion import convert_once\n"
        "def die(stage, done):\n"
        "    if stage.startswith('writing'): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"convert_once(Path(sys.argv[1]), {DIGEST!r}, Path(sys.argv[2]), die)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(gguf), str(cache)], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert len(list(cache.glob("models/*.partial"))) == 1

    path = convert_once(gguf, DIGEST, cache, lambda stage, done: None)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in path.iterdir()}
    assert list(cache.glob("models/*.partial")) == []


def test_two_processes_share_one_conversion(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    gguf, cache = tiny_gguf(), tmp_path / "cache"
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvstrata.engines.transformers.gguf_conversion import convert_once\n"
        f"path = convert_once(Path(sys.argv[1]), {DIGEST!r}, Path(sys.argv[2]), lambda stage, done: print(stage))\n"
        "print('at', path)\n"
    )
    command = [sys.executable, "-c", script, str(gguf), str(cache)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    lines = [line for stdout, _ in outputs for line in stdout.splitlines()]
    assert lines.count("converted") == 1
    assert len({line for line in lines if line.startswith("at ")}) == 1


@pytest.mark.parametrize("size", [0, 3, 4000])
def test_truncated_file_is_refused(tiny_gguf: Callable[..., Path], tmp_path: Path, size: int) -> None:
    gguf, cache = tiny_gguf(), tmp_path / "cache"
    os.truncate(gguf, size)
    with pytest.raises(ModelLoadError, match="cannot be read as a GGUF model") as refused:
        convert_once(gguf, DIGEST, cache, lambda stage, done: None)
    assert refused.value.reason is Reason.MODEL_UNAVAILABLE
    assert str(gguf) in refused.value.cause
    assert list((cache / "models").iterdir()) == []


def test_missing_weight_is_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    gguf = tiny_gguf(leave_out="blk.1.ffn_down")
    with pytest.raises(ModelLoadError, match=r"lacks weights that the model needs: .*1\.mlp\.down_proj"):
        convert_once(gguf, DIGEST, tmp_path / "cache", lambda stage, done: None)


def test_cache_that_cannot_be_written_is_named(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    blocked = tmp_path / "occupied"
    blocked.write_text("a file where a directory is needed")
    with pytest.raises(ModelLoadError, match="occupied") as refused:
        convert_once(tiny_gguf(), DIGEST, blocked, lambda stage, done: None)
    assert "KVSTRATA_CACHE" in refused.value.next_step


def test_failure_while_writing_leaves_no_directory(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    gguf, cache = tiny_gguf(), tmp_path / "cache"

    def fill_the_disk(stage: str, done: float) -> None:
        if stage.startswith("writing"):
            raise OSError(28, "No space left on device")

    with pytest.raises(ModelLoadError, match="No space left on device"):
        convert_once(gguf, DIGEST, cache, fill_the_disk)
    assert list((cache / "models").iterdir()) == []


def test_waiting_for_a_lock_that_its_holder_removes(tmp_path: Path) -> None:
    lock, inside, order = tmp_path / "lock", threading.Event(), list[str]()

    def second() -> None:
        with _exclusive(lock, inside.set):
            order.append("second")
            assert lock.exists()

    waiting = threading.Thread(target=second)
    with _exclusive(lock, lambda: None):
        waiting.start()
        assert inside.wait(60)
        order.append("first")
    waiting.join(60)
    assert order == ["first", "second"]
    assert not lock.exists()


def test_parts_give_what_the_whole_file_gives(tmp_path: Path) -> None:
    gguf = write_tiny_gemma_gguf(tmp_path / "tiny.gguf")
    whole = convert_once(gguf, DIGEST, tmp_path / "whole", lambda stage, done: None)
    joined = convert_once(cut(gguf, 4), DIGEST, tmp_path / "joined", lambda stage, done: None)
    names = sorted(file.name for file in whole.iterdir())
    assert sorted(file.name for file in joined.iterdir()) == names
    for name in names:
        assert (joined / name).read_bytes() == (whole / name).read_bytes(), name


def test_gemma_is_what_its_file_describes(tmp_path: Path) -> None:
    loaded = load_model(write_tiny_gemma_gguf(tmp_path / "tiny.gguf"), dtype="float32", cache_dir=tmp_path / "cache")
    config, reference = loaded.model.config, tiny_gemma()
    for field in (
        "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_parameters",
        "query_pre_attn_scalar", "rms_norm_eps", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
        "hidden_activation", "attention_bias", "attn_logit_softcapping", "final_logit_softcapping",
    ):  # fmt: skip
        assert getattr(config, field) == getattr(reference.config, field), field
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * (LAYERS - 6)
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert (loaded.model.generation_config.bos_token_id, loaded.model.generation_config.eos_token_id) == (BOS, EOS)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    for (name, weights), expected in zip(
        loaded.model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        # The file holds norm weights plus one, rounded.
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-7 if "norm" in name else 0)
    ids = torch.tensor([[BOS, 300, 301, 302]])
    with torch.inference_mode():
        torch.testing.assert_close(loaded.model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("add_bos", "begins"), [(True, True), (None, True), (False, False)])
def test_begin_marker_is_added_where_the_file_or_its_kind_asks_for_it(
    tmp_path: Path, add_bos: bool | None, begins: bool
) -> None:
    gguf = write_tiny_gemma_gguf(tmp_path / "tiny.gguf", add_bos=add_bos)
    tokenizer = load_model(gguf, dtype="float32", cache_dir=tmp_path / "cache").tokenizer
    ids = tokenizer("the mother").input_ids
    assert (ids[0] == BOS) is begins
    assert tokenizer.convert_ids_to_tokens(ids)[begins:] == ["the", "\u2581", "m", "o", "the", "r"]
    assert tokenizer("the", add_special_tokens=False).input_ids == [TOKENS.index("the")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the mother"
    assert tokenizer.chat_template is None
