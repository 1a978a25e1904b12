"""``python -m tests.stress kills|life|engines|hostile|clients``: what takes too long for the suite."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.export.options import ExportOptions
from edgespec.export.pipeline import export_model
from edgespec.runtimes.files.manifest import Operators
from edgespec.runtimes.process import one_arena
from tests.conftest import DRAFT, HEAD_METHODS, OPERATORS, TARGET
from tests.server.conftest import start, stop
from tests.stress import attacks, clients, hostile
from tests.stress.jobs import JOBS
from tests.stress.kills import EVENTS, Place, disturb
from tests.stress.lag import MARK
from tests.stress.life import Life, live, open_and_close

HEALTH = 0.1  # seconds within which 99 % of the looks at a server under attack must be answered, on a quiet machine
BUDGET = 400 << 20  # bytes of a server under attack
SETTLED = 240  # seconds from which growth is judged: before, caches fill
GROWN = 0.05  # most growth of its memory, of the last quarter over the second


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="write the figures there, as JSON")
    commands = parser.add_subparsers(dest="command", required=True)
    kills = commands.add_parser("kills", help="commands that are killed or lose their disk")
    kills.add_argument("--moments", type=int, default=50, help="of each command and event")
    kills.add_argument("--job", choices=JOBS, action="append")
    kills.add_argument("--event", choices=EVENTS, action="append")
    life = commands.add_parser("life", help="mixed requests, each text against plain decoding's")
    life.add_argument("--minutes", type=float, default=60)
    life.add_argument("--every", type=float, default=30, help="seconds between two looks at memory")
    engines = commands.add_parser("engines", help="engines opened and closed")
    engines.add_argument("--count", type=int, default=200)
    enemies = commands.add_parser("hostile", help="clients that mean harm at a server that decodes")
    enemies.add_argument("--seconds", type=float, default=60)
    enemies.add_argument("--threads", type=int, default=2, help="that decode")
    enemies.add_argument("--each", action="store_true", help="one attack after the other, for --seconds each")
    enemies.add_argument("--nice", type=int, default=10, help="of those who attack")
    enemies.add_argument("--core", type=int, help="on which they attack  [default: any]")
    many = commands.add_parser("clients", help="many clients at a server, with cached prompts and tools")
    many.add_argument("--count", type=int, default=64)
    many.add_argument("--seconds", type=float, default=60)
    many.add_argument("--threads", type=int, default=2, help="that decode")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgespec-stress-") as name:
        work = Path(name)
        work.chmod(0o755)
        os.environ["EDGESPEC_CACHE"] = str(work / "cache")
        if options.command == "kills":
            import_for(options.job or list(JOBS))
            place = Place(work)
            try:
                jobs, events = options.job or list(JOBS), options.event or list(EVENTS)
                found = disturb(place, jobs, events, options.moments, options.seed, say)
            finally:
                place.close()
            report = {f"{job}, {event}": tally.report() for (job, event), tally in found.items()}
            bad = sum(len(tally.wrong) for tally in found.values())
        elif options.command == "hostile":
            means = hostile.Means(options.nice, options.core)
            report, bad = attacked(work, options.seconds, options.threads, options.seed, means, options.each)
        elif options.command == "clients":
            report, bad = crowded(work, options.count, options.seconds, options.threads)
        else:
            bundles = [bundle(work / layout, layout) for layout in OPERATORS]
            if options.command == "life":
                one_arena()  # as edgespec serve does
                lived = live(bundles, options.seed, 60 * options.minutes, every=options.every, watch=tell)
            else:
                lived = open_and_close(bundles[1], options.count, time.monotonic())
            report, bad = lived.report(), len(lived.wrong)
            say(lived.verdict())
    if options.report:
        options.report.write_text(json.dumps(report), "utf-8")
    say(json.dumps(report))
    return int(bad > 0)


def attacked(
    work: Path, seconds: float, threads: int, seed: int, means: hostile.Means, each: bool
) -> tuple[dict[str, Any], int]:
    """Attack a server for ``seconds``: with all kinds of hostile clients at once, or with each kind separately."""
    options = ("--name", "demo", "--read-timeout", "10", "--budget", f"{BUDGET >> 20}MiB")
    program = ("-m", "tests.stress.lag")  # which reports how late its event loop was
    rounds = {name: (name,) for name in attacks.ALL} if each else {"all at once": tuple(attacks.ALL)}
    table: dict[str, Any] = {}
    served = start(bundle(work / "native", "native"), *options, threads=threads, program=program)
    host, _, port = served.url.removeprefix("http://").partition(":")
    place = attacks.Place(host, int(port), "demo")
    say(f"{'/health in ms':22}    p50    p99   most  looks  texts   p50, ms  MiB  wrong")
    try:
        for name, names in rounds.items():
            found = hostile.attack(place, seconds, served.process.pid, seed, names, means)
            if (most := max(found.server, default=0)) > BUDGET:
                found.bad.append(f"the server took {most >> 20} MiB of a budget of {BUDGET >> 20}")
            if not found.texts:
                found.bad.append("no text was written for clients without harm")
            if not each and seconds >= SETTLED and found.growth() > GROWN:
                found.bad.append(f"memory grew by {found.growth():+.1%}")
            row = table[name] = found.report()
            times = "".join(f"{row['health_ms'][point]:7.1f}" for point in ("p50", "p99", "most"))
            counts = f"{row['looks']:7}{row['texts']:7}{row['text_ms']['p50']:10.0f}{row['server_mib']:5}"
            say(f"{name:22}{times}{counts}{len(found.bad):7}")
    finally:
        said = stop(served)
    loop = json.loads(next((line for line in said.splitlines() if line.startswith(MARK)), MARK + "{}")[len(MARK) :])
    say(f"the server's loop, in ms: {loop}")
    late = [name for name, row in table.items() if row["health_ms"]["p99"] > 1000 * HEALTH]
    bad = [one for row in table.values() for one in row["bad"]] + ["a traceback in the log"] * ("Traceback" in said)
    report = {"attacks": table, "means": asdict(means), "loop": loop, "said": said[-2000:], "late": late, "bad": bad}
    return report, len(bad) + len(late)


def crowded(work: Path, count: int, seconds: float, threads: int) -> tuple[dict[str, Any], int]:
    """Serve many clients for ``seconds``."""
    os.environ.pop("EDGESPEC_PROMPT_CACHE", None)
    found, said = clients.crowd(clients.bundle(work), count, seconds, threads)
    bad = len(found.wrong) + ("Traceback" in said)
    say(f"{count} clients: {dict(found.answers)}, {bad} wrong, memory {found.growth():+.1%}")
    return found.report() | {"said": said[-2000:]}, bad + (found.growth() > GROWN)


def bundle(folder: Path, operators: Operators) -> Path:
    """Make a bundle with every method."""
    methods = ["speculative", "self-spec", "swift", *HEAD_METHODS]
    export_model(
        ExportOptions(TARGET, folder, methods, "int4", draft=DRAFT, threads=1, operators=operators), golden=False
    )
    return folder


def import_for(jobs: list[str]) -> None:
    """Say what forks would import one by one."""
    from tests.fuzz.__main__ import import_all

    import_all()
    if "train" in jobs:
        import torch

        import edgespec.export.training.train  # noqa: F401

        torch.set_num_threads(1)


def tell(life: Life) -> None:
    """Print the progress."""
    now = life.held[-1]
    made, wrong, ties = sum(life.requests.values()), len(life.wrong), len(life.ties)
    say(f"{now}: {made} requests, {life.tokens} tokens, {wrong} wrong, {ties} ties")


def say(text: str) -> None:
    """Print a progress line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
