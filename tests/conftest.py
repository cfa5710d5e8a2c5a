"""What all tests share: fixed threads, no network, real and tiny models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Read once, when PyTorch and the hub client are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "2"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Shared machines stall: no test may fail by the clock. A failure prints the blob that repeats it.
settings.register_profile("kvstrata", deadline=None, print_blob=True)
settings.load_profile("kvstrata")


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_arrives() -> Iterator[None]:
    """A process that was started in the background is born with SIGINT ignored, and hands that on to its children."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    """The order of floating-point sums depends on the number of threads."""
    import torch

    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a Transformers directory, converted at most once into the user's kvstrata cache."""
    from kvstrata.engines.transformers.model_sources import prepare_model

    return prepare_model("smollm2").path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Callable[[str], Any]:
    """`smollm2(dtype)`: the `LoadedModel`, loaded once for each dtype. Leave it as you found it."""
    from kvstrata.engines.transformers.loading import LoadedModel, load_model

    loaded: dict[str, LoadedModel] = {}

    def load(dtype: str = "bfloat16") -> LoadedModel:
        if dtype not in loaded:
            loaded[dtype] = load_model("smollm2", dtype=dtype)
        return loaded[dtype]

    return load


@pytest.fixture
def tiny_llama() -> Callable[..., Any]:
    """`tiny_llama(dtype, ...)`: a new Llama with random weights, the same ones for the same arguments.

    The weights are larger than an untrained model's, so that attention is far from uniform and an error shows.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(
        dtype: str = "float32",
        *,
        layers: int = 2,
        query_heads: int = 6,
        kv_heads: int = 2,
        head_dim: int = 16,
        vocabulary: int = 256,
        positions: int = 4096,
        seed: int = 0,
        theta: float = 10000.0,
    ) -> Any:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=query_heads * head_dim,
            intermediate_size=2 * query_heads * head_dim,
            num_hidden_layers=layers,
            num_attention_heads=query_heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            initializer_range=0.15,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            bos_token_id=1,
            eos_token_id=None,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(config)
        return model.to(getattr(torch, dtype)).eval()

    return build
