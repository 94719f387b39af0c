"""What a bare machine lacks, in one folder: a few wheels, the worker, and the commit that they belong to.

    python -m benchmarks.gpu.pack            collects them in .gpu/, where there is network
    python -m benchmarks.gpu.pack --install  installs missing wheels into .gpu/site, without network

It imports nothing that a bare machine lacks.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.common.provenance import PACK, PACKED, PACKED_CODE, ROOT, commit_of_code, digest_of_code

_BUILT = "deepspeed"
"""Has no wheels. Without its compiled operations it is pure Python."""
_DOWNLOADED = (
    *("hjson", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "omegaconf"),
    # Also of these: all that DeepSpeed and this package import and torch, Lightning and transformers do not bring.
    *("psutil", "msgpack", "einops", "tabulate", "py-cpuinfo", "ninja", "pytest-timeout"),
    # For the command line of examples/alpaca.py.
    *("jsonargparse", "docstring_parser", "typeshed_client"),
    # One method of the step-time benchmark.
    "torchao",
)
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_WORKER, _LIBRARY = "zenflow-worker", "libzenflow-device.so"


def pack(python: str) -> None:
    """Fills the folder anew.

    Args:
        python: version of the bare machine's Python, such as 3.12.
    """
    shutil.rmtree(PACK, ignore_errors=True)
    print(f"builds {_BUILT}'s wheel", flush=True)
    pinned = ["--no-deps", "--constraint", str(ROOT / "constraints.txt")]
    _pip("wheel", *pinned, "--no-build-isolation", "--wheel-dir", str(PACK), _BUILT, DS_BUILD_OPS="0")
    print(f"downloads {len(_DOWNLOADED)} wheels", flush=True)
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _pip("download", *pinned, *target, "--dest", str(PACK), *_DOWNLOADED)
    print("builds the worker", flush=True)
    built = build_worker()
    for name in (_WORKER, _LIBRARY):
        shutil.copy2(built.with_name(name), PACK)
    about = {
        "commit": commit_of_code(PACKED_CODE),
        "code": digest_of_code(PACKED_CODE),
        "csrc": digest_of_code(["csrc"]),
    }
    PACKED.write_text(json.dumps(about))
    files = sorted(PACK.iterdir())
    print(*(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}" for path in files), sep="\n")
    print(f"{sum(path.stat().st_size for path in files) / 1e6:8.2f} MB  in {PACK}, commit {about['commit']}")


def _pip(*arguments: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, env={**os.environ, **environment}, check=True)


def install() -> None:
    """Installs the packed wheels that are missing here or have another version; the folder precedes others on PYTHONPATH."""
    missing = [wheel for wheel in sorted(PACK.glob("*.whl")) if not _is_installed(wheel)]
    if missing:
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        _pip("install", *options, "--target", str(PACK / "site"), *map(str, missing))


def _is_installed(wheel: Path) -> bool:
    name, wanted, *_ = wheel.name.split("-")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False


def find_worker() -> Path | None:
    """The packed worker if it is of these sources and runs here, else one that is built; None: the installed package has its own."""
    packed = PACK / _WORKER
    if PACKED.exists() and json.loads(PACKED.read_text())["csrc"] == digest_of_code(["csrc"]) and _runs(packed):
        return packed
    try:
        from lightning_zenflow.native import worker_executable

        worker_executable()
        return None
    except RuntimeError:
        return build_worker()


def _runs(worker: Path) -> bool:
    try:
        return subprocess.run([worker, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def build_worker() -> Path:
    """Builds worker and library with CMake, Ninja and a C++ compiler; nothing happens if they are up to date."""
    folder = ROOT / "build" / "gpu"
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(folder), "-G", "Ninja"]
    for command in (configure, ["cmake", "--build", str(folder)]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(
                f"the worker does not build: {' '.join(command)}: {(result.stdout + result.stderr)[-3000:]}"
            )
    return folder / _WORKER


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="scripts/gpu pack", description="collect what a bare machine lacks in .gpu/")
    parser.add_argument("--python", default="3.12", metavar="VERSION", help="the bare machine's; default 3.12")
    parser.add_argument("--install", action="store_true", help="install what is missing here instead")
    options = parser.parse_args(arguments)
    install() if options.install else pack(options.python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
