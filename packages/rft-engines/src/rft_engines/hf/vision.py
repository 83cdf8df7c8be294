"""Pictures of a request as inputs of a vision-language model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rft_engines.errors import InvalidRequestError, UnsupportedCombinationError
from rft_engines.generation import GenerationRequest


@dataclass(frozen=True)
class Pictures:
    """The pictures of one prompt, preprocessed.

    Attributes:
        pixel_values: patches of all pictures [patches, features].
        grids: patches in time, height and width for each picture [pictures, 3].
    """

    pixel_values: Tensor
    grids: Tensor


class PicturePreparer:
    """Turns pictures into patches and placeholders into as many ids as the patches take (Qwen-VL's form)."""

    def __init__(self, model: Any, image_processor: Callable[..., Any] | None) -> None:
        self._model = model
        self._image_processor = image_processor

    def prepare(self, request: GenerationRequest) -> tuple[GenerationRequest, Pictures | None]:
        """The request with its placeholders widened, and its pictures; a text request comes back as it is.

        The prompt holds one placeholder id for each picture, or is widened already.

        Raises:
            UnsupportedCombinationError: the model or the engine cannot take pictures.
            InvalidRequestError: the number of placeholders is not that of the pictures.
        """
        if not request.images:
            return request, None
        if not hasattr(getattr(self._model, "model", None), "get_rope_index"):
            raise UnsupportedCombinationError(
                f"engine 'hf' and images with {type(self._model).__name__}: it takes models of Qwen-VL's form"
            )
        if self._image_processor is None:
            raise UnsupportedCombinationError(
                "engine 'hf' and images without an image processor: give HFEngine image_processor=..."
            )
        made = self._image_processor(images=list(request.images), return_tensors="pt")
        pictures = Pictures(made["pixel_values"], made["image_grid_thw"])
        merged = self._model.config.vision_config.spatial_merge_size**2
        sizes = [int(grid.prod()) // merged for grid in pictures.grids]
        return replace(request, prompt_token_ids=self._widened(request, sizes)), pictures

    def _widened(self, request: GenerationRequest, sizes: Sequence[int]) -> tuple[int, ...]:
        placeholder = self._model.config.image_token_id
        found = request.prompt_token_ids.count(placeholder)
        if found == sum(sizes):
            return request.prompt_token_ids
        if found != len(sizes):
            raise InvalidRequestError(
                f"request {request.request_id!r} has {len(sizes)} images and {found} placeholder ids {placeholder}: "
                f"give one placeholder for each image, or {sum(sizes)} in all"
            )
        left = iter(sizes)
        ids: list[int] = []
        for token in request.prompt_token_ids:
            ids.extend([token] * next(left) if token == placeholder else [token])
        return tuple(ids)


def picture_inputs(
    model: Any, input_ids: Tensor, mask: Tensor, pictures: Sequence[Pictures | None]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Model inputs for a padded batch [B, T] some of whose rows have pictures.

    Returns the vision inputs, positions [3, B, T] (time, height, width) and for each row [B] what to add to the count
    of its tokens to get the position of the next one.
    """
    shown = [each for each in pictures if each is not None]
    device = input_ids.device
    grids = torch.cat([each.grids for each in shown]).to(device)
    types = (input_ids == model.config.image_token_id).int()
    vision = {
        "pixel_values": torch.cat([each.pixel_values for each in shown]).to(device=device, dtype=model.dtype),
        "image_grid_thw": grids,
        "mm_token_type_ids": types,
    }
    positions, offsets = model.model.get_rope_index(
        input_ids, mm_token_type_ids=types, image_grid_thw=grids, attention_mask=mask.long()
    )
    return vision, positions, offsets.reshape(-1)
