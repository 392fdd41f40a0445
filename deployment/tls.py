"""Which certificate does the HTTP port show? Checked before anything is started."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tls:
    """Absolute paths of PEM files, on the machine of Serve's proxy: the certificate with its chain, and its key, which
    has no password."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> Tls | None:
        """None without either. ValueError for one without the other, and for files that do not belong together."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            given, missing = ("tls_key", "tls_cert") if certificate is None else ("tls_cert", "tls_key")
            raise ValueError(f"{missing}: is needed beside {given}")
        for name, file in (("tls_cert", certificate), ("tls_key", key)):
            try:
                file.open("rb").close()
            except OSError as error:
                raise ValueError(f"{name}: {file} cannot be read: {error.strerror}") from None
        try:
            # Without a password given here, OpenSSL would ask for one at the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            why = error.reason or "neither may be damaged, and the key must have no password"
            raise ValueError(f"tls_cert, tls_key: {certificate} and {key} do not belong together: {why}") from None
        return cls(certificate.absolute(), key.absolute())

    @property
    def http_options(self) -> dict[str, str]:
        """As Serve names them. The key comes first, or Serve does not see that both are there."""
        return {"ssl_keyfile": str(self.key), "ssl_certfile": str(self.certificate)}
