"""Steps of one new column, run by a compiled version of the model's own forward (Ansel et al., 2024, PyTorch 2).

Weights stay inputs of the compiled code. Folding them into it (Inductor's freezing) would be faster, but would keep a
second, repacked copy of them beside the one that prefill needs, and would not see weights that change.
"""

from __future__ import annotations

import contextlib
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.engines.transformers.opaque_attention import OpaqueAttention
from kvstrata.engines.transformers.step_cache import StepCache
from kvstrata.errors import KvstrataError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.request import Request
    from kvstrata.ports import Clock

__all__ = ["Compilation", "CompilationState", "CompilationWarning", "StepCompiler"]

_OPTIONS: dict[str, Any] = {
    # One thread: no pool of workers outlives the block.
    "compile_threads": 1,
    # What is fused is a few thousand elements a step: waiting for threads takes longer, by far on a busy machine.
    # Matrix products are PyTorch's own and keep its threads.
    "cpp.threads": 1,
    "freezing": False,
    # Attention runs on the host; a recorded graph would leave it out.
    "triton.cudagraphs": False,
}
_SILENT = ("return_dict", "logits_to_keep")
"""Arguments that a step of one column may bring and that change nothing for it."""
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits")
_CAPTURING = "transformers.utils.output_capturing"


class CompilationState(StrEnum):
    """What became of `attach(..., compile=True)`; `WAITING` until the first step that can be compiled."""

    OFF = "off"
    WAITING = "waiting"
    COMPILED = "compiled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Compilation:
    """What was compiled, and what it cost.

    reason: why it failed, or the empty string. seconds: spent tracing and compiling, in all. graphs: versions that were
    compiled: one for a single sequence, one for batches of any size. steps: forward steps that ran compiled.
    """

    state: CompilationState = CompilationState.OFF
    reason: str = ""
    seconds: float = 0.0
    graphs: int = 0
    steps: int = 0


class CompilationWarning(RuntimeWarning):
    """Steps were to be compiled and run as they would without it; `memory.compilation` says why."""


class StepCompiler:
    """Compiles the model's forward when a step of one column first comes, and runs such steps.

    name: under which the attention function is registered with Transformers. cache_name: the forward's keyword for a
    cache.
    """

    def __init__(self, model: Any, name: str, cache_name: str, layers: int, clock: Clock = time.perf_counter) -> None:
        self.name = name
        self.attention = OpaqueAttention(layers)
        self.report = Compilation(CompilationState.WAITING)
        self._model = model
        self._cache_name = cache_name
        self._cache = StepCache(layers)
        self._clock = clock
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._inner: list[Any] = []
        self._step: Callable[..., Any] | None = None
        self._paused = False

    def open(self) -> None:
        """Make the attention function reachable."""
        self.attention.open()
        self._inner = [module for module in self._model.modules() if module is not self._model]

    def close(self) -> None:
        """Drop what was compiled."""
        self.attention.close()
        self._step, self._inner = None, []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block no step runs compiled."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def serves(self, named: dict[str, Any], kwargs: dict[str, Any]) -> bool:
        """Whether a step can run compiled: one column of known ids, nothing but logits wanted, no hooks."""
        if self._paused or self.report.state is CompilationState.FAILED:
            return False
        ids = named.get("input_ids")
        if ids is None or ids.shape[1] != 1:
            return False
        if not all(value is None or key in _SILENT or (key in _OUTPUTS and not value) for key, value in kwargs.items()):
            return False
        if any(getattr(self._model.config, name, False) for name in _OUTPUTS):
            return False
        # The model's own error for an id that it does not have is better than that of compiled code.
        if not all(0 <= token < self._vocabulary for token in ids.flatten().tolist()):
            return False
        # Compiled code does not see hooks that come later.
        return not torch.nn.modules.module._has_any_global_hook() and not any(map(_observed, self._inner))

    def run(
        self, original: Callable[..., Any], request: Request, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> Any:
        """The model's output for a step that `serves`; `None`, with nothing done, if it could not be compiled.

        input_ids, positions: [batch, 1]. Blocks while it compiles. Errors: what attention raises, unchanged.
        """
        # Of a plain shape and stride: a column cut out of a growing matrix has another stride at every step.
        columns = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (input_ids, positions)]
        graphs, start = _graphs(), self._clock()
        self.attention.begin(request)
        try:
            if self._step is None:
                self._step = self._compile(original)
            if len(input_ids) > 1:
                for tensor in columns:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            output = self._step(*columns)
            self.attention.end()
        except KvstrataError:
            raise
        except Exception as error:
            if self.attention.started:
                raise
            # PyTorch wraps what its backend raised.
            cause = getattr(error, "inner_exception", None) or error
            self._fail(f"{type(cause).__name__}: {cause}", self._clock() - start)
            return None
        finally:
            self.attention.release()
        compiled = _graphs() - graphs
        self.report = replace(
            self.report,
            state=CompilationState.COMPILED,
            seconds=self.report.seconds + (self._clock() - start if compiled else 0.0),
            graphs=self.report.graphs + compiled,
            steps=self.report.steps + 1,
        )
        if not self.report.graphs:
            self._fail("torch.compile is switched off in this process", 0.0)
        for field, value in output.items():
            if value is self._cache:
                output[field] = request.cache
        return output

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        given = {self._cache_name: self._cache, "use_cache": True, "attention_mask": None, "return_dict": True}

        def step(input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return original(input_ids=input_ids, position_ids=position_ids, **given)

        # PyTorch keeps compiled code on the code object. A copy of ours goes away with this object, and its versions
        # do not count towards the limit of versions of another attached model.
        code = step.__code__.replace()
        own = types.FunctionType(code, step.__globals__, step.__name__, step.__defaults__, step.__closure__)
        compiled: Callable[..., Any] = torch.compile(own, fullgraph=True, options=_OPTIONS)
        return compiled

    def _fail(self, reason: str, seconds: float) -> None:
        first = next(iter(reason.splitlines()), "")
        self._step = None
        self.report = replace(
            self.report, state=CompilationState.FAILED, reason=reason, seconds=self.report.seconds + seconds
        )
        warnings.warn(
            f"compile=True: steps are not compiled, all run as without it: {first}\n"
            "  next: see memory.compilation.reason; a C++ compiler is needed, `kvstrata doctor` looks for one",
            CompilationWarning,
            stacklevel=2,
        )


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _observed(module: Any) -> bool:
    if "forward" in vars(module):
        return True
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    # Transformers leaves its own on a model that was ever asked for hidden states; they do nothing unless asked again.
    return any(getattr(hook, "__module__", None) != _CAPTURING for hook in hooks)
