"""The report is one page that needs nothing else, whether the run finished or not."""

from __future__ import annotations

import base64
import re
import sys
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from kvstrata.errors import UnsupportedError
from kvstrata.lab.report import write_report

MIB = 1 << 20
LEDGER = {"peak_device_bytes": 10 * MIB, "tokens_restored": 1234, "save_s": 0.25, "peak_over_logical": 0.25}
PARTIAL: dict[str, Any] = dict.fromkeys(
    [
        "model_identity",
        "dtype",
        "dtype_reason",
        "history_tokens",
        "history_bytes",
        "device_budget_bytes",
        "peak_device_bytes",
        "rss_growth_bytes",
        "stock_rss_growth_bytes",
        "chunk_tokens",
        "prefill_chunk",
        "kernel",
        "cold_first_token_s",
        "restored_first_token_s",
        "stock_first_token_s",
        "max_logprob_difference",
        "question",
        "expected_answer",
        "answer",
        "cold_ledger",
        "ledger",
        "trace",
        "environment",
        "timing_samples",
        "timing_ms",
    ]
) | {
    "model": "tiny",
    "quick": True,
    "restores": [],
    "prompt_tokens": 100,
    "new_tokens": 8,
    "checks": [{"name": "stage cold finishes", "ok": False, "detail": "<b>ended</b>"}],
    "failure": {"stage": "cold", "detail": "ended by SIGKILL", "reason": None, "next_step": "look at the log"},
    "stage_seconds": {"prepare": 1.0},
    "seconds": 2.0,
    "seed": 7,
}
RESTORE = {
    "first_token_s": 0.2, "restored_tokens": 99, "recomputed_tokens": 0, "same_tokens": True,
    "max_logprob_difference": 0.0,
}  # fmt: skip
POINTS = [
    {"seconds": second, "logical_bytes": second * MIB, "device_bytes": MIB, "file_bytes": 0, "resident_bytes": MIB}
    for second in range(3)
]
COMPLETE = PARTIAL | {
    "dtype": "float32",
    "dtype_reason": "asked for",
    "failure": None,
    "checks": [
        {"name": "good", "ok": True, "detail": "a"},
        {"name": "bad", "ok": False, "detail": "b"},
        {"name": "told", "ok": None, "detail": "c"},
    ],
    "history_tokens": 6175,
    "history_bytes": 40 * MIB,
    "device_budget_bytes": 10 * MIB,
    "peak_device_bytes": 10 * MIB,
    "rss_growth_bytes": 30 * MIB,
    "stock_rss_growth_bytes": 90 * MIB,
    "cold_first_token_s": 20.0,
    "restored_first_token_s": 0.2,
    "stock_first_token_s": 21.0,
    "stock_prefill_attention": "sdpa",
    "max_logprob_difference": 0.0,
    "restores": [RESTORE],
    "decode_ms_per_token": 50.0,
    "timing_ms": {"kvstrata": 5.0, "sdpa": 9.0, "eager": 12.0},
    "timing_quartiles_ms": {"kvstrata": [4.0, 6.0], "sdpa": [8.0, 10.0], "eager": [11.0, 13.0]},
    "timing_samples": 32,
    "question": "What?",
    "expected_answer": "saffron",
    "answer": "<script>alert(1)</script>",
    "cold_ledger": LEDGER,
    "ledger": LEDGER,
    "trace": POINTS,
    "kernel": "avx2",
    "chunk_tokens": 256,
    "prefill_chunk": 512,
    "environment": {
        "cpu": "A CPU", "cores": 2, "torch_threads": 2, "load_average_1min": 0.1, "system": "Linux", "python": "3",
        "packages": {"torch": "2"},
    },
}  # fmt: skip


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def _parsed(page: str) -> _Links:
    parser = _Links()
    parser.feed(page)
    return parser


def test_every_reference_is_embedded() -> None:
    page = write_report(COMPLETE)
    found = _parsed(page)
    assert len(found.targets) == 6
    assert all(target.startswith("data:image/svg+xml;base64,") for target in found.targets)
    assert "http://" not in page
    assert "https://" not in page
    assert not {"script", "link", "iframe"} & set(found.tags)


def test_pictures_are_whole_and_refer_to_nothing_outside() -> None:
    for target in _parsed(write_report(COMPLETE)).targets:
        svg = base64.b64decode(target.partition(",")[2])
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert set(re.findall(rb'(?:href|src)="([^"])', svg)) <= {b"#"}


def test_light_and_dark_pages_get_their_own_pictures() -> None:
    targets = _parsed(write_report(COMPLETE)).targets
    assert len(set(targets)) == len(targets)
    assert "prefers-color-scheme: dark" in write_report(COMPLETE)


def test_numbers_checks_and_machine_are_on_the_page() -> None:
    page = write_report(COMPLETE)
    for words in ("100&times;", "40.0 MiB", "passed", "failed", "told", "1,234", "0.250 s", "A CPU", "32 steps"):
        assert words in page


def test_several_restored_processes_have_a_table() -> None:
    runs = [RESTORE, RESTORE | {"first_token_s": 0.345, "same_tokens": False}]
    page = write_report(COMPLETE | {"restores": runs})
    for words in ("Restored again and again", "0.345 s", "the same", "others"):
        assert words in page
    assert "Restored again and again" not in write_report(COMPLETE)


def test_text_of_the_model_is_escaped() -> None:
    page = write_report(COMPLETE)
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_a_partial_run_has_a_page_too() -> None:
    page = write_report(PARTIAL)
    assert "ended by SIGKILL" in page
    assert "look at the log" in page
    assert "&lt;b&gt;ended&lt;/b&gt;" in page
    assert "<img" not in page


@pytest.mark.parametrize("key", ["stock_first_token_s", "timing_ms", "trace"])
def test_a_picture_without_numbers_is_left_out(key: str) -> None:
    assert len(_parsed(write_report(COMPLETE | {key: None})).targets) == 4


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvstrata.lab.figures", raising=False)
    with pytest.raises(UnsupportedError, match=f"the report needs {name}") as refused:
        write_report(COMPLETE)
    assert "kvstrata[report]" in refused.value.next_step
