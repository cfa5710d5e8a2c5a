"""What is replaced on a model while it is attached, and put back afterwards."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import StoppingCriteriaList

from kvstrata.engines.transformers import attention
from kvstrata.engines.transformers.cache import RequestCache
from kvstrata.engines.transformers.compilation import StepCompiler
from kvstrata.engines.transformers.versions import cache_keyword
from kvstrata.errors import Reason, StateError, UnsupportedError

if TYPE_CHECKING:
    from kvstrata.engines.transformers.memory import Memory
    from kvstrata.engines.transformers.request import Request

__all__ = ["Wrapping"]

_CRITERIA = "_get_stopping_criteria"


class Wrapping:
    """Replaces `forward` on one model object, and listens to what `generate` says of ended sequences.

    original: the model's own forward, `None` outside. cache_name: its keyword for a cache. quiet_kwargs:
    keyword arguments of a forward call whose logits nobody wants.
    compiler: what runs steps of one column, `None` without `compile=True`.
    """

    def __init__(self, memory: Memory, compiled: bool = False) -> None:
        self._memory = memory
        self._model = memory.model
        self._name = f"kvstrata-{id(memory):x}"
        self._implementation: str | None = None
        self._stock = 0
        self.original: Callable[..., Any] | None = None
        accepted = inspect.signature(self._model.forward).parameters
        self.cache_name = cache_keyword(self._model)
        self.quiet_kwargs: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._names = list(accepted)
        layers = memory.context.abi.layers
        self.compiler = (
            StepCompiler(self._model, f"{self._name}-compiled", self.cache_name, layers) if compiled else None
        )

    @property
    def attached(self) -> bool:
        """Whether the model is replaced now."""
        return self.original is not None

    def enter(self) -> None:
        """Replace. Errors: `StateError` when something else has replaced the model's forward."""
        if "forward" in vars(self._model):
            raise StateError(
                Reason.ALREADY_ATTACHED, "the model's forward is replaced already", "leave the other `with` block first"
            )
        attention.register(self._name, attention.eager_attention)
        if self.compiler is not None:
            self.compiler.open()
            attention.register(self.compiler.name, self.compiler.attention.function())
        self.original = self._model.forward
        self._implementation = self._model.config._attn_implementation
        # Bound methods, so that a deep copy of the model gets its own and not a way to this model.
        self._model.forward = types.MethodType(self._forward(), self._model)
        if hasattr(self._model, "generate_batch"):
            self._model.generate_batch = types.MethodType(self._generate_batch(), self._model)
        if hasattr(self._model, _CRITERIA):
            self._model.generate = types.MethodType(self._generate(), self._model)
            setattr(self._model, _CRITERIA, types.MethodType(self._stopping_criteria(), self._model))

    def leave(self) -> None:
        """Put everything back."""
        self.original = None
        del self._model.forward
        for name in ("generate", "generate_batch", _CRITERIA):
            vars(self._model).pop(name, None)
        attention.unregister(self._name)
        if self.compiler is not None:
            attention.unregister(self.compiler.name)
            self.compiler.close()

    def compute(
        self,
        inner: Callable[..., Any],
        request: Request,
        named: dict[str, Any],
        positions: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> Any:
        """The output of the model's own forward, `inner`, for one step of `request`, compiled where that is possible.

        named: `input_ids` or `inputs_embeds` by name. positions: [batch, columns]. kwargs: what else the caller passed.
        """
        compiler = self.compiler
        if compiler is not None and compiler.serves(named, kwargs):
            with self._engaged(compiler.name):
                output = compiler.run(inner, request, named["input_ids"], positions)
            if output is not None:
                return output
        with self._engaged(self._name):
            given = {self.cache_name: request.cache, "use_cache": True, "attention_mask": None}
            return inner(**named, **kwargs, **given, position_ids=positions)

    @contextlib.contextmanager
    def _engaged(self, name: str) -> Iterator[None]:
        """For one step, let the model call the attention function `name` instead of its own."""
        self._model.config._attn_implementation = name
        try:
            yield
        finally:
            self._model.config._attn_implementation = self._implementation

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Let calls with other caches pass."""
        self._stock += 1
        try:
            yield
        finally:
            self._stock -= 1

    def _forward(self) -> Callable[..., Any]:
        original, memory, names = self.original, self._memory, self._names
        assert original is not None
        function = original.__func__  # type: ignore[attr-defined]

        @functools.wraps(function)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs.update(zip(names, args, strict=False))
            cache = kwargs.get("past_key_values")
            if cache is None:
                cache = kwargs.get("cache")
            if isinstance(cache, RequestCache):
                memory.require_own(cache.request, model)
                return cache.request.forward(original, kwargs.pop("input_ids", None), kwargs)
            if cache is not None and not self._stock and model is memory.model:
                raise UnsupportedError(
                    Reason.OPERATION_UNSUPPORTED,
                    f"the call brings a {type(cache).__name__}, which is not this memory's",
                    "pass **memory.generate_kwargs(), or make the call inside `with memory.stock():`",
                )
            return function(model, **kwargs)

        return forward

    def _generate(self) -> Callable[..., Any]:
        memory = self._memory
        function = self._model.generate.__func__

        @functools.wraps(function)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is memory.model and not self._stock and _early_exit(model, args, kwargs):
                # Refused here: an error within its drafts would leave the model with fewer layers.
                raise UnsupportedError(
                    Reason.OPERATION_UNSUPPORTED,
                    "assistant_early_exit lets the first layers of this model draft with a cache of their own",
                    "pass assistant_model or prompt_lookup_num_tokens, or make the call inside `with memory.stock():`",
                )
            try:
                return function(model, *args, **kwargs)
            finally:
                # However the call ended: what comes next is said by the caller, and belongs to all sequences.
                if model is memory.model:
                    memory.end_generation()

        return generate

    def _generate_batch(self) -> Callable[..., Any]:
        memory = self._memory
        function = self._model.generate_batch.__func__

        @functools.wraps(function)
        def generate_batch(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is memory.model and not self._stock:
                # Refused here: it would call the model in a thread of its own, where a refusal is a line in the log.
                raise UnsupportedError(
                    Reason.OPERATION_UNSUPPORTED,
                    "generate_batch brings a paged cache of its own",
                    "pass a padded batch to generate, or make the call inside `with memory.stock():`",
                )
            return function(model, *args, **kwargs)

        return generate_batch

    def _stopping_criteria(self) -> Callable[..., Any]:
        memory = self._memory
        function = getattr(self._model, _CRITERIA).__func__

        @functools.wraps(function)
        def criteria(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is memory.model:
                return _Listening(function(model, *args, **kwargs), memory.finish)
            return function(model, *args, **kwargs)

        return criteria


def _early_exit(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    settings = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config
    return kwargs.get("assistant_early_exit", getattr(settings, "assistant_early_exit", None)) is not None


class _Listening(StoppingCriteriaList):
    """The criteria as they were, and somebody who is told which sequences they end."""

    def __init__(self, criteria: list[Any], tell: Callable[[list[bool]], None]) -> None:
        super().__init__(criteria)
        self._tell = tell

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        self._tell(done.tolist())
        return done
