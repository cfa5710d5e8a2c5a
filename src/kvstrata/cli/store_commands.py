"""`kvstrata store`: what a store holds, whether it is sound, and how to remove from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstrata.cli.exits import ExitCode
from kvstrata.cli.options import JsonOption, StoreOption, TenantOption
from kvstrata.cli.output import Output, byte_text
from kvstrata.sessions.session_store import SessionStore, SessionSummary
from kvstrata.sessions.verification import SnapshotVerdict, verify_snapshots
from kvstrata.store import ChunkVerdict, CollectOutcome, CollectResult, Finding, Store

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Look into a store, verify it, and remove sessions from it.", no_args_is_help=True)
    group.command("info", epilog="Example: `kvstrata store info --store ./store --json`")(info)
    group.command("ls", epilog="Example: `kvstrata store ls --store ./store`")(ls)
    group.command("verify", epilog="Example: `kvstrata store verify --store ./store && echo sound`")(verify)
    group.command("rm", epilog='Example: `kvstrata store rm "my chat" --sequence 3 --store ./store`')(rm)
    group.command("collect", epilog="Example: `kvstrata store collect --store ./store`")(collect)
    app.add_typer(group, name="store")


def info(store: StoreOption, json: JsonOption = False) -> int:
    """Count chunks, sessions, damaged and temporary files, with their bytes."""
    with Store(store, create=False) as opened:
        usage = opened.usage()
        data = {"path": str(opened.path), "read_only": opened.read_only, **asdict(usage)}
    data |= {"total_bytes": usage.total_bytes, "disk_free_bytes": _free(store)}
    table = Table.grid(padding=(0, 2))
    for label, value in (
        ("store", f"{data['path']}" + (" (read only)" if data["read_only"] else "")),
        ("sessions", f"{usage.sessions} with {usage.snapshots} snapshots, {byte_text(usage.metadata_bytes)}"),
        ("chunks", f"{usage.chunks}, {byte_text(usage.chunk_bytes)}"),
        ("damaged, set aside", f"{usage.damaged}, {byte_text(usage.damaged_bytes)}"),
        ("temporary", f"{usage.temporary}, {byte_text(usage.temporary_bytes)}"),
        ("free on the disk", byte_text(_free(store))),
    ):
        table.add_row(Text(label), Text(value))
    Output(json).result(data, table)
    return ExitCode.OK


def ls(store: StoreOption, json: JsonOption = False) -> int:
    """List the saved sessions, the latest first. Sessions whose manifest cannot be read are listed as damaged."""
    with Store(store, create=False) as opened:
        summaries = SessionStore(opened).list()
    table = Table(box=None, pad_edge=False)
    for column in ("session", "tenant", "snapshots", "tokens", "saved", "model", "state"):
        table.add_column(column, overflow="fold")
    rows = [_row(summary) for summary in summaries]
    for row in rows:
        state = f"damaged: {', '.join(map(str, row['damaged']))}" if row["damaged"] else "readable"
        cells = (row["name"] or f"? {row['folder'][:16]}", row["tenant"] or "?", ", ".join(map(str, row["sequences"])))
        tokens = "?" if row["tokens"] is None else str(row["tokens"])
        table.add_row(*map(Text, (*cells, tokens, row["saved"] or "?", row["model"] or "?", state)))
    Output(json).result({"path": str(store), "sessions": rows}, table if rows else Text(f"no sessions in {store}"))
    return ExitCode.OK


def verify(
    store: StoreOption,
    set_aside: Annotated[bool, typer.Option("--set-aside", help="Move damaged chunks out of use.")] = False,
    mend: Annotated[
        bool, typer.Option("--repair", help="Make catalog, files and sessions agree; sets damaged chunks aside.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Read every chunk and manifest once, and compare them with the catalog. Exit code 1 when anything is damaged,
    missing or does not agree; 0 after `--repair` when nothing is left."""
    output = Output(json)
    with output.progress("building the catalog") as building, Store(store, create=False, progress=building) as opened:
        if set_aside or mend:
            opened.require_writable()
        findings = opened.audit()
        repaired = opened.repair(findings) if mend else 0
        left = opened.audit() if mend else findings
        with output.progress("verifying chunks") as report:
            verdicts = list(opened.verify(report))
        unsound = {item.chunk: item.reason for item in verdicts if item.reason is not None}
        sessions = [item for item in verify_snapshots(SessionStore(opened), unsound) if item.reason is not None]
        moved = sum(opened.tier.revoke(chunk) for chunk in unsound) if set_aside or mend else 0
        recovered = asdict(opened.catalog.recovered) if opened.catalog else {}
        rebuilt = opened.catalog is not None and opened.catalog.rebuilt
    damaged = [item for item in verdicts if not item.sound]
    data = {
        "path": str(store),
        "ok": not sessions and not left and (mend or not damaged),
        "chunks": len(verdicts),
        "bytes": sum(item.bytes for item in verdicts),
        "damaged": [{"chunk": item.chunk, "reason": item.reason, "cause": item.cause} for item in damaged],
        "sessions": [_session_data(item) for item in sessions],
        "set_aside": moved,
        "findings": [asdict(finding) for finding in findings],
        "repaired": repaired,
        "recovered": recovered,
        "catalog_rebuilt": rebuilt,
    }
    text = _verify_text(verdicts, sessions, moved)
    output.result(data, Group(*_finding_lines(findings, repaired, recovered, rebuilt), text))
    return ExitCode.OK if data["ok"] else ExitCode.CHECK_FAILED


