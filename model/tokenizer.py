"""Text to token ids and back, for the byte-level BPE tokenizers of the Qwen family."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from model.errors import ModelError


class Tokenizer:
    """`tokenizer.json` of a model directory. Immutable; safe to share between threads."""

    def __init__(self, inner: tokenizers.Tokenizer, sha256: str) -> None:
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._inner = inner
        self._special = frozenset(i for i, added in inner.get_added_tokens_decoder().items() if added.special)
        self._tokens = {i: token for token, i in vocabulary.items()}
        self.sha256 = sha256
        self.public_rows = max(vocabulary.values()) + 1
        """Highest token id known + 1: rows of the head above it are never proposed, drawn or shown (decision 5)."""

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Raises ModelError if `tokenizer.json` is missing, broken, or not byte-level."""
        path = directory / "tokenizer.json"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
            decoder = json.loads(content).get("decoder") or {}
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from None
        if decoder.get("type") != "ByteLevel":
            raise ModelError(f"{path}: decoder is {decoder.get('type')!r}, but must be 'ByteLevel'")
        if not inner.get_vocab_size():
            raise ModelError(f"{path}: the vocabulary is empty")
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, hashlib.sha256(content).hexdigest())

    @property
    def serialized(self) -> str:
        """What `tokenizer.json` says, without truncation and padding."""
        return self._inner.to_str()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids, none is added.

        Raises ValueError for text that has no UTF-8 form (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text holds a lone surrogate at character {error.start}") from None
        # the batch form lets go of the interpreter's lock, so that a long text does not stop other threads
        return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; bytes that are not UTF-8 become U+FFFD. Unknown ids give nothing."""
        return self.bytes_of(ids).decode("utf-8", errors="replace")

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The exact bytes that `ids` stand for, special tokens and unknown ids skipped."""
        return b"".join(_token_bytes(self._tokens[i]) for i in ids if i in self._tokens and i not in self._special)

    def spelled(self, token_id: int) -> bytes:
        """The bytes that an id stands for, or the spelling of a special one; nothing for an unknown id."""
        token = self._tokens.get(token_id, "")
        return token.encode() if token_id in self._special else _token_bytes(token)

    def token(self, token_id: int) -> str:
        """The vocabulary's spelling of an id, special or not. Raises ValueError for an unknown id."""
        token = self._tokens.get(token_id)
        if token is None:
            raise ValueError(f"token id {token_id} is unknown: the tokenizer's ids are below {self.public_rows}")
        return token

    def is_special(self, token_id: int) -> bool:
        """Whether it is a token of its own wherever its spelling stands, and no text to a reader."""
        return token_id in self._special

    def id_of(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self._inner.token_to_id(token)


class Detokenizer:
    """Text of a growing run of ids, a piece at a time; the pieces together equal `Tokenizer.decode` of all ids.

    At most three bytes are held back, those of a character that is not complete yet. Costs are linear in the number
    of ids, since byte-level tokens mean the same bytes wherever they stand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(self._tokenizer.bytes_of(ids))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; the detokenizer is fresh afterwards."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself if printable in Latin-1, else 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Added tokens may hold characters outside the alphabet (a space): these stand for their own UTF-8."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
