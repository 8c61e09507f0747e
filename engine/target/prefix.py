"""Names for the beginnings of texts, by which sequences find keys and values that others have computed.

A block of keys and values is a function of all tokens up to its end. Its name is a hash of the name of the block before and of
its own tokens, and the first name in the chain is a hash of the tenant, keyed with a secret of the worker: equal names mean
equal beginnings of one tenant's texts, and nobody can tell by a quick answer what another tenant has asked. (Hash chains of
blocks are those of vLLM's automatic prefix caching, Kwon et al., arXiv 2309.06180, section 4.4.)
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.target.kernels import BLOCK


class Names:
    """The names of one text's whole blocks, in order, as its tokens become known.

    `secret` is at most 64 bytes, the same for all sequences that may share.
    """

    def __init__(self, tenant: str, secret: bytes) -> None:
        self._secret = secret
        self._root = self._hash(tenant.encode("utf-8", "surrogatepass"))
        self._names: list[bytes] = []

    def of(self, tokens: NDArray[np.int32]) -> list[bytes]:
        """A name for every whole block of `tokens` (int32 [n]), which begin with those of the call before.

        Each block is hashed once, however often it is asked for.
        """
        for i in range(len(self._names), len(tokens) // BLOCK):
            before = self._names[-1] if self._names else self._root
            self._names.append(self._hash(before + tokens[i * BLOCK : (i + 1) * BLOCK].astype("<i4").tobytes()))
        return self._names[: len(tokens) // BLOCK]

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=32, key=self._secret).digest()
