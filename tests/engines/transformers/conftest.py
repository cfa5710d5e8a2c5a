"""A GGUF file that converts in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 2, 4, 2, 8, 32


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_llama: Callable[..., Any]) -> Callable[..., Path]:
    """`tiny_gguf(name, leave_out=...)`: a Llama of a few thousand weights with a byte-level vocabulary."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    def write(name: str = "tiny.gguf", *, leave_out: str | None = None) -> Path:
        tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "th"]
        model = tiny_llama(
            layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, vocabulary=len(tokens)
        )
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("tiny")
        writer.add_context_length(512)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(2 * WIDTH)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
        writer.add_token_merges(["t h"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template("{% for message in messages %}<|im_start|>{{ message['content'] }}{% endfor %}")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
        for key, value in model.state_dict().items():
            stem = names.get_name(key.removesuffix(".weight"))
            if stem != leave_out:
                writer.add_tensor(f"{stem}.weight", value.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
