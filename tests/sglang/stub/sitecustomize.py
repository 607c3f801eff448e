"""Schemas of torchvision's operators, whose library is for torch with CUDA."""

import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in (
    *("roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward"),
    *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
    *("deform_conv2d", "_deform_conv2d_backward", "qroi_align"),
):
    _OPERATORS.define(f"{_name}(Tensor a) -> Tensor")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor a, Tensor b, float c) -> Tensor")
