"""Which steps run compiled, what is reported, what happens when compiling fails, and what is left behind.

Most tests trace the model and run the trace as it is: that takes a second where a compiler takes many.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks_and_faults import flip
from engine_cases import CHUNK, attach, generate, least_budget, logits, prompt
from matrix_runs import padded, tokens

from kvstrata.engines.transformers.compilation import Compilation, CompilationState, CompilationWarning
from kvstrata.engines.transformers.families import capture_keys, family_of
from kvstrata.errors import Reason

LENGTH = 2 * CHUNK - 3
NEW = 8


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs are run as they were traced; the list holds them."""
    graphs: list[Any] = []

    def compile_fx(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return graphs


def running() -> set[str]:
    """Names of threads, without the one that tqdm keeps once it has shown, or not shown, any progress bar."""
    return {thread.name for thread in threading.enumerate() if type(thread).__name__ != "TMonitor"}


def settings() -> tuple[Any, ...]:
    """Everything global that a compiled run could have changed."""
    import torch._dynamo.config
    import torch._inductor.config

    return (
        torch._dynamo.config.get_config_copy(),
        torch._inductor.config.get_config_copy(),
        running(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_a_compiled_run_says_the_same_and_leaves_nothing_behind(
    tiny_llama: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest, real: bool
) -> None:
    if not real:
        request.getfixturevalue("traced")
    model, ids = tiny_llama(), prompt(LENGTH)
    with attach(model, tmp_path / "eager") as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
        assert memory.compilation == Compilation()
        threads = running()
    before, attributes, config = settings(), set(vars(model)), model.config.to_dict()
    with attach(model, tmp_path / "compiled", compile=True) as memory:
        assert memory.compilation.state is CompilationState.WAITING
        memory.prefill(ids[0].tolist())
        assert memory.compilation.steps == 0
        ours = generate(model, ids, NEW, memory.latest.generate_kwargs())
        done = memory.compilation
        assert running() == threads
    assert (done.state, done.reason, done.graphs, done.steps) == (CompilationState.COMPILED, "", 1, NEW)
    assert done.seconds > 0
    assert memory.compilation == done
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert torch.allclose(logits(ours), logits(expected), atol=1e-4)
    assert ours.past_key_values is memory.latest.cache
    assert settings() == before
    assert (set(vars(model)), model.config.to_dict()) == (attributes, config)
    gone = weakref.ref(model)
    del model, memory, ours, expected
    gc.collect()
    assert gone() is None


def test_lengths_requests_and_batch_sizes_are_not_compiled_again(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]
) -> None:
    """One version for a single sequence and one for batches, whichever request it is."""
    model, ids = tiny_llama(), prompt(LENGTH)

    def talk(memory: Any) -> list[Any]:
        said = []
        for count in (1, 3, 2, 5, 1):
            batch = padded([tokens(40 + 7 * row) for row in range(count)])
            said.append(
                model.generate(batch[0], attention_mask=batch[1], **memory.generate_kwargs(), max_new_tokens=NEW)
            )
        first = generate(model, ids, NEW, memory.generate_kwargs()).sequences
        memory.save("talk")
        request, receipt = memory.restore("talk", first[0].tolist())
        assert receipt.hit
        return [*said, first, generate(model, first, NEW, request.generate_kwargs()).sequences]

    with attach(model, tmp_path / "eager") as memory:
        expected = talk(memory)
    with attach(model, tmp_path / "compiled", compile=True) as memory:
        found = talk(memory)
        assert [rows.tolist() for rows in found] == [rows.tolist() for rows in expected]
        assert (memory.compilation.graphs, len(traced)) == (2, 2)
        assert memory.compilation.steps >= 7 * (NEW - 1)


def test_many_attachments_do_not_use_up_pytorchs_limit_of_versions(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]
) -> None:
    import torch._dynamo.config

    model = tiny_llama(layers=1)
    for number in range(4):
        with (
            torch._dynamo.config.patch(recompile_limit=2),
            attach(model, tmp_path / "store", compile=True) as memory,
        ):
            generate(model, prompt(5, seed=number), 2, memory.generate_kwargs())
            assert memory.compilation.state is CompilationState.COMPILED
    assert len(traced) == 4


def test_what_is_no_single_token_runs_eagerly(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]
) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    embeddings = model.get_input_embeddings()
    with attach(model, tmp_path / "store", compile=True) as memory, torch.no_grad():
        cache = memory.request().cache
        model(ids, past_key_values=cache)
        model(inputs_embeds=embeddings(ids[:, :1]), past_key_values=cache)
        hidden = model(ids[:, :1], past_key_values=cache, output_hidden_states=True).hidden_states
        assert len(hidden) == 3
        model.config.output_hidden_states = True
        assert model(ids[:, :1], past_key_values=cache).hidden_states is not None
        model.config.output_hidden_states = False
        with pytest.raises(IndexError):
            model(torch.tensor([[5000]]), past_key_values=cache)
        assert memory.compilation == Compilation(CompilationState.WAITING)
        model(ids[:, :1], past_key_values=cache, output_hidden_states=False, logits_to_keep=1, labels=None)
        assert memory.compilation.steps == 1
        with memory.wrapping.compiler.paused():
            model(ids[:, :1], past_key_values=cache)
        assert memory.compilation.steps == 1


def test_hooks_are_called(tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]) -> None:
    """Compiled code would pass by hooks that were added after it was compiled."""
    model, ids = tiny_llama(), prompt(LENGTH)
    with attach(model, tmp_path / "store", compile=True) as memory:
        out = generate(model, ids, 3, memory.generate_kwargs())
        steps, seen = memory.compilation.steps, list[int]()
        with capture_keys(model, family_of(model), lambda layer, keys: seen.append(layer)):
            model(out.sequences[:, -1:], past_key_values=memory.latest.cache)
        assert (seen, memory.compilation.steps) == ([0, 1], steps)
        model(out.sequences[:, -1:], past_key_values=memory.latest.cache)
        assert (seen, memory.compilation.steps) == ([0, 1], steps + 1)


