"""Requests that share prefixes."""

from __future__ import annotations

import random

from engines import Prompt, prompts

REQUESTS = 200


def family_of_prompts(seed: int = 5) -> list[Prompt]:
    """Conversations: prefixes of a few long texts, each with a tail of its own."""
    chosen = random.Random(seed)
    roots = prompts(*[480] * 12, seed=seed)
    family = []
    for _ in range(REQUESTS):
        root = chosen.choice(roots)
        tail = [chosen.randrange(512) for _ in range(chosen.randrange(1, 40))]
        family.append(root[: chosen.randrange(40, len(root))] + tail)
    return family
