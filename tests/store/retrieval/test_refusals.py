"""Every check of every call refuses one wrong field, for one reason, and nothing else would have refused it so."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from retrieval_cases import CASES, CHAIN, call, make_scene, part, prepared, snapshot

from kvstrata.contract.identity import Namespace
from kvstrata.errors import Reason, RetrievalError

retrieval: Any = import_module("kvstrata.store.retrieval.retrieval")
publications: Any = import_module("kvstrata.store.retrieval.publications")

PAIRS = [(table, name) for table, cases in CASES.items() for name in cases]


def outcome(table: str, name: str) -> tuple[Reason, str] | None:
    """Reason and field of the refusal, or `None` when the call was not refused by a check."""
    scene = prepared(table)
    CASES[table][name][0](scene)
    try:
        call(table, scene)
    except RetrievalError as error:
        return error.reason, error.field
    except (LookupError, ValueError):
        # Without its check, a wrong number reaches the search itself.
        return None
    return None


@pytest.mark.parametrize("table", CASES)
def test_the_valid_scene_is_accepted(table: str) -> None:
    assert call(table, prepared(table)) is not None


@pytest.mark.parametrize("table", CASES)
def test_every_check_has_a_case(table: str) -> None:
    assert sorted(check.__name__ for check in getattr(retrieval, table)) == sorted(CASES[table])


@pytest.mark.parametrize(("table", "name"), PAIRS)
def test_a_wrong_field_is_refused_for_its_reason(table: str, name: str) -> None:
    scene = prepared(table)
    change, reason = CASES[table][name]
    change(scene)
    with pytest.raises(RetrievalError) as refusal:
        call(table, scene)
    assert refusal.value.reason is reason
    assert refusal.value.field in refusal.value.cause
    assert refusal.value.next_step


@pytest.mark.parametrize(("table", "name"), PAIRS)
def test_without_its_check_the_field_is_not_refused_so(table: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_check = outcome(table, name)
    checks = tuple(check for check in getattr(retrieval, table) if check.__name__ != name)
    monkeypatch.setattr(retrieval, table, checks)
    assert with_check is not None
    assert outcome(table, name) != with_check


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES["GATHER"])
def test_without_one_check_all_other_fields_are_refused_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = tuple(check for check in retrieval.GATHER if check.__name__ != name)
    monkeypatch.setattr(retrieval, "GATHER", checks)
    others = [other for other in CASES["GATHER"] if other != name]
    assert [found[0] if (found := outcome("GATHER", each)) else None for each in others] == [
        CASES["GATHER"][each][1] for each in others
    ]


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("candidates_committed", (0, 3, 8), Reason.CANDIDATE_BEYOND_FRONTIER),
        ("candidates_distinct", (0, 3, 0), Reason.DUPLICATE_CANDIDATE),
        ("candidates_indexed", (0, 3), Reason.CANDIDATE_NOT_INDEXED),
    ],
)
def test_what_a_search_returns_is_checked_before_a_receipt_is_written(
    name: str, found: tuple[int, ...], reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    def searching() -> object:
        scene = make_scene()
        if name == "candidates_indexed":
            snapshot("indexes", entries=((0, 3), (4, 8)))(scene)
        scene.search = lambda index: [(position, 0.0) for position in found]  # type: ignore[method-assign]
        return scene.look_up()

    with pytest.raises(RetrievalError) as refusal:
        searching()
    assert refusal.value.reason is reason
    checks = tuple(check for check in retrieval.SEARCH_RESULT if check.__name__ != name)
    monkeypatch.setattr(retrieval, "SEARCH_RESULT", checks)
    try:
        searching()
    except RetrievalError as error:
        # A position beyond the frontier is no entry of the index either.
        assert (name, error.reason) == ("candidates_committed", Reason.CANDIDATE_NOT_INDEXED)  # noqa: PT017


INDEX_FIELDS = [
    ("index_tenant", {"tenant": None}),
    ("index_source", {"source": "f" * 64}),
    ("index_selector", {"selector_generation": 3}),
    ("index_cache", {"cache_generation": 22}),
    ("coordinates", {"coordinates": "packed_row"}),
    ("index_frontier", {"frontier": 7}),
    ("index_entries", {"entries": ((0, 9),)}),
    ("selector_source", {"source": "f" * 64}),
    ("selector_coverage", {"start": -1}),
    ("selector_published", {}),
]


def test_every_check_of_a_publication_has_a_case() -> None:
    names = {check.__name__ for check in publications.PUBLISH_INDEX}
    assert {check.__name__ for check in publications.PUBLISH_SELECTOR} <= names == {name for name, _ in INDEX_FIELDS}


@pytest.mark.parametrize(("name", "changes"), INDEX_FIELDS)
def test_a_wrong_index_is_not_published(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def publishing() -> object:
        line = make_scene().retrieval.publications
        selector = line.write_selector(None, basis="b", dtype="int8", shape=(1,), revision="1")
        if name != "selector_published":
            line.publish_selector(selector)
        index = line.write_index(None, selector)
        wrong = selector if name.startswith("selector") else index
        new = {"tenant": Namespace("another")} if "tenant" in changes else changes
        wrong.publication = replace(wrong.record, **new)  # type: ignore[type-var]
        before = line.indexes.published
        try:
            return line.publish_index(index)
        except RetrievalError:
            assert line.indexes.published is before
            raise

    with pytest.raises(RetrievalError) as refusal:
        publishing()
    assert refusal.value.reason is CHAIN[name][1]
    checks = tuple(check for check in publications.PUBLISH_INDEX if check.__name__ != name)
    monkeypatch.setattr(publications, "PUBLISH_INDEX", checks)
    try:
        publishing()
    except RetrievalError as error:
        assert error.field != refusal.value.field  # noqa: PT017


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("selector_source", {"source": "f" * 64}, Reason.SELECTOR_SOURCE_BINDING_MISMATCH),
        ("selector_coverage", {"start": -1}, Reason.COVERAGE_BEYOND_FRONTIER),
    ],
)
def test_a_wrong_proxy_is_not_published(
    name: str, changes: dict[str, Any], reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publishing() -> object:
        line = make_scene().retrieval.publications
        selector = line.write_selector(None, basis="b", dtype="int8", shape=(1,), revision="1")
        selector.publication = replace(selector.record, **changes)
        return line.publish_selector(selector)

    with pytest.raises(RetrievalError) as refusal:
        publishing()
    assert refusal.value.reason is reason
    checks = tuple(check for check in publications.PUBLISH_SELECTOR if check.__name__ != name)
    monkeypatch.setattr(publications, "PUBLISH_SELECTOR", checks)
    assert publishing() is not None


def test_a_tenant_is_named_and_a_salt_is_not() -> None:
    scene = make_scene()
    source = scene.manifest.source
    scene.manifest = replace(scene.manifest, source=replace(source, tenant=Namespace("conformance", "secret salt")))
    with pytest.raises(RetrievalError, match="under another salt") as refusal:
        scene.look_up()
    assert "secret" not in str(refusal.value)


def test_a_refused_look_up_leaves_no_lease() -> None:
    scene = make_scene()
    before = scene.retrieval.searches.open()
    part("operation", kv_head=0)(scene)
    with pytest.raises(RetrievalError):
        scene.look_up()
    assert scene.retrieval.searches.open() == before
