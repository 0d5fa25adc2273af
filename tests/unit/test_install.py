"""The folder models/ is rpfunc.models, in a wheel and in an editable install."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import rpfunc.models

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_the_models_and_every_package(tmp_path):
    source = tmp_path / "source"
    for name in ("rpfunc", "models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, source], check=True, timeout=50, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith((".py", "py.typed"))}
        archive.extractall(tmp_path / "site")
    written = {f"rpfunc/{path.relative_to(source / 'rpfunc')}" for path in (source / "rpfunc").rglob("*.py")}
    written |= {f"rpfunc/models/{path.relative_to(source / 'models')}" for path in (source / "models").rglob("*.py")}
    assert packed == written | {"rpfunc/py.typed"}
    program = "import rpfunc.models.decoder as d; print(d.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "site", capture_output=True, text=True, check=True, timeout=50
    )
    assert found.stdout.strip() == str(tmp_path / "site" / "rpfunc" / "models" / "decoder.py")


def test_the_editable_install_imports_the_models_from_their_folder():
    assert Path(rpfunc.models.__file__) == ROOT / "models" / "__init__.py"
    program = "import rpfunc.models; print(rpfunc.models.__file__)"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(ROOT / "models" / "__init__.py")
