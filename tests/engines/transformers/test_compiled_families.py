"""Every family in every mode of generation, compiled for real, against the same memory without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import CHUNK, attach, least_budget
from matrix_runs import Run, assistant_of, generate, model_of, padded, run, tokens
from tiny_models import FAMILY_NAMES, WINDOW

from kvstrata.engines.transformers.compilation import CompilationState

pytestmark = [pytest.mark.compile, pytest.mark.timeout(1200)]
"""A compiler on a busy machine takes minutes for one model."""

NEW = CHUNK + 6
"""Steps that pass the end of a chunk, and of a sliding window."""

TOLERANCE = 1e-4


def require_equal(ours: Run, expected: Run) -> None:
    assert ours.made == expected.made
    for row in range(len(ours.prompts)):
        assert torch.allclose(ours.logits(row), expected.logits(row), atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_single_sequences_batches_beams_and_drafts(tmp_path: Path, family: str) -> None:
    model = model_of(family)
    single = padded([tokens(2 * WINDOW + 5)])
    batch = padded([tokens(WINDOW - 9, seed=3), tokens(9, seed=4), tokens(CHUNK + 1, seed=5)])
    beams = {"num_beams": 3, "early_stopping": True}
    found: dict[bool, list[Any]] = {}
    for compiled in (False, True):
        with attach(model, tmp_path / f"store-{compiled}", model_id="m", compile=compiled) as memory:
            one = run(model, single, memory.generate_kwargs(), NEW)
            ends = memory.compilation.steps
            assert ends == (NEW if compiled else 0)
            many = run(model, batch, memory.generate_kwargs(), NEW)
            assert memory.compilation.steps == 2 * ends
            # Beams and drafts: steps of one column run compiled, all others do not.
            best = generate(model, single, memory.generate_kwargs(), 9, **beams).sequences.tolist()
            drafted = generate(model, single, memory.generate_kwargs(), 9, assistant_model=assistant_of(family))
            memory.save("talk", memory.latest)
            request, receipt = memory.restore("talk", drafted.sequences[0].tolist())
            assert receipt.hit
            ids = drafted.sequences
            again = generate(model, (ids, torch.ones_like(ids)), request.generate_kwargs(), 9).sequences.tolist()
            found[compiled] = [one, many, best, ids.tolist(), again]
            done = memory.compilation
    assert (done.state, done.graphs) == (CompilationState.COMPILED, 2)
    require_equal(found[True][0], found[False][0])
    require_equal(found[True][1], found[False][1])
    assert found[True][2:] == found[False][2:]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_rows_that_come_from_files(tmp_path: Path, family: str) -> None:
    model, ids = model_of(family), tokens(7 * CHUNK + 11)
    budget = least_budget(model, len(ids) + NEW, tmp_path / "probe", model_id="m")
    runs = {}
    for compiled in (False, True):
        store = tmp_path / f"store-{compiled}"
        with attach(model, store, model_id="m", compile=compiled, budget=budget) as memory:
            runs[compiled] = run(model, padded([ids]), memory.generate_kwargs(), NEW)
            assert memory.ledger().traffic["file"].moved_bytes > 0
            assert memory.ledger().peak_device_bytes <= budget
    require_equal(runs[True], runs[False])


def test_a_restored_request_gets_the_bits_of_a_cold_one(tmp_path: Path) -> None:
    """Within one mode: both compute the prompt's last token, and all after it, by the same compiled code."""
    model, ids = model_of("llama"), torch.tensor([tokens(3 * CHUNK + 20)])
    batch = (ids, torch.ones_like(ids))
    with attach(model, tmp_path / "store", model_id="m", compile=True) as memory:
        request = memory.prefill(ids[0].tolist())
        memory.save("talk")
        cold = generate(model, batch, request.generate_kwargs(), NEW)
    with attach(model, tmp_path / "store", model_id="m", compile=True) as memory:
        request, receipt = memory.restore("talk", ids[0].tolist())
        assert receipt.hit
        restored = generate(model, batch, request.generate_kwargs(), NEW)
        assert memory.compilation.steps == NEW
    assert torch.equal(torch.cat(cold.logits), torch.cat(restored.logits))


_PROGRAM = """
import sys, warnings
import torch
from engine_cases import attach, generate, prompt
from matrix_runs import model_of
from kvstrata.engines.transformers.compilation import CompilationWarning

model, ids = model_of("llama"), prompt(20) % 199
with attach(model, sys.argv[1], model_id="m") as memory:
    expected = generate(model, ids, 4, memory.generate_kwargs())
with attach(model, sys.argv[1], model_id="m", compile=True) as memory:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = generate(model, ids, 4, memory.generate_kwargs())
    print(memory.compilation.state, memory.compilation.steps, bool(memory.compilation.reason))
print(sum(each.category is CompilationWarning for each in caught))
print(torch.equal(torch.cat(ours.logits), torch.cat(expected.logits)))
"""


def test_a_machine_without_a_compiler(tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": "/bin/false",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["failed", "0", "True", "1", "True"]
