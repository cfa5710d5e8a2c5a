"""A GGUF file becomes a Transformers directory, once.

Reading GGUF takes Transformers tens of seconds even for a small model: the vocabulary is walked in Python at each of
several passes, and the table of tensor names is rebuilt for every module. The converted directory loads in about one.
Weights are dequantised to float32, because values of the block formats (a scale and an offset per block, both in half
precision) are not representable in bfloat16; the cast happens at load.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstrata.errors import ModelLoadError, Reason

__all__ = ["CONVERSION_VERSION", "Progress", "convert_once"]

CONVERSION_VERSION = 1
"""Raised whenever the same GGUF file would give other weights; part of the model's identity."""

Progress = Callable[[str, float], None]
"""Called with the name of the stage that begins and the fraction done before it, 0 to 1."""

SINGLE_PRECISION_FIELDS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
"""Fields of a configuration that GGUF keeps in single precision: read back, 1e-6 is 9.999999974752427e-07."""

BEGINS_WITH_BOS: Mapping[str, bool] = {"llama": True, "gemma4": False}
"""Whether a prompt begins with the begin marker, by the kind of vocabulary, for files that do not say so themselves.
Transformers 5.19 leaves it out even where the file asks for it, and Gemma answers nonsense without it."""


def convert_once(gguf: Path | Sequence[Path], digest: str, cache_dir: Path, progress: Progress) -> Path:
    """The Transformers directory for `gguf`, converted unless it already lies under `cache_dir`.

    gguf: the file, or the parts it is cut into, in order.
    digest: BLAKE3 of the whole file, hexadecimal; with the conversion's version it names the directory.

    A directory appears under its final name only when complete. A second process that asks meanwhile waits for the
    first; what a killed process left is removed by the next. Blocks for up to a minute for a small model.
    Errors: ModelLoadError if the file is not a model that Transformers can read, or the cache cannot be written.
    """
    target = cache_dir / "models" / f"gguf{CONVERSION_VERSION}-{digest[:32]}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.with_suffix(".lock"), lambda: progress("waiting for another process's conversion", 0.0)):
            if not target.is_dir():
                _convert([gguf] if isinstance(gguf, Path) else gguf, target, progress)
    except ModelLoadError:
        raise
    except OSError as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"the converted model cannot be written to {target.parent}: {error}",
            "free some space there, or name another place with cache_dir= or the variable KVSTRATA_CACHE",
        ) from error
    return target


def _convert(parts: Sequence[Path], target: Path, progress: Progress) -> None:
    for abandoned in target.parent.glob(f"{target.name}.*.partial"):
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".partial", dir=target.parent))
    try:
        with _joined(parts, partial) as gguf:
            model, tokenizer = _read_gguf(gguf, progress)
        progress("writing the converted model", 0.9)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        _sync_files(partial)
        partial.chmod(0o755)
        partial.rename(target)
        progress("converted", 1.0)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _joined(parts: Sequence[Path], directory: Path) -> Iterator[Path]:
    """One file; if it comes in parts, a copy in `directory` until the block ends."""
    if len(parts) == 1:
        yield parts[0]
        return
    whole = directory / re.sub(r"\.part\d+$", "", parts[0].name)
    with whole.open("xb") as target:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, target)
    yield whole
    whole.unlink()


def _read_gguf(gguf: Path, progress: Progress) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.integrations.gguf import read_gguf_metadata

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
    try:
        progress("reading the tokenizer", 0.0)
        metadata, _ = read_gguf_metadata(str(gguf))
        # AutoTokenizer would walk the whole file once more only to choose this class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**place, add_bos_token=_begins_with_bos(metadata))
        progress("reading the configuration", 0.05)
        config = _rounded(AutoConfig.from_pretrained(**place))
        progress("dequantising the weights", 0.3)
        model, report = AutoModelForCausalLM.from_pretrained(
            **place, config=config, dtype=torch.float32, output_loading_info=True
        )
    except MemoryError:
        raise
    except Exception as error:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{gguf} cannot be read as a GGUF model: {type(error).__name__}: {error}",
            "check that the download is complete and that Transformers supports the architecture; "
            "'gguf' and 'accelerate' must be installed",
        ) from error
    if report["missing_keys"]:
        raise ModelLoadError(
            Reason.MODEL_UNAVAILABLE,
            f"{gguf} lacks weights that the model needs: {', '.join(sorted(report['missing_keys'])[:3])}",
            "fetch the file again, or use a Transformers directory of the same model",
        )
    _forget_quantisation(model)
    return model, tokenizer


def _begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    kind = metadata.get("tokenizer.ggml.model")
    return bool(metadata.get("tokenizer.ggml.add_bos_token", BEGINS_WITH_BOS.get(str(kind), False)))


def _rounded(config: Any) -> Any:
    """The fields of SINGLE_PRECISION_FIELDS as the shortest number with the same value in single precision."""
    for name in SINGLE_PRECISION_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, float):
            setattr(config, name, float(str(np.float32(value))))
    return config


def _forget_quantisation(model: Any) -> None:
    # The weights are plain float32 now; with these marks left, saving is refused.
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None


def _sync_files(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as stream:
            os.fsync(stream.fileno())


@contextlib.contextmanager
def _exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an advisory lock on `path`; the system releases it when the process ends, however it ends.

    The holder removes the file before it lets go. Who waited for that file then holds the lock of a file that is no
    longer there, and begins anew.
    """
    while True:
        with path.open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(stream, fcntl.LOCK_EX)
            if not _is_at(stream.fileno(), path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