def rm(
    name: Annotated[str, typer.Argument(help="Name of the session.")],
    store: StoreOption,
    tenant: TenantOption = "default",
    sequence: Annotated[int | None, typer.Option("--sequence", help="Only this snapshot.")] = None,
    json: JsonOption = False,
) -> int:
    """Remove a session, then the chunks that no other session needs."""
    with Store(store, create=False) as opened:
        result = SessionStore(opened).remove(name, tenant, sequence)
    removed = f"removed {result.snapshots_removed} snapshot(s) of {name!r}"
    data = {"snapshots_removed": result.snapshots_removed, "session_removed": result.session_removed}
    Output(json).result(data | {"collected": asdict(result.collected)}, Text(f"{removed}; {_words(result.collected)}"))
    return ExitCode.OK


def collect(store: StoreOption, json: JsonOption = False) -> int:
    """Remove chunks that no session refers to, and what killed processes left. Exit code 1 if it could not."""
    with Store(store, create=False) as opened:
        result = SessionStore(opened).collect()
    Output(json).result({"collected": asdict(result)}, Text(_words(result)))
    return ExitCode.OK if result.outcome is CollectOutcome.DONE else ExitCode.CHECK_FAILED


def _row(summary: SessionSummary) -> dict[str, Any]:
    latest = summary.latest
    return {
        "name": latest.name if latest else None,
        "tenant": latest.tenant if latest else None,
        "folder": summary.folder,
        "sequences": summary.sequences,
        "damaged": summary.damaged,
        "tokens": latest.frontier if latest else None,
        "chunks": len(latest.chunks) if latest else None,
        "saved": datetime.fromtimestamp(latest.created_unix, UTC).isoformat(timespec="seconds") if latest else None,
        "model": latest.context.model.artefact if latest else None,
    }


def _session_data(verdict: SnapshotVerdict) -> dict[str, Any]:
    snapshot = verdict.snapshot
    return {
        "name": snapshot.name if snapshot else None,
        "tenant": snapshot.tenant if snapshot else None,
        "folder": verdict.folder,
        "sequence": verdict.sequence,
        "tokens": snapshot.frontier if snapshot else None,
        "usable_tokens": verdict.usable_tokens,
        "reason": verdict.reason,
        "cause": verdict.cause,
    }


def _verify_text(verdicts: list[ChunkVerdict], sessions: list[SnapshotVerdict], moved: int) -> Group:
    lines = [f"{item.reason}: {item.cause}" for item in verdicts if not item.sound]
    for item in sessions:
        name = repr(item.snapshot.name) if item.snapshot else item.folder[:16]
        lines.append(f"{item.reason}: session {name}, snapshot {item.sequence}: {item.cause}")
    total = byte_text(sum(item.bytes for item in verdicts))
    bad = sum(not item.sound for item in verdicts)
    summary = f"{len(verdicts) - bad} of {len(verdicts)} chunks are sound ({total})"
    lines.append(
        f"{summary}; {len(sessions)} snapshots are affected" if lines else f"{summary}; every snapshot is whole"
    )
    if moved:
        lines.append(f"{moved} damaged chunks were set aside; their rows are recomputed when a session needs them")
    return Group(*map(Text, lines))


def _finding_lines(findings: list[Finding], repaired: int, recovered: dict[str, int], rebuilt: bool) -> Iterator[Text]:
    if rebuilt:
        yield Text("the catalog was missing or damaged and has been built anew from the chunk files")
    dead, intents = recovered.get("dead_processes", 0), recovered.get("intents", 0)
    if dead:
        yield Text(f"cleaned up behind {dead} processes that died, with {intents} writes under way")
    for finding in findings:
        yield Text(f"{finding.kind}: {finding.subject}: {finding.detail}")
    if repaired:
        yield Text(f"{repaired} of these were repaired")
    elif findings:
        yield Text("`kvstrata store verify --repair` makes them agree")


def _words(result: CollectResult) -> str:
    match result.outcome:
        case CollectOutcome.DONE:
            return f"{result.chunks_removed} chunks collected, {byte_text(result.bytes_freed)} freed"
        case CollectOutcome.BUSY:
            return f"its chunks are kept for now: {result.detail}; `kvstrata store collect` frees them later"
        case _:
            return f"no chunk was removed: {result.detail}"


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free