def test_changed_weights_are_seen(tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    with attach(model, tmp_path / "store", compile=True, model_id="m") as memory, torch.no_grad():
        request = memory.prefill(ids[0].tolist())
        first = model(ids[:, -1:], past_key_values=request.cache).logits
        model.lm_head.weight.mul_(2.0)
        request.cache.crop(-1)
        assert torch.equal(model(ids[:, -1:], past_key_values=request.cache).logits, 2 * first)
        assert memory.compilation.steps == 2


def test_inference_mode_and_none(tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    with attach(model, tmp_path / "store", compile=True) as memory:
        request = memory.prefill(ids[0].tolist())
        found = []
        for mode in (True, False, True, False):
            with torch.inference_mode(mode):
                found.append(model(ids[:, -1:].clone(), past_key_values=request.cache).logits.clone())
                request.cache.crop(-1)
        assert all(torch.equal(rows, found[0]) for rows in found)
        assert (memory.compilation.steps, memory.compilation.graphs) == (4, 2)


def test_damage_in_the_middle_of_a_compiled_step(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]
) -> None:
    _damaged_in_the_middle(tiny_llama(layers=3), tmp_path, bits=True)


@pytest.mark.compile
def test_damage_in_the_middle_of_a_step_of_a_real_compiler(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    _damaged_in_the_middle(tiny_llama(layers=3), tmp_path, bits=False)


def _damaged_in_the_middle(model: Any, tmp_path: Path, bits: bool) -> None:
    ids = prompt(6 * CHUNK + 21)
    budget = least_budget(model, ids.shape[1] + NEW, tmp_path / "probe")
    with attach(model, tmp_path / "undamaged", budget=budget) as memory:
        request = memory.prefill(ids[0].tolist())
        expected = generate(model, ids, NEW, request.generate_kwargs())
    with attach(model, tmp_path / "store", budget=budget, compile=True) as memory:
        request = memory.prefill(ids[0].tolist())
        head = generate(model, ids, 3, request.generate_kwargs()).sequences
        record = request.history.chunks[2]
        memory.save("talk")
        request.plan.yield_memory()
        memory._attached().files.close()
        path = memory.store.tier.path(record.digest)
        flip(path, path.stat().st_size - 100, bit=3)
        ours = generate(model, head, NEW - 3, request.generate_kwargs())
        assert [item.reason for item in memory.ledger().recomputes] == [Reason.CHUNK_DAMAGED]
        assert memory.compilation.state is CompilationState.COMPILED
        assert memory.compilation.graphs == 1
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert torch.allclose(logits(ours), logits(expected)[3:], atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
def test_ctrl_c_in_the_middle_of_a_compiled_step(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any], monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    with attach(model, tmp_path / "eager") as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
    with attach(model, tmp_path / "store", compile=True) as memory:
        request = memory.request()
        head = generate(model, ids, 3, request.generate_kwargs()).sequences
        attend = request.attend

        def interrupted(number: int, *args: Any) -> Any:
            if number == layer:
                raise KeyboardInterrupt
            return attend(number, *args)

        monkeypatch.setattr(request, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(model, head, NEW - 3, request.generate_kwargs())
        monkeypatch.undo()
        assert not request.in_step
        assert request.token_ids == head[0, :-1].tolist()
        ours = generate(model, head, NEW - 3, request.generate_kwargs())
        assert ours.sequences.tolist() == expected.sequences.tolist()
        assert memory.compilation.state is CompilationState.COMPILED


def test_ctrl_c_while_compiling(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    calls: list[Any] = []

    def compile_fx(graph: Any, inputs: Any, **options: Any) -> Any:
        calls.append(graph)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    with attach(model, tmp_path / "store", compile=True) as memory:
        request = memory.prefill(ids[0].tolist())
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, 2, request.generate_kwargs())
        assert request.frontier == LENGTH - 1
        assert memory.compilation == Compilation(CompilationState.WAITING)
        generate(model, ids, 2, request.generate_kwargs())
        assert (len(calls), memory.compilation.steps) == (2, 2)


def test_a_compiler_that_fails_is_reported_and_done_without(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)

    def compile_fx(graph: Any, inputs: Any, **options: Any) -> Any:
        raise OSError("no such compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    with attach(model, tmp_path / "eager") as memory:
        expected = generate(model, ids, NEW, memory.generate_kwargs())
    with attach(model, tmp_path / "store", compile=True) as memory:
        with pytest.warns(CompilationWarning, match="no such compiler") as warned:
            ours = generate(model, ids, NEW, memory.generate_kwargs())
        done = memory.compilation
        assert len([each for each in warned if each.category is CompilationWarning]) == 1
        assert (done.state, done.steps, done.graphs) == (CompilationState.FAILED, 0, 0)
        assert "no such compiler" in done.reason
    assert ours.sequences.tolist() == expected.sequences.tolist()
    assert torch.equal(logits(ours), logits(expected))


def test_a_process_without_torch_compile_is_reported(
    tiny_llama: Callable[..., Any], tmp_path: Path, traced: list[Any]
) -> None:
    model, ids = tiny_llama(), prompt(LENGTH)
    with (
        torch.compiler.set_stance("force_eager"),
        attach(model, tmp_path / "store", compile=True) as memory,
        pytest.warns(CompilationWarning, match="switched off"),
    ):
        generate(model, ids, 3, memory.generate_kwargs())
    assert memory.compilation.state is CompilationState.FAILED
    assert not traced
