"""The command `seqkv store`: sessions in a SessionStore."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seqkv import arguments, display, engine, models
from seqkv.engine.records import Entry
from seqkv.engine.store import SessionStore
from seqkv.models import UsageError


def add(commands: Any) -> None:
    """Add `store` to the commands of `seqkv`."""
    about = "Keep sessions, each coded against the one that it has most in common with."
    top = commands.add_parser("store", help=about, description=about)
    actions = top.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        one = actions.add_parser(name, help=help, description=help)
        one.set_defaults(run=run)
        one.add_argument("store", help="a folder, or the URL of a Redis server or of a bucket")
        one.add_argument("--tenant", default="", metavar="T", help="whose sessions: others' are not seen, nor used")
        return one

    def model(one: argparse.ArgumentParser) -> None:
        one.add_argument("name", help="of the session")
        one.add_argument("--model", required=True, metavar="M", help=arguments.MODEL)
        one.add_argument("--profile", default="none", metavar="P", help=arguments.PROFILE)

    one = action("put", put, "Run a model over a text and store its cache.")
    model(one)
    texts = one.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="FILE", help="a file with the text of the session")
    texts.add_argument("--prompt", metavar="TEXT", help="the text itself")
    arguments.loss(one)

    one = action("get", get, "Read a session back, and let the model continue from it.")
    model(one)
    one.add_argument(
        "--continue",
        dest="count",
        type=arguments.positive,
        metavar="N",
        help="print the N most probable tokens that follow",
    )

    one = action("ls", ls, "What each session cost, what it was coded against, and how much it shared.")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = action("rm", rm, "Remove sessions. Those that were coded against them keep what they need.")
    one.add_argument("names", nargs="+", metavar="NAME", help="of a session")

    one = action("verify", verify, "Check every byte and every dependency, of all tenants.")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = action("stats", stats, "How much is stored.")
    one.add_argument("--json", action="store_true", help="print JSON")


def put(args: argparse.Namespace) -> None:
    profile = arguments.profile(args.profile)
    arguments.check_quality(args.kl)
    models.locate(args.model)  # before a folder is made
    with (
        display.progress("put") as report,
        SessionStore(args.store, profile=profile, tenant=args.tenant) as store,
    ):
        report(0.0, "loading the model")
        source = models.load(args.model)
        arguments.check_model(profile, source)
        ids = models.read_ids(source, args.text) if args.prompt is None else source.begin(source.tokenize(args.prompt))
        if len(ids) == len(source.bos):
            raise UsageError("the text has no tokens")
        source.context = len(ids)
        report(0.5, f"prefill of {len(ids):,} tokens")
        kv, probs, importance = source.prefill(ids)
        report(0.8, "encoding")
        start = time.perf_counter()
        entry = store.put(args.name, kv, probs, kl=args.kl, importance=importance)
        seconds = time.perf_counter() - start
    shared = "nothing in common with the others"
    if entry.reference is not None:
        shared = f"{entry.shared_tokens:,} of them in common with {entry.reference}"
    print(f"{entry.name}: {entry.tokens:,} tokens, {shared}")
    print(f"{entry.own_bytes:,} bytes added, {entry.shared_bytes:,} were there already, in {seconds:.2f} s")


def get(args: argparse.Namespace) -> None:
    profile = arguments.profile(args.profile)
    with existing(args, profile) as store:
        start = time.perf_counter()
        kv = store.get(args.name)
        print(f"{kv} in {time.perf_counter() - start:.2f} s")
        ids = store.token_ids(args.name)
    source = models.load(args.model)
    arguments.check_layers(kv, source, args.name)
    if args.count:
        print(models.continuation(source, ids, kv, args.count))


def ls(args: argparse.Namespace) -> None:
    with existing(args) as store:
        entries = store.list()
    if args.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    elif entries:
        show(args.store, entries)
    else:
        print(f"{args.store}: no sessions")


def rm(args: argparse.Namespace) -> None:
    with existing(args) as store:
        for name in args.names:
            store.delete(name)


def verify(args: argparse.Namespace) -> int:
    with existing(args) as store:
        report = store.verify()
    if args.json:
        print(json.dumps(asdict(report) | {"clean": report.clean}, indent=2))
        return 0 if report.clean else 1
    checked = f"{report.sessions:,} sessions, {report.streams:,} streams, {report.blobs:,} blobs"
    print(f"{checked} of {report.blob_bytes:,} bytes")
    if report.orphan_bytes:
        print(f"{report.orphan_bytes:,} bytes that nobody needs, left by a crash")
    for problem in report.problems:
        print(f"damaged: {problem.what}")
        print(f"  sessions that need it: {', '.join(problem.sessions) or 'none'}")
    print("clean" if report.clean else f"{len(report.problems):,} problems; what is put again is repaired")
    return 0 if report.clean else 1


def stats(args: argparse.Namespace) -> None:
    with existing(args) as store:
        found = store.stats()
    if args.json:
        print(json.dumps(asdict(found), indent=2))
        return
    print(f"{found.sessions:,} sessions of {found.tokens:,} tokens, in streams of {found.stream_bytes:,} bytes")
    print(f"{found.stored_bytes:,} bytes stored" + (f", of {found.tenants:,} tenants" if found.tenants > 1 else ""))


def existing(args: argparse.Namespace, profile: engine.Profile | None = None) -> SessionStore:
    """A store that is there: reading makes none."""
    local = args.store.removeprefix("file://")
    if "://" not in local and not (Path(local) / "index.sqlite").is_file():
        raise UsageError(f"{args.store}: there is no store here (seqkv store put makes one)")
    return SessionStore(args.store, profile=profile, tenant=args.tenant)


def show(title: str, entries: Sequence[Entry]) -> None:
    """Print a table of sessions."""
    columns = (
        "session",
        "tokens",
        "reference",
        "shared tokens",
        "depth",
        "stream",
        "added",
        "of stream",
        "uses",
        "put",
    )
    rows = [
        (
            entry.name,
            f"{entry.tokens:,}",
            entry.reference or "-",
            f"{entry.shared_tokens:,} ({entry.shared_tokens / entry.tokens:.0%})",
            str(entry.depth),
            f"{entry.stream_bytes:,}",
            f"{entry.own_bytes:,}",
            f"{entry.shared_bytes:,}",
            f"{entry.uses:,}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created)),
        )
        for entry in entries
    ]
    display.table(f"{title}: what its sessions cost, in bytes", columns, rows)
    added, shared = (sum(getattr(entry, name) for entry in entries) for name in ("own_bytes", "shared_bytes"))
    print(f"{len(entries):,} sessions: {added:,} bytes added, {shared:,} were there already")
