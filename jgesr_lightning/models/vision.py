"""The classification networks of torchvision, untrained, fitted to the data's channels and classes."""

from __future__ import annotations

from torch import nn

from jgesr_lightning.checks import nearest
from jgesr_lightning.models.plain import Size, image_sides

PREFIX = "torchvision:"


def torchvision_network(name: str, in_channels: int, size: Size, num_classes: int) -> nn.Module:
    """Return the network `name` of ``torchvision.models`` with a head of `num_classes` and no trained weights.

    Its first convolution is rebuilt where the images have other than three channels; nothing is downloaded.

    Raises:
        ValueError: unknown name (the nearest is named), or inputs that are no images.
    """
    height, width = image_sides(in_channels, size)
    from torchvision import models  # a second that only those pay who ask for it

    known = models.list_models(module=models)  # type: ignore[attr-defined]
    if name not in known:
        raise ValueError(f"torchvision has no classification network {name!r}{nearest(name, known)}")
    more: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):  # scores alone, no auxiliary heads; and PyTorch's own initialisation
        more = {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit_") and height == width:
        more = {"image_size": height}
    net: nn.Module = models.get_model(name, weights=None, num_classes=num_classes, **more)  # type: ignore[attr-defined]
    if in_channels != 3:
        _fit_channels(net, in_channels)
    return net


def _fit_channels(net: nn.Module, in_channels: int) -> None:
    """Put a convolution from `in_channels` in the place of the first one."""
    name, first = next((name, m) for name, m in net.named_modules() if isinstance(m, nn.Conv2d))
    fitted = nn.Conv2d(
        in_channels,
        first.out_channels,
        first.kernel_size,  # type: ignore[arg-type]
        first.stride,  # type: ignore[arg-type]
        first.padding,  # type: ignore[arg-type]
        first.dilation,  # type: ignore[arg-type]
        bias=first.bias is not None,
        padding_mode=first.padding_mode,
    )
    net.set_submodule(name, fitted)
