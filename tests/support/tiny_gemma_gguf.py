"""A Gemma 3 of a few thousand weights as a GGUF file: a sentencepiece vocabulary, no merges, no chat template."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, WINDOW, CONTEXT = 7, 4, 1, 16, 32, 512, 32768
PAD, EOS, BOS, UNKNOWN = range(4)
TOKENS = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581", *string.printable[:94].strip(), "th", "the", "\u2581the", "\n", "  ",
]  # fmt: skip


def tiny_gemma(**changes: Any) -> Any:
    """The model that `write_tiny_gemma_gguf` writes; the same weights on every call."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    settings: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "sliding_window": WINDOW,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**settings | changes))
        for name, weights in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(weights, std=0.2)
    return model.eval()


def write_tiny_gemma_gguf(path: Path, *, add_bos: bool | None = True) -> Path:
    """Write the file as llama.cpp's converter does: norm weights are one larger. add_bos: `None` leaves it unsaid."""
    import gguf

    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("tiny gemma")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(WINDOW)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-1000.0] * len(TOKENS))
    writer.add_token_types([3, 3, 3, 2, 4] + [6] * 256 + [1] * (len(TOKENS) - 261))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_pad_token_id(PAD)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    for key, value in tiny_gemma().state_dict().items():
        if key == "lm_head.weight":
            continue
        weights = value.numpy() + np.float32(1) if "norm" in key else value.numpy()
        writer.add_tensor(f"{names.get_name(key.removesuffix('.weight'))}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cut(path: Path, parts: int) -> list[Path]:
    """The file as `parts` files beside it, named `.part00` and on."""
    whole = path.read_bytes()
    size = -(-len(whole) // parts)
    made = [path.with_name(f"{path.name}.part{number:02}") for number in range(parts)]
    for number, part in enumerate(made):
        part.write_bytes(whole[number * size : (number + 1) * size])
    return made
