"""Errors of requests to write, where the model is an encoder."""

from __future__ import annotations

from edgespec.errors import InvalidRequest
from edgespec.runtimes.files.manifest import Manifest


def require_writer(manifest: Manifest) -> None:
    """Raise ``InvalidRequest`` for a bundle of an encoder."""
    if manifest.is_encoder:
        raise no_encoder()


def no_encoder() -> InvalidRequest:
    """Make the error of a request to write, to an encoder."""
    return InvalidRequest(
        "this bundle's model is an encoder: it reads texts and writes none",
        "use embed or rerank (`edgespec embed`, /v1/embeddings, /v1/rerank)",
    )
