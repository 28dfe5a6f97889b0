"""The vision tower of a transformers model, and the images of a micro-batch.

The tower and its projector are all of the base model but its ``language_model``. They run in the
forward pass of the root, on all images of the micro-batch at once, and an image attends to itself
alone. The family's own forward pass receives their features and puts them in the place of the image
tokens' embeddings. Under Ulysses each rank computes the features of all images of its group, and
uses those of its own tokens.

Where other ranks have images and this one has none, the tower computes an image of zeros, none of
whose features is used. All ranks then gather the tower's weights and reduce its gradients together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from engine_api.batch import Batch
from engine_api.devices import device_of, move_tensor
from engine_api.errors import UnsupportedCapability
from engine_api.hf_vision import Vision
from engine_api.media import Media

__all__ = [
    "PackedImages",
    "attend_by_image",
    "compute_features",
    "multiply_patches",
    "pack_images",
    "replace_tower",
    "tower_of",
    "use_attention_by_image",
]

# transformers gives the bounds of images and windows to functions whose name has "flash". For any
# other it calls the function for each window of a few patches, thousands of times in a step.
_BY_IMAGE = "engine_torch_flash_by_image"

_TEXT = "language_model"
# The methods by which a family's forward pass asks for features.
_IMAGES = "get_image_features"
_VIDEOS = "get_video_features"


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedImages:
    """The images of one micro-batch on the device.

    Attributes:
        pixels: ``[R, …]`` in the dtype of the computation.
        grid: ``[N, 3]`` int64, rows of each image in time, height and width.
        own: the features that stand for image tokens or video tokens of this rank.
        are_videos: of these features whether each stands for a video token, on the host; None
            where the micro-batch has no video.
    """

    pixels: Tensor
    grid: Tensor
    own: slice
    are_videos: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Tensor]:
        """The arguments by which the model's forward pass asks for features."""
        found = {"pixel_values": self.pixels}
        return found if self.are_videos is None else found | {"pixel_values_videos": self.pixels}


def tower_of(lm: Any) -> list[nn.Module]:
    """Return the tower of a vision-language model and its projector, as modules."""
    return [module for name, module in lm.base_model.named_children() if name != _TEXT]


def pack_images(
    batch: Batch, vision: Vision, mine: Tensor, device: torch.device, dtype: torch.dtype
) -> PackedImages | None:
    """Move the images of a micro-batch to the device, or return None where no rank has any.

    Args:
        batch: documents whose media are not None where any rank has images.
        vision: the images that the model takes.
        mine: positions in the padded pack of this rank's tokens, without a gap.
        device: device of the tensors.
        dtype: dtype of the computation.
    """
    media = batch.media
    if media is None:
        return None
    ids = batch.input_ids.cpu()
    at = torch.isin(ids, torch.tensor(vision.tokens)).nonzero()[:, 0]
    before = int((at < mine[0]).sum())
    own = slice(before, before + int(((at >= mine[0]) & (at <= mine[-1])).sum()))
    are_videos = ids[at[own]] == vision.video_token if any(media.are_videos) else None
    if not media.num_images:
        media = _blank(vision)
    return PackedImages(
        pixels=move_tensor(media.pixels.to(dtype), device),
        grid=move_tensor(media.grid, device),
        own=own,
        are_videos=are_videos,
    )


def _blank(vision: Vision) -> Media:
    """Return one image of zeros, the smallest that the model takes."""
    grid = torch.tensor([vision.smallest])
    rows = int(grid.prod())
    return Media(
        pixels=torch.zeros(rows, *vision.row_shape), grid=grid, cu_images=torch.tensor([0, 1])
    )


def multiply_patches(lm: Any) -> None:
    """Let a tower embed its patches, which do not overlap, by a product and not a convolution.

    cuDNN computes convolutions of float32 in TF32, with 10 bits of mantissa, unless a switch of the
    whole process is off.
    """
    for part in tower_of(lm):
        for module in part.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d) and _is_by_patch(module):
                module.forward = MethodType(_embed_patches, module)


def use_attention_by_image(lm: Any) -> None:
    """Let a tower compute the attention of all images, or of all their windows, in one call."""
    from transformers import AttentionInterface, PreTrainedModel

    AttentionInterface.register(_BY_IMAGE, attend_by_image)
    for part in tower_of(lm):
        # A projector may have the configuration of the whole model, which is the text's, too.
        if isinstance(part, PreTrainedModel):
            # The public way wants the package flash-attn for such a name.
            part.config._attn_implementation = _BY_IMAGE  # noqa: SLF001


