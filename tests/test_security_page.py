"""docs/security.md: what it names is there, and what it says of a file of keys is true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from typer.main import get_command

from deployment.api_keys import read_keys, tenant_among, tenant_id
from deployment.cli import app
from deployment.settings import AppArgs

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def test_every_option_and_setting_that_it_names_is_there():
    (serve,) = (command for name, command in get_command(app).commands.items() if name == "serve")  # pyright: ignore[reportAttributeAccessIssue]
    options = {option for parameter in serve.params for option in parameter.opts}
    named = set(re.findall(r"dflash-serve serve([^\n]*)", PAGE))
    assert named and set(re.findall(r"--[a-z-]+", " ".join(named))) <= options
    settings = {
        name for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE) if not name.startswith(("ssl_", "api_key"))
    }
    assert settings - {"http_options"} <= AppArgs.model_fields.keys()


def test_every_file_that_it_names_is_there():
    named = [*re.findall(r"`((?:state|tests|deployment)/[\w./]+)`", PAGE), "docs/media.md", "cluster.yaml"]
    assert len(named) > 4 and not [name for name in named if not (ROOT / name).exists()]


def test_its_commands_make_a_file_of_keys(tmp_path: Path):
    block = next(block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "printf" in block)
    script = "\n".join(line for line in block.splitlines() if not line.startswith("dflash-serve"))
    done = subprocess.run(
        ["bash", "-euc", f"{script}\nprintf %s $key"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert tenant_among(read_keys(tmp_path / "keys"), done.stdout) == tenant_id("alice")
