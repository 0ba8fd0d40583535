"""What the radial-directional average gives for a matrix that is merged in slices of rows, against the whole matrix.

    python benchmarks/rda_slices.py [--seeds 5]

A matrix of 2048 x 256, merged whole and in 8 slices of 256 rows, of 4 learners with equal weights whose updates are
random, agree everywhere, agree more from row to row, or touch rows of their own. Prints the norm of the difference as a
share of the norm of the update: least and greatest of the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from hf_diloco.core.merge import radial_directional_average

ROWS, COLUMNS, SLICES, LEARNERS = 2048, 256, 8, 4
WEIGHTS = [1.0] * LEARNERS

Noise = Callable[[], Tensor]


def random(noise: Noise) -> list[Tensor]:
    return [noise() for _ in range(LEARNERS)]


def agreeing(noise: Noise) -> list[Tensor]:
    common = noise()
    return [common + noise() for _ in range(LEARNERS)]


def more_and_more_agreeing(noise: Noise) -> list[Tensor]:
    share = torch.linspace(0, 1, ROWS)[:, None]
    common = noise()
    return [share * common + (1 - share) * noise() for _ in range(LEARNERS)]


def rows_of_their_own(noise: Noise) -> list[Tensor]:
    updates = []
    for learner in range(LEARNERS):
        update = torch.zeros(ROWS, COLUMNS)
        own = slice(learner * ROWS // LEARNERS, (learner + 1) * ROWS // LEARNERS)
        update[own] = noise()[own]
        updates.append(update)
    return updates


def difference(updates: list[Tensor]) -> float:
    """Of the two results, as a share of the norm of the whole one."""
    whole = radial_directional_average(updates, WEIGHTS)
    pieces = zip(*(update.chunk(SLICES) for update in updates), strict=True)
    sliced = torch.cat([radial_directional_average(list(piece), WEIGHTS) for piece in pieces])
    return float((sliced - whole).norm() / whole.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for kind in (random, agreeing, more_and_more_agreeing, rows_of_their_own):
        shares = []
        for seed in range(options.seeds):
            generator = torch.Generator().manual_seed(seed)
            shares.append(difference(kind(lambda: torch.randn(ROWS, COLUMNS, generator=generator))))  # noqa: B023
        print(f"{kind.__name__.replace('_', ' '):24} {min(shares):8.3%} to {max(shares):8.3%}")


if __name__ == "__main__":
    main()
