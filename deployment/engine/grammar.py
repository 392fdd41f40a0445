"""Which tokens does a grammar allow next?

    matcher   one a turn; it follows the tokens that the turn generated, and nothing else
    masks     for column i of a round: what may follow the ledger and the drafts d_1 .. d_i, all rows in one call

A draft that a mask forbids stays in the proposal, where its p is 0; columns after it are never consumed, nor are those
after an end token, so they need no mask (decision 15). Where a grammar is complete only end tokens and stop ids are
allowed. A matcher is never fed past its end, and a lane whose masks say that nothing may follow ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deployment.engine import errors
from deployment.engine.commands import Grammar
from deployment.engine.errors import EngineError
from deployment.engine.grammar_compiler import GrammarCompiler, Prototype
from model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from deployment.engine.lane import Lane

_NOTHING = "NoExtension"
"""How the library's message begins where nothing may follow, though the grammar is not complete."""


@dataclass(frozen=True)
class Masks:
    """Of the lanes `rows`, those with a grammar: `bits` int32 [G, W, words], what each column allows, packed as
    `kernels/masking.py` says; columns that are never consumed allow everything. `dead`: of a lane in which nothing may
    follow somewhere, the first such column, and what to say of it."""

    bits: np.ndarray
    rows: tuple[int, ...]
    dead: Mapping[int, tuple[int, EngineError]]


class NotCompiled(Exception):
    """It is not known yet what a grammar's turn gets."""


class TurnMatcher:
    """Where one turn stands in its grammar. `field`: what asked for it. `inner`: the library's, since the first
    `follow`, so that a turn that waits for long shares no lexer that others have filled meanwhile. `full`: its lexer
    has reached its limit, and the turn goes on with the matcher that `renewed` makes. `own`: a lexer that
    nobody else has until the turn has used it, so that another one would be of no use."""

    def __init__(self, grammar: Grammar, prototype: Prototype, compiler: GrammarCompiler, own: Any = None) -> None:
        self.field = grammar.field
        self.inner: Any = None
        self.full = False
        self.own = own
        self._grammar = grammar
        self._prototype = prototype
        self._after = grammar.after
        self._compiler = compiler
        self._source: Any = None
        self._fed: list[int] = []
        self.begun = self._after is None

    def restart(self) -> None:
        """Back to the turn's beginning; the next `follow` replays what was generated."""
        self._source = self.own or self._prototype.matcher
        self.inner = self._source.deep_copy()
        self.begun = self._after is None
        self._fed.clear()

    def renewed(self) -> TurnMatcher:
        """At the turn's beginning, with the lexer that another turn has got meanwhile, or else a new one: that is
        compiled, on any thread."""
        used = self._source is self._prototype.matcher
        own = self._compiler.compiled(self._grammar) if used else None
        return TurnMatcher(self._grammar, self._prototype, self._compiler, own)

    def share(self) -> None:
        """From now on others begin with this turn's own lexer."""
        if self.own is not None:
            self._prototype.matcher, self.own = self.own, None

    def broken(self, tokens: int) -> EngineError:
        """What to say of `inner`, which cannot go on after `tokens` tokens, unless the turn goes on `renewed`."""
        self.full = self.own is None
        return failure(self.field, self.inner.get_error(), tokens)

    def follow(self, generated: Sequence[int]) -> None:
        """Takes in what is new of all tokens that the turn has generated. Raises EngineError if one cannot follow."""
        elsewhere = self.inner is None or list(generated[: len(self._fed)]) != self._fed
        if elsewhere:
            self.restart()
        if not self._feed(generated):
            raise self.broken(len(self._fed))

    def _feed(self, generated: Sequence[int]) -> bool:
        for token in generated[len(self._fed) :]:
            if self.begun and not self.inner.consume_token(token):
                return False
            self.begun = self.begun or token == self._after
            self._fed.append(token)
        return True

    def begins_in(self, drafts: Sequence[int]) -> int | None:
        """The column of a round from which the grammar holds, given its drafts. None: none of them."""
        if self.begun:
            return 0
        return drafts.index(self._after) + 1 if self._after in drafts else None


