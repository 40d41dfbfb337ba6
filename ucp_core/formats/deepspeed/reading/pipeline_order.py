"""Which layers every stage of a pipeline trained, found from what its optimizer numbers. Pure.

Without ZeRO nothing names an optimizer's parameters, and files of layers do not tell their stage.
But a ``PipelineModule`` registers its tied modules first and then the layers of its stage, which
are consecutive; so the shapes of the optimizer's state say which layers they are.
"""

from __future__ import annotations

from itertools import combinations, permutations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    #: Takes a stage and its layers in the optimizer's order; None if these cannot be them.
    Fits = Callable[[int, Sequence[int]], "Names | None"]

#: Names of the parameters of every group.
Names = tuple[tuple[str, ...], ...]
#: Of a stage: its names, its layers, and how many of these are tied.
_Found = tuple[Names, tuple[int, ...], int]


class Stages(NamedTuple):
    """What the stages trained.

    Attributes:
        names: By stage, those of its parameters by group.
        layers: By stage, the files that hold them, tied modules first.
        tied: The layer whose file holds a tied module, by each of those that hold it too.
    """

    names: tuple[Names, ...]
    layers: tuple[tuple[int, ...], ...]
    tied: tuple[int, ...]


class _Guess(NamedTuple):
    """What may be so: ``tied`` layers in ``stages_min`` stages or more; ``exact``: none frozen."""

    order: tuple[int, ...]
    tied: tuple[int, ...]
    stages_min: int
    exact: bool


def find_stages(
    sizes: dict[int, int],
    needs: Sequence[int],
    copies: dict[int, int],
    fits: Fits,
    proven: Callable[[Stages], bool],
) -> list[Stages]:
    """Return the simplest explanations of what the stages' optimizers number.

    Ties that only files with equal contents show are tried first: without them such a file would
    be of a layer of its own.

    Args:
        sizes: By layer in order: how much its file has of what is counted in ``needs``.
        needs: By stage: how much its optimizer has.
        copies: Layers whose files are equal to an earlier one's, and which that is.
        fits: Tells whether a stage can have certain layers.
        proven: Tells whether the stages' states of tied modules are equal, as they must be.

    Returns:
        Several where they differ in a name; none where nothing fits.
    """
    for tier in _tiers(tuple(sizes), copies):
        found: dict[tuple[Names, ...], Stages] = {}
        for guess in tier:
            for stages in _Search(guess, sizes, needs, fits).explanations():
                if stages.names not in found and proven(stages):
                    found[stages.names] = stages
        if found:
            return list(found.values())
    return []


def _tiers(layers: tuple[int, ...], copies: dict[int, int]) -> Iterator[list[_Guess]]:
    """Yield guesses that are as simple as one another, the simplest first."""
    if copies:
        own = tuple(layer for layer in layers if layer not in copies)
        yield [_Guess(own, tuple(sorted(set(copies.values()))), 1, exact=True)]
    yield [_Guess(layers, (), 0, exact=True)]
    yield [_Guess(layers, (one,), 2, exact=True) for one in layers]
    yield [_Guess(layers, (one,), 1, exact=True) for one in layers]
    yield [_Guess(layers, pair, 2, exact=True) for pair in combinations(layers, 2)]
    yield [_Guess(layers, (), 0, exact=False)]
    yield [_Guess(layers, (one,), 2, exact=False) for one in layers]


class _Search:
    """Goes through the stages and gives each the next layers that fit."""

    def __init__(
        self, guess: _Guess, sizes: dict[int, int], needs: Sequence[int], fits: Fits
    ) -> None:
        self._guess = guess
        self._sizes = sizes
        self._needs = needs
        self._fits = fits
        self._order = tuple(layer for layer in guess.order if layer not in guess.tied)
        count = len(guess.tied)
        self._fronts = [f for n in range(count + 1) for f in permutations(guess.tied, n)]

    def explanations(self) -> Iterator[Stages]:
        """Yield what the guess leads to."""
        guess = self._guess
        extra = sum(self._needs) - self._size(self._order)
        tied = self._size(guess.tied)
        if guess.exact and not self._can_be(extra, tied):
            return
        for found in self._from(0, 0, extra if guess.exact else sum(self._needs)):
            held = [set(layers[:num_tied]) for _, layers, num_tied in found]
            enough = all(sum(one in h for h in held) >= guess.stages_min for one in guess.tied)
            if enough and all(_stands(one, found) for one in guess.tied):
                names, layers = tuple(n for n, _, _ in found), tuple(ls for _, ls, _ in found)
                yield Stages(names, layers, guess.tied)

    def _can_be(self, extra: int, tied: int) -> bool:
        """Return whether what is not in other layers can be that of the tied ones."""
        if len(self._guess.tied) == 1 and tied and extra % tied:
            return False
        return extra >= self._guess.stages_min * tied and (extra == 0) == (tied == 0)

    def _size(self, layers: Sequence[int]) -> int:
        return sum(self._sizes[layer] for layer in layers)

    def _from(self, stage: int, first: int, extra: int) -> Iterator[list[_Found]]:
        """Yield the layers of a stage and those behind it; ``extra`` may yet be of tied ones."""
        if stage == len(self._needs):
            if first == len(self._order):
                yield []
            return
        for front in self._fronts:
            left = extra - self._size(front)
            for last in self._ends(stage, front, first) if left >= 0 else ():
                layers = (*front, *self._order[first:last])
                names = self._fits(stage, layers)
                if names is not None:
                    for more in self._from(stage + 1, last, left):
                        yield [(names, layers, len(front)), *more]

    def _ends(self, stage: int, front: tuple[int, ...], first: int) -> Iterator[int]:
        """Yield the layers before which a stage can end: it has at least what it numbers."""
        left = self._needs[stage] - self._size(front)
        for last in range(first, len(self._order) + 1):
            if left == 0 or (left < 0 and not self._guess.exact):
                yield last
            if left < 0 and self._guess.exact:
                return
            left -= self._sizes[self._order[last]] if last < len(self._order) else 0


def _stands(tied: int, found: Sequence[_Found]) -> bool:
    """Return whether a stage that trained a tied module can have it at the layer of its file."""
    for stage, (_, layers, num_tied) in enumerate(found):
        before = [one for _, ls, n in found[:stage] for one in ls[n:]]
        behind = [one for _, ls, n in found[stage + 1 :] for one in ls[n:]]
        fits = max(before, default=-1) < tied < min(behind, default=tied + 1)
        if tied in layers[:num_tied] and fits:
            return True
    return False
