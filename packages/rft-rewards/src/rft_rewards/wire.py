"""The protocol between `RemoteRewardModel` and a reward server: JSON both ways, checked on both sides."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rft_rewards.sample import RewardSample

VERSION = "rft-rewards/1"
SCORE_PATH = "/v1/score"

_SIGNATURES = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp"))

REQUEST_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Request of rft-rewards/1: POST /v1/score with the header Idempotency-Key",
    "type": "object",
    "required": ["version", "samples"],
    "properties": {
        "version": {"const": VERSION},
        "samples": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "response"],
                "properties": {
                    "id": {"type": "string"},
                    "response": {"type": "string"},
                    "response_ids": {"type": "array", "items": {"type": "integer"}},
                    "prompt": {"type": "string"},
                    "reference": {"type": ["string", "null"]},
                    "label": {"type": "string"},
                    "metadata": {"type": "object"},
                    "images": {"type": "array", "items": {"type": "string"}, "description": "addresses or data: URLs"},
                    "truncated": {"type": "boolean"},
                },
            },
        },
    },
}
REPLY_SCHEMA: dict[str, Any] = {
    "title": "Reply of rft-rewards/1: one entry per sample, each with a score or an error",
    "type": "object",
    "required": ["version", "scores"],
    "properties": {
        "version": {"const": VERSION},
        "scores": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id"],
                "properties": {
                    "id": {"type": "string"},
                    "score": {"type": "number"},
                    "steps": {"type": "array", "items": {"type": "array", "prefixItems": [{}, {}]}},
                    "diagnostics": {"type": "object"},
                    "error": {"type": "string"},
                },
            },
        },
    },
}


def picture_address(picture: Any) -> str:
    """A picture as an address: text as it is, encoded bytes and PIL images as a `data:` URL."""
    if isinstance(picture, str):
        return picture
    if hasattr(picture, "save"):
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        picture = buffer.getvalue()
    if not isinstance(picture, bytes | bytearray | memoryview):
        raise TypeError(f"a picture is a {type(picture).__name__}: give bytes, an address or a PIL image")
    content = bytes(picture)
    kind = next((kind for signature, kind in _SIGNATURES if content.startswith(signature)), "octet-stream")
    kind = "webp" if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else kind
    media = f"image/{kind}" if kind != "octet-stream" else f"application/{kind}"
    return f"data:{media};base64,{base64.b64encode(content).decode('ascii')}"


def packed_sample(identity: str, sample: RewardSample) -> dict[str, Any]:
    """`sample` as JSON; metadata that JSON cannot hold is an error of the caller."""
    return {
        "id": identity,
        "response": sample.response,
        "response_ids": list(sample.response_ids),
        "prompt": sample.prompt,
        "reference": sample.reference,
        "label": sample.label,
        "metadata": dict(sample.metadata),
        "images": [picture_address(picture) for picture in sample.images],
        "truncated": sample.truncated,
    }


def unpacked_samples(body: bytes) -> tuple[list[str], list[RewardSample]]:
    """Ids and samples of a request.

    Raises:
        ValueError: the body is no request of this version.
    """
    request = json.loads(body)
    if not isinstance(request, dict) or request.get("version") != VERSION or not isinstance(request["samples"], list):
        raise ValueError(f"the body is no request of {VERSION}: see /schema")
    identities, samples = [], []
    for entry in request["samples"]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("id", "response")):
            raise ValueError("a sample lacks 'id' or 'response': see /schema")
        identities.append(entry["id"])
        samples.append(
            RewardSample(
                entry["response"],
                response_ids=tuple(map(int, entry.get("response_ids", ()))),
                prompt=str(entry.get("prompt", "")),
                reference=entry.get("reference"),
                label=str(entry.get("label", "default")),
                metadata=dict(entry.get("metadata", {})),
                images=tuple(map(str, entry.get("images", ()))),
                truncated=bool(entry.get("truncated", False)),
            )
        )
    return identities, samples


def read_reply(reply: Mapping[str, Any], expected: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Entries of a reply by id.

    Raises:
        ValueError: another version, other ids than the expected ones, or an entry with neither score nor error.
    """
    if reply["version"] != VERSION:
        raise ValueError(f"reply of version {reply['version']!r}: {VERSION} was asked for")
    entries = {str(entry["id"]): entry for entry in reply["scores"]}
    if len(reply["scores"]) != len(expected) or set(entries) != set(expected):
        raise ValueError(f"reply with {len(reply['scores'])} scores to {len(expected)} samples")
    for identity, entry in entries.items():
        if "error" not in entry and not _is_score(entry.get("score")):
            raise ValueError(f"no finite score and no error for {identity!r}")
    return entries


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
