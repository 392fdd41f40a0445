"""Certificate and key of the HTTP port: checked before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve.config import HTTPOptions

from deployment.tls import Tls
from tests.deployment.certificates import written


def test_a_certificate_with_its_key_is_what_serve_asks_for_and_neither_is_no_tls(tmp_path: Path):
    files = written(tmp_path)
    tls = Tls.of(files.certificate, files.key)
    assert tls is not None and Tls.of(None, None) is None
    options = HTTPOptions(**tls.http_options)  # pyright: ignore[reportArgumentType]
    assert (options.ssl_certfile, options.ssl_keyfile) == (str(files.certificate), str(files.key))


def test_paths_are_those_of_whoever_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    tls = Tls.of(Path("server.pem"), Path("server.key"))
    assert tls is not None and tls.certificate == tmp_path / "server.pem" and tls.key.is_absolute()


def test_what_does_not_belong_together_is_named(tmp_path: Path):
    one, other = written(tmp_path), written(tmp_path, "other")
    locked = written(tmp_path, "locked", password=b"secret")
    for certificate, key, said in (
        (one.certificate, None, "^tls_key: is needed beside tls_cert"),
        (None, one.key, "^tls_cert: is needed beside tls_key"),
        (tmp_path / "none.pem", one.key, "^tls_cert: .*none.pem cannot be read: No such file"),
        (one.certificate, tmp_path, "^tls_key: .* cannot be read: Is a directory"),
        (one.certificate, other.key, "do not belong together"),
        (one.key, one.certificate, "do not belong together"),
        (locked.certificate, locked.key, "do not belong together|password"),
    ):
        with pytest.raises(ValueError, match=said):
            Tls.of(certificate, key)
