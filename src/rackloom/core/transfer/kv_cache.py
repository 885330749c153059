"""A transfer rate in terms of a served model: the hand-over of the KV cache of one prompt.

`kv_terms` gives the milliseconds of the hand-over, and its share of the time to first token if a prefill
time is given. A token's entry has 2 (K and V) x layers x KV heads x head size x bytes per element.
Multi-head latent attention keeps one compressed vector per layer instead. The table of sizes is for bf16.
"""

import msgspec

from rackloom.errors import Refused

BYTES_PER_TOKEN = {
    "Llama-3.1-8B": 131_072,
    "Llama-3.1-70B": 327_680,
    "Qwen3-8B": 147_456,
    "Qwen3-235B": 192_512,
    "gpt-oss-120b": 73_728,
    "gpt-oss-20b": 49_152,
    "DeepSeek-R1": 70_272,
}


class KvTerms(msgspec.Struct, frozen=True):
    """The hand-over of one prompt at a measured rate."""

    model: str
    tokens: int
    cache_bytes: int
    milliseconds: float
    prefill_ms: float | None
    ttft_share: float | None
    """Hand-over / (prefill + hand-over), or None if no prefill time was given."""


def kv_terms(model: str, tokens: int, gigabytes_per_second: float, prefill_ms: float | None) -> KvTerms:
    """The terms for a prompt of `tokens` at a positive rate. `prefill_ms` is in milliseconds.

    Raises:
        Refused: no such model in the table, or a number is not positive.
    """
    if model not in BYTES_PER_TOKEN:
        raise Refused(
            f"no KV size is known for {model!r}", nearest_fix=f"use one of {', '.join(BYTES_PER_TOKEN)}"
        )
    if tokens < 1 or (prefill_ms is not None and prefill_ms <= 0):
        raise Refused("a prompt has at least one token and takes time to prefill", nearest_fix="give both")
    size = tokens * BYTES_PER_TOKEN[model]
    milliseconds = size / gigabytes_per_second / 1e6
    share = None if prefill_ms is None else milliseconds / (prefill_ms + milliseconds)
    return KvTerms(model, tokens, size, milliseconds, prefill_ms, share)


def kv_terms_of_all_models(
    tokens: int, gigabytes_per_second: float, prefill_ms: float | None
) -> tuple[KvTerms, ...]:
    """The same for every model of the table, smallest cache first."""
    terms = [kv_terms(model, tokens, gigabytes_per_second, prefill_ms) for model in BYTES_PER_TOKEN]
    return tuple(sorted(terms, key=lambda term: term.cache_bytes))
