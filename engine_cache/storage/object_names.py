"""Names of pages in a storage backend.

A block hash identifies neither the model, nor the layout of the bytes, nor the namespace of the prompt. It is therefore
preceded by an optional tag of the operator, a fingerprint of model and layout, and a tag of the namespace, each
followed by `_`:

    {extra_backend_tag}_{fingerprint}_ | {namespace}_{block hash} | {added by the kind of backend}
    StorageIdentity.prefix             | page_key                 | pool, model, rank
"""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256

from engine_cache.storage.base import PoolName
from kv_events.errors import InvalidValueError

PAGE_KEY_PATTERN = r"(?:[0-9a-f]{16}_)?[0-9a-f]{64}"
"""Regular expression of storage keys."""

_BLOCK_HASH = re.compile(r"[0-9a-f]{64}")
# The lengths keep file names below the 255 bytes of common file systems. An operator's tag must not look like the tag
# of a namespace: a backend without a tag would mistake those pages for its own. The same holds for the fingerprint.
_TAG = re.compile(r"(?![0-9a-f]{16}$)[A-Za-z0-9.-]{1,32}")
_MODEL = re.compile(r"[A-Za-z0-9./@:+_-]{1,80}")
_NAMESPACE_DIGITS = 16
_FINGERPRINT_DIGITS = 20


def page_key(block_hash: str, extra_key: str | None = None) -> str:
    """Return the storage key of a page.

    block_hash: 64 hex digits, otherwise InvalidValueError is raised. extra_key: namespace of the page, None for the
    default one.
    """
    return page_keys([block_hash], extra_key)[0]


def page_keys(block_hashes: Iterable[str], extra_key: str | None = None) -> list[str]:
    """Return the storage keys of pages of one namespace."""
    tag = f"{_digest(extra_key, _NAMESPACE_DIGITS)}_" if extra_key is not None else ""
    return [f"{tag}{_checked(block_hash)}" for block_hash in block_hashes]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Meaning of the bytes of a KV page. Pages of different layouts have different names."""

    dtype: str
    page_size: int
    shape: tuple[int, ...]
    """Shape of the pool's rows, for example layers, heads and head size."""
    host_layout: str
    """`layer_first`, `page_first` or `page_first_direct`."""


@dataclass(frozen=True, slots=True)
class StorageIdentity:
    """Model, layout and rank that pages belong to. Raises InvalidValueError naming an invalid field."""

    model_name: str
    layout: PageLayout
    is_mla: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    extra_backend_tag: str | None = None
    """Set by the operator to separate pages of equal model and layout."""
    use_fingerprint: bool = True
    """If False, names are those of SGLang, and pages of another layout are recognised by their length only."""

    def __post_init__(self) -> None:
        if not _MODEL.fullmatch(self.model_name):
            raise InvalidValueError("model_name", self.model_name, "1 to 80 of A-Z a-z 0-9 . / @ : + _ -")
        if self.extra_backend_tag is not None and not _TAG.fullmatch(self.extra_backend_tag):
            expected = "1 to 32 of A-Z a-z 0-9 . -, and not 16 hex digits"
            raise InvalidValueError("extra_backend_tag", self.extra_backend_tag, expected)
        for kind, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if not 0 <= rank < size:
                raise InvalidValueError(f"{kind}_rank", rank, f"0 .. {size - 1}")

    @property
    def fingerprint(self) -> str:
        """20 hex digits of the SHA-256 of model name and layout."""
        return _digest(json.dumps([self.model_name, asdict(self.layout)], sort_keys=True), _FINGERPRINT_DIGITS)

    @property
    def prefix(self) -> str:
        """The part of every name before the storage key."""
        tags = [self.extra_backend_tag, self.fingerprint if self.use_fingerprint else None]
        return "".join(f"{tag}_" for tag in tags if tag is not None)

    @property
    def file_suffix(self) -> str:
        """Model and rank, the end of file names. Tensor-parallel ranks of an MLA model share their pages."""
        tp = "" if self.is_mla else f"_{self.tp_rank}_{self.tp_size}"
        pp = f"_{self.pp_size}_{self.pp_rank}" if self.pp_size > 1 else ""
        return f"_{self.model_name.replace('/', '-')}{tp}{pp}"

    def object_names(self, pool: PoolName, num_runs: int) -> list[str]:
        """Return the parts after the storage key in the names of a page's objects, one per contiguous run of memory,
        in the order of the runs. Tensor-parallel ranks share pages of MLA and of an index. Raises InvalidValueError
        if pages of the pool have another number of runs.
        """
        latent, of_rank = self._rank_tags()
        if pool is PoolName.MAMBA:
            names = ["temporal", *(f"conv_{number}" for number in range(num_runs - 1))]
            ends = [f"{of_rank}_{name}" for name in names]
        elif pool is PoolName.INDEXER:
            ends = [f"{latent}_indexer"]
        elif self.is_mla:
            ends = [f"{latent}_swa" if pool is PoolName.SWA else f"{latent}_k"]
        else:
            kind = "swa_" if pool is PoolName.SWA else ""
            ends = [f"{of_rank}_{kind}{part}" for part in "kv"]
        if len(ends) != num_runs:
            raise InvalidValueError(f"runs of memory a page of pool {pool.value}", num_runs, f"{len(ends)}: {ends}")
        return [f"_{end}" for end in ends]

    @property
    def object_pattern(self) -> str:
        """Regular expression of the whole names of all objects of this model and rank, for Python and ECMAScript."""
        latent, of_rank = self._rank_tags()
        kv = f"{latent}_(?:k|swa)" if self.is_mla else f"{of_rank}_(?:swa_)?[kv]"
        ends = "|".join((kv, f"{latent}_indexer", f"{of_rank}_(?:temporal|conv_[0-9]+)"))
        return rf"^{self.prefix.replace('.', '[.]')}{PAGE_KEY_PATTERN}_(?:{ends})$"

    def _rank_tags(self) -> tuple[str, str]:
        """Rank tags of objects that all tensor-parallel ranks share, and of objects of a single rank."""
        if self.pp_size > 1:
            return str(self.pp_rank), f"{self.tp_rank}_{self.pp_rank}"
        return "", str(self.tp_rank)


def _digest(text: str, digits: int) -> str:
    return sha256(text.encode()).hexdigest()[:digits]


def _checked(block_hash: str) -> str:
    if not _BLOCK_HASH.fullmatch(block_hash):
        raise InvalidValueError("block hash", block_hash, "64 lower-case hex digits")
    return block_hash
