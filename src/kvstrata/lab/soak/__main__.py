"""`python -m kvstrata.lab.soak`: exit code 0 when every invariant held, 1 when one broke, 2 for a wrong argument."""

from __future__ import annotations

import argparse
import json
import sys
import time

from kvstrata.errors import ConfigurationError
from kvstrata.lab.soak.report import as_json, as_table
from kvstrata.lab.soak.run import run_soak


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvstrata.lab.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps over all seeds (default 1000000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--processes", type=int, default=1, help="seeds at a time (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    began = time.perf_counter()

    def progress(steps: int) -> None:
        rate = steps / max(time.perf_counter() - began, 1e-9)
        sys.stderr.write(f"\r{steps} of {options.steps} steps, {rate:.0f} steps/s")
        sys.stderr.flush()

    try:
        results = run_soak(options.steps, options.seed, options.processes, progress)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing was kept\n")
        return 130
    sys.stderr.write("\n")
    seconds = time.perf_counter() - began
    data = as_json(results, seconds)
    sys.stdout.write(json.dumps(data) + "\n" if options.json else as_table(results, seconds))
    return 0 if data["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
