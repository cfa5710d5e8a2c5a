"""No name of a session or a tenant ever becomes a path, and none but an illegal one is refused."""

from __future__ import annotations

import pytest
from chunks_and_faults import make_context, make_history, tree, write_all
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstrata.contract.identity import Namespace
from kvstrata.errors import Reason, SessionError
from kvstrata.sessions.session_store import SessionStore
from kvstrata.store import Store

IDS = (1, 2, 3)
TEXT = st.text(st.characters(), max_size=300)


@settings(max_examples=60)
@given(name=TEXT, tenant=TEXT)
@example("../../escape", "../../escape")
@example("'; DROP TABLE chunks; --", "'; DROP TABLE chunks; --")
@example("a", "\udcff")
@example("%_", "%")
def test_any_name_is_kept_inside_the_store_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, tenant: str
) -> None:
    root = tmp_path_factory.mktemp("names")
    context = make_context(namespace=Namespace(tenant))
    with Store(root / "store", zero_tenants={tenant}) as store:
        sessions = SessionStore(store)
        chunks = write_all(store.tier, make_history(context, IDS))
        try:
            sessions.save(name, context, IDS, chunks, len(IDS))
        except SessionError as error:
            refusal = error.reason
        else:
            refusal = Reason.SESSION_NAME_INVALID
            assert sessions.load(name, tenant).tenant == tenant
            assert store.audit() == []
            assert sessions.remove(name, tenant).collected.chunks_removed == 1
    assert refusal is Reason.SESSION_NAME_INVALID
    legal = ("store/chunks/", "store/sessions/", "store/store.json")
    assert all(path.startswith(legal) for path in tree(root))
    assert [path.name for path in root.iterdir()] == ["store"]
