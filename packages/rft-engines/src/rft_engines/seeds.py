"""Seeds of requests and samples: stable over releases, machines and batch compositions."""

import hashlib

_SEED_BITS = 63
SEED_LIMIT = 1 << _SEED_BITS


def _mixed(*parts: int | str) -> int:
    text = ":".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> (64 - _SEED_BITS)


def sample_seed(seed: int, sample_index: int) -> int:
    """Seed of sample `sample_index` of a request with `seed`.

    Sample 0 keeps the request's own seed, so one request with n samples and n requests of one sample, seeded by this
    function, give the same tokens.
    """
    return seed if sample_index == 0 else _mixed("sample", seed, sample_index)


def request_seed(base: int, step: int, prompt_index: int, sample_index: int = 0) -> int:
    """Seed in [0, 2**63) of one sample of one prompt at one step, well mixed over all four numbers.

    `request_seed(base, step, prompt, i)` equals `sample_seed(request_seed(base, step, prompt), i)`.
    """
    return sample_seed(_mixed("request", base, step, prompt_index), sample_index)


class UniformStream:
    """The uniform numbers of one sample, addressed by token position (SplitMix64, Steele et al. 2014).

    Stateless: the number for position t depends on the seed and t alone, so neither the other rows of a batch nor an
    interruption changes it.
    """

    _MASK = (1 << 64) - 1

    def __init__(self, seed: int) -> None:
        self._start = seed & self._MASK

    def at(self, position: int) -> float:
        """Uniform number in [0, 1) with 53 random bits for `position`, 0 or above."""
        z = (self._start + (position + 1) * 0x9E3779B97F4A7C15) & self._MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & self._MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & self._MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53
