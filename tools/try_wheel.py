"""Try an installation of a wheel: the import, what `info` says, and golden vectors.

    python tools/try_wheel.py [--bundle BUNDLE] [--stock]

Run it by the environment that has the wheel; a compiler need not be there.  Without a bundle the embedded model is
exported, which takes the extra `export`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]


def edgespec(*arguments: object) -> str:
    """Give what a command prints; it runs far from the checkout."""
    command = [sys.executable, "-m", "edgespec", *map(str, arguments)]
    return subprocess.run(command, cwd=Path(sys.prefix), check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--stock", action="store_true", help="the wheel has no native operators")
    arguments = parser.parse_args()
    code = "import edgespec; print(edgespec.__file__)"
    where = subprocess.run([sys.executable, "-c", code], cwd=sys.prefix, check=True, stdout=subprocess.PIPE, text=True)
    if Path(where.stdout.strip()).is_relative_to(ROOT):
        raise SystemExit(f"{where.stdout.strip()} is the checkout: expected an installed wheel")
    with TemporaryDirectory() as folder:
        bundle = arguments.bundle or Path(folder) / "bundle"
        if arguments.bundle is None:
            edgespec("export", "builtin:shakespeare", "--quick", "-o", bundle)
        info = json.loads(edgespec("info", bundle.resolve(), "--json"))["operators"]
        wanted = "stock" if arguments.stock else "native"
        if info["active"] != wanted:
            raise SystemExit(f"operators {info['active']}: expected {wanted}: {info['reason']}")
        print(f"operators: {info['active']}, {info['reason']}")
        print(edgespec("verify", bundle.resolve(), "--max-prompts", 2))


if __name__ == "__main__":
    main()
