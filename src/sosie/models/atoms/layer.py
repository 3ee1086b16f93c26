"""A convolution whose kernels are combinations of a few small ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.common_types import _size_2_t
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.utils import _pair
from torch.nn.utils import skip_init


def check_count(atoms: int) -> None:
    """Refuse what is no number of atoms."""
    if isinstance(atoms, bool) or not isinstance(atoms, int) or atoms < 1:
        raise ValueError(f"a convolution is made of at least one atom, got atoms={atoms!r}")


class AtomConv2d(_ConvNd):
    """A convolution with weight = coefficients × atoms (Qiu et al. 2018).

    `atoms` (m, height, width) are the small kernels, `coefficients` (outputs, inputs / groups, m) say how much of each
    goes into a kernel. The weight is put together in every forward, by one product that costs a fraction m / (batch ×
    height × width of the output) of the convolution; then it is a plain convolution.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _size_2_t,
        atoms: int,
        *,
        stride: _size_2_t = 1,
        padding: _size_2_t | str = 0,
        dilation: _size_2_t = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not that of a convolution, which would make a weight
        check_count(atoms)
        if in_channels % groups or out_channels % groups:
            raise ValueError(f"{in_channels} and {out_channels} channels do not divide into {groups} groups")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = _pair(kernel_size)
        self.stride, self.dilation = _pair(stride), _pair(dilation)
        self.transposed, self.output_padding = False, (0, 0)
        self.padding = padding if isinstance(padding, str) else _pair(padding)
        self.padding_mode = padding_mode  # type: ignore[assignment]
        self.coefficients = nn.Parameter(
            torch.empty(out_channels, in_channels // groups, atoms, device=device, dtype=dtype)
        )
        self.atoms = nn.Parameter(torch.empty(atoms, *self.kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Atoms of length about 1, coefficients so that kernels have the variance of He et al. 2015 (fan out).

        The weight alone would leave their length open, but the shorter atoms are, the further training turns them.
        """
        count, height, width = self.atoms.shape
        nn.init.normal_(self.atoms, std=1 / math.sqrt(height * width))
        nn.init.normal_(self.coefficients, std=math.sqrt(2 * self.groups / (self.out_channels * count)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def like(cls, layer: nn.Conv2d, atoms: int, *, empty: bool = False) -> AtomConv2d:
        """A layer of the same shape with parameters of its own, drawn afresh or (`empty`) yet to be set."""
        made = cls(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            atoms,
            stride=layer.stride,  # type: ignore[arg-type]
            padding=layer.padding,  # type: ignore[arg-type]
            dilation=layer.dilation,  # type: ignore[arg-type]
            groups=layer.groups,
            bias=layer.bias is not None,
            padding_mode=layer.padding_mode,
            device="meta" if empty else layer.weight.device,
            dtype=layer.weight.dtype,
        )
        made = made.to_empty(device=layer.weight.device) if empty else made
        return made.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The kernels, (outputs, inputs / groups, height, width)."""
        # Under autocast atoms would be rounded before they are put together, and most of what they learn be lost.
        with torch.autocast(self.atoms.device.type, enabled=False):
            kernels = self.coefficients.flatten(0, 1) @ self.atoms.flatten(1)
        return kernels.view(*self.coefficients.shape[:2], *self.atoms.shape[1:])

    def forward(self, x: Tensor) -> Tensor:
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            x = nn.functional.pad(x, self._both_sides(), mode=self.padding_mode)
            padding = 0
        return nn.functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _both_sides(self) -> list[int]:
        """How much is padded left, right, above and below."""
        sides: list[int] = []
        for axis in (1, 0):
            whole = self.dilation[axis] * (self.kernel_size[axis] - 1)
            if self.padding == "same":
                sides += [whole // 2, whole - whole // 2]
            elif isinstance(self.padding, str):
                sides += [0, 0]
            else:
                sides += [self.padding[axis]] * 2
        return sides

    def to_conv(self) -> nn.Conv2d:
        """A plain convolution that computes the same, with parameters of its own."""
        made = skip_init(  # leaves the random state alone
            nn.Conv2d,
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device=self.atoms.device,
            dtype=self.atoms.dtype,
        )
        assert isinstance(made, nn.Conv2d)
        with torch.no_grad():
            made.weight.copy_(self.weight)
            if made.bias is not None and self.bias is not None:
                made.bias.copy_(self.bias)
                made.bias.requires_grad_(self.bias.requires_grad)
        made.weight.requires_grad_(self.coefficients.requires_grad or self.atoms.requires_grad)
        return made.train(self.training)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, atoms={len(self.atoms)}"
        for name, plain in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1)):
            if (value := getattr(self, name)) != plain:
                text += f", {name}={value}"
        return text + (", bias=False" if self.bias is None else "")
