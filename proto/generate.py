"""Makes the Python stubs: protos → `proto/python/cocoon/`, typed, for mypy --strict.

Also lays `google/api/field_behavior.proto` (from the googleapis-common-protos
wheel) beside our protos, so that buf and protoc find it without a remote registry;
its Python side comes from the wheel and is not generated again.
Run by `make proto`; idempotent.
"""

import shutil
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
OUT = PROTO / "python"


def lay_google_api() -> None:
    """Copies the one foreign proto that ours import."""
    target = PROTO / "google" / "api" / "field_behavior.proto"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((resources.files("google.api") / "field_behavior.proto").read_bytes())


def generate() -> int:
    """Runs protoc over every proto of ours; returns its exit status."""
    generated = OUT / "cocoon"
    shutil.rmtree(generated, ignore_errors=True)
    well_known = str(resources.files("grpc_tools") / "_proto")
    files = sorted(str(p.relative_to(PROTO)) for p in (PROTO / "cocoon").rglob("*.proto"))
    plugins = [f"--{kind}_out={OUT}" for kind in ("python", "grpc_python")]
    plugins += [f"--{kind}_out=quiet:{OUT}" for kind in ("mypy", "mypy_grpc")]
    status: int = protoc.main(["protoc", f"-I{PROTO}", f"-I{well_known}", *plugins, *files])
    # Regular packages all the way down: type checkers and wheels need no
    # namespace-package rules then.
    for folder in (generated, *(p for p in generated.rglob("*") if p.is_dir())):
        (folder / "__init__.py").touch()
    (generated / "py.typed").touch()
    return status


if __name__ == "__main__":
    lay_google_api()
    sys.exit(generate())