class Grammars:
    """Matchers and masks for one vocabulary. `end_ids`: tokens that end a turn once its grammar is complete. Not thread
    safe, but for `matcher`."""

    def __init__(self, tokenizer: Tokenizer, public_rows: int, end_ids: Sequence[int]) -> None:
        self._public_rows = public_rows
        self._rows = max(tokenizer.public_rows, public_rows)
        self._end_ids = tuple(token for token in end_ids if token < self._rows)
        self._words = -(-self._rows // 32)
        self._public = _bits_of(range(public_rows), self._words)
        self._compiler = GrammarCompiler(tokenizer, self._rows, self._end_ids)

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask over the vocabulary."""
        return 4 * self._words

    def warm(self) -> None:
        """Loads what the first turn with a grammar would wait for. Raises EngineError if it is missing."""
        self._compiler.warm("response_format")

    def matcher(self, grammar: Grammar | None, known: bool = False) -> TurnMatcher | None:
        """A new turn's matcher; None if nothing binds it. Raises EngineError, naming the field and the place, for a
        grammar that is needed and cannot be compiled. `known`: nothing is compiled; raises NotCompiled instead."""
        if grammar is None:
            return None
        try:
            prototype = self._compiler.known(grammar) if known else self._compiler.prototype(grammar)
        except EngineError:
            if grammar.needed:
                raise
            return None
        if prototype is None:
            raise NotCompiled
        return TurnMatcher(grammar, prototype, self._compiler)

    # ------------------------------------------------------------------------------------------------ masks

    def masks(self, lanes: Sequence[Lane], drafts: Sequence[Sequence[int]], width: int) -> Masks | None:
        """Masks of `width` columns for each lane, given its drafts; None if no lane has a grammar.

        `drafts[b]` are the live ones; where a lane has fewer than width - 1, its last columns allow everything.
        """
        rows = tuple(index for index, lane in enumerate(lanes) if lane.matcher is not None)
        if not rows:
            return None
        bits = np.full((len(rows), width, self._words), -1, dtype=np.int32)
        dead = self._fill(bits, [lanes[row] for row in rows], [list(drafts[row]) for row in rows])
        return Masks(bits, rows, {rows[index]: end for index, end in dead.items()})

    def _fill(
        self, bits: np.ndarray, lanes: Sequence[Lane], drafts: Sequence[list[int]]
    ) -> dict[int, tuple[int, EngineError]]:
        """Writes `bits` int32 [G, W, words] of lanes that all have a matcher; returns the dead ones as `Masks.dead`."""
        dead: dict[int, tuple[int, EngineError]] = {}
        plain: list[tuple[Any, int]] = []
        with_drafts: list[tuple[Any, int, list[int]]] = []
        width = bits.shape[1]
        for index, (lane, proposed) in enumerate(zip(lanes, drafts, strict=True)):
            matcher = lane.matcher
            assert matcher is not None
            try:
                matcher.follow(lane.generated)
            except EngineError as error:
                dead[index] = (0, error)
                continue
            begin = matcher.begins_in(proposed)
            bits[index, : len(proposed) + 1 if begin is None else begin] &= ~_bits_of(self._end_ids, self._words)
            if begin is None:
                continue
            rest = proposed[begin:]
            if matcher.own is not None:
                continue
            if rest:
                with_drafts.append((matcher.inner, index * width + begin, rest))
            else:
                plain.append((matcher.inner, index * width + begin))
        place = (bits.ctypes.data, 4 * self._words)
        if plain:
            self._compiler.executor.unsafe_compute_mask_ptr(plain, *place, bits.shape[0] * width)
        if with_drafts:
            self._compiler.executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *place, bits.shape[0] * width)
        for index, (lane, proposed) in enumerate(zip(lanes, drafts, strict=True)):
            if index not in dead and (end := self._settle(bits[index], lane, proposed)) is not None:
                dead[index] = end
        return dead

    def _settle(self, bits: np.ndarray, lane: Lane, proposed: list[int]) -> tuple[int, EngineError] | None:
        """The turn's own rules over what the library wrote into `bits` int32 [W, words]: stop ids, min_tokens, and
        where nothing may follow."""
        matcher = lane.matcher
        assert matcher is not None
        end = None
        if matcher.inner.is_error() and not matcher.inner.get_error().startswith(_NOTHING):
            end = (0, matcher.broken(len(lane.generated)))
        elif (matcher.own is not None and matcher.begins_in(proposed) is not None) or matcher.inner.is_error():
            try:
                end = self._stepwise(bits, matcher, lane.generated, proposed)
            except EngineError as error:
                end = (0, error)
        complete = (bits & _bits_of(self._end_ids[:1], self._words)).any(-1)
        stops = _bits_of((token for token in lane.stop_ids if token < self._rows), self._words)
        bits[complete] |= stops
        early = lane.submit.sampling.min_tokens - len(lane.published)
        bits[: max(0, early)] &= ~stops
        empty = np.flatnonzero(~(bits & self._public).any(-1))
        if empty.size and (end is None or empty[0] < end[0]):
            end = (int(empty[0]), dead_end(matcher.field, len(lane.generated) + int(empty[0])))
        if end is not None:
            bits[end[0] :] = -1  # not consumed, but the arithmetic over them must not see a row without a token
        return end

    def _stepwise(
        self, bits: np.ndarray, matcher: TurnMatcher, generated: Sequence[int], proposed: list[int]
    ) -> tuple[int, EngineError] | None:
        """Masks of a matcher whose lexer is its own, or that broke at some draft, which the ledger itself may never
        reach. Returns the column where it breaks again, if it does; the matcher is whole afterwards."""
        if matcher.own is None:
            matcher.restart()
            matcher.follow(generated)
        matcher.share()
        begin = matcher.begins_in(proposed)
        assert begin is not None
        trial = matcher.inner.deep_copy()
        bits[begin:] = -1
        for column in range(begin, len(proposed) + 1):
            mask = trial.compute_bitmask()
            if trial.is_error():
                return column, failure(matcher.field, trial.get_error(), len(generated) + column)
            bits[column] = np.frombuffer(mask, dtype=np.int32, count=self._words)
            if trial.is_stopped() or column == len(proposed) or not trial.try_consume_tokens([proposed[column]]):
                break
        return None


def dead_end(field: str, tokens: int) -> EngineError:
    message = f"{field}: after {tokens} tokens of the answer the grammar allows none of the model's tokens"
    return EngineError(errors.GRAMMAR_DEAD_END, message, field)


def failure(field: str, reason: str, tokens: int) -> EngineError:
    """Why a matcher cannot go on after `tokens` generated tokens, of what the library says."""
    reason = reason.strip().partition("\n")[0]
    if reason.startswith(_NOTHING):
        return dead_end(field, tokens)
    message = f"{field}: the grammar cannot be followed after {tokens} tokens of the answer: {reason}"
    return EngineError(errors.INVALID_REQUEST, message, field)


def _bits_of(ids: Any, words: int) -> np.ndarray:
    """int32 [words] with the bits of `ids` set."""
    flags = np.zeros(words * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)