def attend_by_image(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in both directions within each image or window, for transformers.

    Where the device has it in this dtype, it is FlashAttention 2, else PyTorch's
    scaled-dot-product attention of all windows of one length at a time.

    Args:
        module: the attention layer, named in errors.
        query: ``[1, H, T, d]`` of the patches of all images; without bounds ``[N, H, T, d]``, an
            image in each row.
        key: of the same shape.
        value: of the same shape.
        attention_mask: always None.
        scaling: factor of the scores (None: ``d ** -0.5``).
        dropout: rate of dropout, which must be 0.
        is_causal: whether a patch attends to earlier ones alone, which must be false.
        cu_seq_lens_q: bounds of the images or windows ``[W+1]`` int32, or None.
        max_length_q: patches of the largest one.
        **_: the same bounds of the keys, and what transformers passes on to every layer.

    Returns:
        ``[1, T, H, d]`` or ``[N, T, H, d]``, and None for the attention weights.

    Raises:
        UnsupportedCapability: the layer has one of these, which would be left out.
    """
    if attention_mask is not None or dropout or is_causal:
        raise UnsupportedCapability(
            "attention of images with a mask or dropout, or to earlier patches alone",
            where=type(module).__name__,
            why="the kernels would leave that out",
            remedy="use another backend for this model family",
        )
    if cu_seq_lens_q is None:
        out = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    compute = str(query.dtype).removeprefix("torch.")
    if "varlen" in device_of(query.device.type).attention(compute):
        bounds = cu_seq_lens_q.to(torch.int32)
        longest = max_length_q or int(bounds.diff().max())
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling)
        assert isinstance(out, Tensor)
        # The kernel's result has the strides of q.
        return out.contiguous()[None], None
    return _attend_by_length(query, key, value, cu_seq_lens_q, scaling), None


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention ``[1, T, H, d]`` within windows, those of one length in one call."""
    lengths = bounds.diff()
    out = torch.empty_like(query[0])
    for length in lengths.unique().tolist():
        starts = bounds[:-1][lengths == length]
        own = (starts[:, None] + torch.arange(length, device=starts.device)).flatten()
        q, k, v = (
            # [H, T, d] to [W, H, length, d].
            x[0][:, own].unflatten(1, (-1, length)).transpose(0, 1)
            for x in (query, key, value)
        )
        attended = functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        out = out.index_copy(1, own, attended.transpose(0, 1).flatten(1, 2))
    return out.transpose(0, 1).contiguous()[None]


def _is_by_patch(convolution: nn.Conv2d | nn.Conv3d) -> bool:
    padding = convolution.padding
    is_padded = padding != "valid" if isinstance(padding, str) else any(padding)
    return (
        convolution.kernel_size == convolution.stride
        and not is_padded
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
    )


def _embed_patches(self: nn.Conv2d | nn.Conv3d, pixels: Tensor) -> Tensor:
    """Return ``[B, d, …]``, a number for each patch of ``pixels`` ``[B, C, …]`` and feature."""
    kernel = self.kernel_size
    counts = [size // width for size, width in zip(pixels.shape[2:], kernel, strict=True)]
    for dim, (count, width) in enumerate(zip(counts, kernel, strict=True), start=2):
        pixels = pixels.narrow(dim, 0, count * width)
    divided = [part for pair in zip(counts, kernel, strict=True) for part in pair]
    axes = range(2, 2 + 2 * len(kernel))
    patches = pixels.reshape(*pixels.shape[:2], *divided)
    patches = patches.permute(0, *axes[::2], 1, *axes[1::2]).flatten(1 + len(kernel))
    return functional.linear(patches, self.weight.flatten(1), self.bias).movedim(-1, 1)


def compute_features(
    lm: Any, vision: Vision, images: PackedImages, *, trained: bool
) -> dict[str, Any]:
    """Return the output of the tower for images and for videos, with this rank's features.

    The tower computes both at once, and takes no notice of which is which. The family's forward
    pass takes the outputs, by the name of the method that it asks, inside ``replace_tower``.

    Args:
        lm: the vision-language model.
        vision: the images that it takes.
        images: the images of the micro-batch.
        trained: whether the tower's parameters need gradients.
    """
    arguments = {"pixel_values": images.pixels}
    if vision.has_grid:
        arguments["image_grid_thw"] = images.grid
    with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
        output = lm.base_model.get_image_features(**arguments, return_dict=True)
    if images.are_videos is None:
        return {_IMAGES: _select(output, images.own, None)}
    places = images.are_videos
    return {
        name: _select(output, images.own, chosen.nonzero()[:, 0].to(images.pixels.device))
        for name, chosen in ((_IMAGES, ~places), (_VIDEOS, places))
    }


def _select(output: Any, own: slice, places: Tensor | None) -> Any:
    """Return a tower's output with some of this rank's features, or with all of them (None)."""
    found = copy.copy(output)
    found.pooler_output = _take(output.pooler_output, own, places)
    layers = getattr(output, "deepstack_features", None)
    if layers is not None:
        found.deepstack_features = [_take(layer, own, places) for layer in layers]
    return found


@contextmanager
def replace_tower(lm: Any, features: Mapping[str, Any]) -> Iterator[None]:
    """Let the model's forward pass take features that were computed, wherever it asks its tower.

    The argument of transformers for it (``mm_encoder_outputs``) came with 5.18.
    """
    model = lm.base_model
    for name, output in features.items():
        setattr(model, name, _returning(output))
    try:
        yield
    finally:
        for name in features:
            delattr(model, name)


def _returning(output: Any) -> Callable[..., Any]:
    """Return a function that returns ``output`` whatever it is called with."""
    return lambda *_args, **_options: output


def _take(features: Any, own: slice, places: Tensor | None) -> Any:
    """Return some of the features of all images, in the form in which they came.

    They are one tensor ``[n, d]`` for each image, one ``[N, n, d]`` of images of one size, or one
    of all tokens of all images ``[T, d]``.
    """
    if not isinstance(features, Tensor):
        rows = torch.cat(list(features))
    else:
        rows = features if features.ndim == 2 else features.flatten(0, 1)
    taken = rows[own] if places is None else rows[own][places]
    if not isinstance(features, Tensor):
        return (taken,)
    return taken if features.ndim == 2 else taken[None]
