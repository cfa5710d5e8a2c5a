"""What a run did, as a table and as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvstrata.lab.soak.simulator import ACTIONS, SeedResult

__all__ = ["as_json", "as_table", "rare"]


def rare(results: Sequence[SeedResult]) -> list[str]:
    """Actions that came less than once in 10,000 steps."""
    steps, done = sum(each.steps for each in results), _actions(_total(results))
    return [name for name in ACTIONS if done[name] * 10_000 < steps]


def as_json(results: Sequence[SeedResult], seconds: float) -> dict[str, Any]:
    """Steps, their rate, what was done how often, and every failure with what reproduces it."""
    counts, steps = _total(results), sum(each.steps for each in results)
    failures = [each.failure for each in results if each.failure is not None]
    return {
        "seeds": [each.seed for each in results],
        "steps": steps,
        "steps_per_s": round(steps / seconds, 1) if seconds > 0 else None,
        "seconds": round(seconds, 1),
        "counts": dict(sorted(counts.items())),
        "rare": rare(results),
        "failures": [
            {"seed": each.seed, "step": each.step, "what": each.what, "recent": each.recent, "where": each.where}
            for each in failures
        ],
        "ok": not failures,
    }


def as_table(results: Sequence[SeedResult], seconds: float) -> str:
    """The same for reading: a line for each action with its outcomes, then the faults, then the failures."""
    data, counts = as_json(results, seconds), _total(results)
    lines = [
        f"{data['steps']} steps, seeds {data['seeds'][0]} to {data['seeds'][-1]}, {data['steps_per_s']} steps/s",
        "",
    ]
    for group in [*ACTIONS, "fault", "transfer"]:
        found = {name.partition(".")[2]: n for name, n in counts.items() if name.partition(".")[0] == group}
        outcomes = ", ".join(f"{name} {n}" for name, n in sorted(found.items(), key=lambda item: -item[1]))
        lines.append(f"{group:20} {sum(found.values()):9}  {outcomes}")
    single = {name: n for name, n in counts.items() if "." not in name}
    lines += [f"{name:20} {n:9}" for name, n in sorted(single.items())]
    for failure in data["failures"]:
        lines += [
            "",
            f"BROKEN: {failure['what']}",
            f"  seed {failure['seed']}, step {failure['step']}: "
            f"python -m kvstrata.lab.soak --seed {failure['seed']} --steps {failure['step'] + 1}",
            *(f"  {action}" for action in failure["recent"]),
            *(f"  at {place}" for place in failure["where"]),
        ]
    lines += ["", f"{len(data['failures'])} broken invariants"]
    return "\n".join(lines) + "\n"


def _total(results: Sequence[SeedResult]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in results:
        total.update(each.counts)
    return total


def _actions(counts: Counter[str]) -> Counter[str]:
    done: Counter[str] = Counter()
    for name, n in counts.items():
        action, _, outcome = name.partition(".")
        done[action] += 0 if outcome == "idle" else n
    return done
