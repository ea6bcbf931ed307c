"""Generate specdec/v1 from proto/specdec/v1: `python proto/generate.py [--check]`.

--check writes nothing and exits with status 1 if the committed files are not what would be written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
PACKAGE = Path("specdec/v1")


def generate(out: Path) -> list[Path]:
    """Write the generated files under out and return their paths relative to it."""
    sources = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    arguments = [
        "protoc",
        f"-I{PROTO_ROOT}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(str(source) for source in sources),
    ]
    status = protoc.main(arguments)
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    return sorted(path.relative_to(out) for path in (out / PACKAGE).glob("*_pb2*.py*"))


def stale_files() -> list[str]:
    """Committed files that differ from what would be generated, are missing or are left over."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        expected = {path: (out / path).read_bytes() for path in generate(out)}
    committed = {path.relative_to(ROOT) for path in (ROOT / PACKAGE).glob("*_pb2*.py*")}
    return sorted(
        str(path)
        for path in committed | expected.keys()
        if path not in expected
        or path not in committed
        or (ROOT / path).read_bytes() != expected[path]
    )


def main() -> int:
    """Generate the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if a file is stale")
    if not parser.parse_args().check:
        print("\n".join(str(path) for path in generate(ROOT)))
        return 0
    stale = stale_files()
    for path in stale:
        print(f"{path} is stale: run `make proto`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
