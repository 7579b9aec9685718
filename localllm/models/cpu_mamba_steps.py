"""Mamba between its first product and its last one, as steps of a tape."""

from __future__ import annotations

from collections.abc import Iterator

from localllm.kernels.cpu_linear import Step
from localllm.layers.mamba import Mamba
from localllm.models.cpu_products import Products, product


def mamba_steps(write: Products, body: Mamba) -> Iterator[Step]:
    room, shape, stride = write.room, body.config.shape, body.in_proj.out_features
    own, place = room.states.scans[shape], room.states.place(body.layer)
    yield own.convolution(write.isa, body.weights, place, room.wide, stride)
    yield from product(write, body.x_proj, own.x, own.low, shape.low_floats)
    first, low = 0, own.low.view(-1)
    for norm in body.norms:
        part, features = low[first:], len(norm.weight)
        yield write.norm(norm, part, part, features, shape.low_floats, adds=False)
        first += features
    yield from product(write, body.steps_proj, low[2 * shape.state_size :], own.steps, shape.features, shape.low_floats)
    yield from own.scan(write.isa, body.weights, place, room.wide, stride, room.mixed)
