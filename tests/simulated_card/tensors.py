"""Tensors on the simulated card: every operator of torch becomes work of a stream over the card's memory.

A tensor says that it is on cuda:0, and holds a view of the arena. Shapes are found on the meta device, memory comes
from the card, and what computes is torch's own operator of the CPU, once it is the work's turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.simulated_card.device import DEVICE, SimulatedCard
from tests.simulated_card.host import span
from tests.simulated_card.memory import Block

aten = torch.ops.aten
_UNWRITTEN = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


class SimulatedTensor(Tensor):
    """content: the view of the arena. block: keeps its memory."""

    content: Tensor
    block: Block
    card: SimulatedCard
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, content: Tensor, block: Block, card: SimulatedCard) -> SimulatedTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            content.size(),
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.content, made.block, made.card = content, block, card
        return made

    def data_ptr(self) -> int:
        return self.content.data_ptr()

    def tolist(self) -> Any:
        self.card.synchronize(self.card.current, "tolist()")
        with _disable_current_modes():
            return self.content.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def __repr__(self) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = pytree.tree_leaves((args, kwargs))
        card = next(x.card for x in flat if isinstance(x, SimulatedTensor))
        return _Call(card, func, args, kwargs or {}).made()


class OnCard(TorchDispatchMode):
    """Inside, torch makes tensors on the card, and page-locked ones. It holds for the thread that enters it."""

    def __init__(self, card: SimulatedCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Call(self._card, func, args, kwargs or {}).made()


def content_of(value: Any) -> Any:
    """What a kernel sees: tensors of the card as views of its memory, within lists and dataclasses too."""
    if isinstance(value, SimulatedTensor):
        return value.content
    if isinstance(value, list | tuple):
        contents = map(content_of, value)
        return type(value)(*contents) if hasattr(value, "_fields") else type(value)(contents)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{field.name: content_of(getattr(value, field.name)) for field in fields(value) if field.init}
        )
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors that `content_of` finds, as they are; none that stands for a shape alone."""
    if isinstance(value, Tensor):
        if value.device.type != "meta":
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in([*value.values()])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])


def new_tensor(card: SimulatedCard, like: Tensor) -> SimulatedTensor:
    """like: on the meta device."""
    elements = sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True)) + 1
    num_bytes = (elements if like.numel() else 1) * like.dtype.itemsize
    memory, block = card.poisoned(num_bytes)
    return SimulatedTensor(torch.as_strided(memory.view(like.dtype), like.size(), like.stride()), block, card)


class _Call:
    """One call of an operator."""

    def __init__(self, card: SimulatedCard, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.card, self.func, self.args, self.kwargs = card, func, args, kwargs
        flat = pytree.tree_leaves((args, kwargs))
        self.here = [x for x in flat if isinstance(x, SimulatedTensor)]
        self.elsewhere = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, SimulatedTensor)]
        self.is_ours = bool(self.here) or any(_is_card(x) for x in flat if isinstance(x, torch.device))

    def made(self) -> Any:
        func, card = self.func, self.card
        if not self.is_ours:
            return self._on_host()
        if _is_composite(func):
            with OnCard(card):
                found = func.decompose(*self.args, **self.kwargs)
            if found is not NotImplemented:
                return found
        if func is aten.copy_.default:
            return copy(card, *self.args, **self.kwargs)
        if func is aten._to_copy.default:
            return _converted(card, self.args[0], **self.kwargs)
        if func is aten._local_scalar_dense.default:
            card.synchronize(card.current, "item()")
            return func(self.args[0].content)
        if func is aten.is_pinned.default:
            return False
        if func in _SAME:
            return SimulatedTensor(self.args[0].content, self.args[0].block, card)
        if _written(func) is None and _is_view(func):
            return self._view()
        if self.here and any(x.dim() for x in self.elsewhere):
            said = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
            card.broke_rule(f"{func} of tensors of two devices", RuntimeError(said))
        return self._in_place() if _written(func) is not None else self._computed()

    def _on_host(self) -> Any:
        if self.func is aten.is_pinned.default:
            return self.card.host.is_locked(self.args[0])
        if not self.kwargs.get("pin_memory"):
            return self.func(*self.args, **self.kwargs)
        self.card.asked("page-locked memory")
        plain = self.func(*self.args, **{**self.kwargs, "pin_memory": False})
        if (locked := self.card.host.locked_copy(plain)) is None:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return locked

    def _view(self) -> Any:
        base = self.here[0]
        with torch.inference_mode(base.is_inference()):  # as torch has it of views
            found = self._run()
            return pytree.tree_map_only(Tensor, lambda view: SimulatedTensor(view, base.block, self.card), found)

    def _in_place(self) -> Any:
        self._wait_for_masks()
        self.card.compute(self._later())
        place = _written(self.func)
        assert place is not None
        return self.args[place[0]] if place[0] < len(self.args) else self.kwargs[place[1]]

    def _computed(self) -> Any:
        shapes = self._on_meta()
        if shapes is None:
            return self._measured()
        made = pytree.tree_map_only(Tensor, partial(new_tensor, self.card), shapes)
        if self.func not in _UNWRITTEN:
            into, later = [each.content for each in tensors_in(pytree.tree_leaves(made))], self._later()

            def run() -> None:
                for place, value in zip(into, tensors_in(pytree.tree_leaves(later())), strict=True):
                    place.copy_(value)

            self.card.compute(run)
        return made

    def _measured(self) -> Any:
        """Of a result whose size depends on values, for which a card waits."""
        self.card.synchronize(self.card.current, str(self.func))
        return pytree.tree_map_only(Tensor, partial(placed, self.card), self._run())

    def _wait_for_masks(self) -> None:
        if self.func is aten.index_put_.default and any(x.dtype is torch.bool for x in self.here[1:]):
            self.card.synchronize(self.card.current, str(self.func))

    def _on_meta(self) -> Any:
        if self.func is aten.nonzero.default:
            return None
        args, kwargs = pytree.tree_map(_meta_of, (self.args, self.kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        try:
            return self.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            return None

    def _later(self) -> Callable[[], Any]:
        args, kwargs = pytree.tree_map_only(SimulatedTensor, lambda x: x.content, (self.args, self.kwargs))
        if _is_card(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return partial(self.func, *args, **kwargs)

    def _run(self) -> Any:
        return self._later()()


def placed(card: SimulatedCard, value: Tensor) -> SimulatedTensor:
    """A tensor of the host, copied to the card now."""
    made = new_tensor(card, _meta_of(value))
    content = made.content
    card.enqueue(lambda: content.copy_(value))
    return made


def copy(card: SimulatedCard, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """As `into.copy_(source)`: from and to pageable memory it is waited for, whatever was asked."""
    to, of = content_of(into), content_of(source)
    is_sent, is_fetched = not isinstance(source, SimulatedTensor), not isinstance(into, SimulatedTensor)
    host = of if is_sent else to
    gbs = card.config.link_gbs if is_sent or is_fetched else card.config.memory_gbs
    reads = []
    if is_sent or is_fetched:
        if card.host.is_locked(host):
            reads = [span(host)]
        else:
            card.asked("a copy of pageable memory", in_capture=False)
            of = of.clone() if is_sent else of  # the driver has taken it when the call returns
            non_blocking = non_blocking and is_sent
    card.enqueue(lambda: to.copy_(of), seconds=to.nbytes / gbs / 1e9, reads=reads)
    if (is_sent or is_fetched) and not non_blocking:
        card.synchronize(card.current, "a copy that is waited for")
    return into


def _converted(
    card: SimulatedCard,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """As `x.to(...)` where it copies."""
    dtype = dtype or x.dtype
    if isinstance(x, SimulatedTensor) and (device is None or _is_card(device)):
        made = new_tensor(card, torch.empty_like(_meta_of(x), dtype=dtype))
        return copy(card, made, x)
    if _is_card(device):
        x = x.to(dtype)
        return copy(card, new_tensor(card, torch.empty_like(_meta_of(x))), x, non_blocking)
    # What is not waited for goes to page-locked memory, which torch allocates for it.
    found = torch.empty(x.shape, dtype=x.dtype)
    if (pin_memory or non_blocking) and (locked := card.host.locked_copy(found)) is not None:
        found = locked
    copy(card, found, x, non_blocking)
    return found.to(dtype)


def _is_card(device: object) -> bool:
    return isinstance(device, torch.device) and device.type == "cuda"


def _meta_of(x: Any) -> Any:
    if isinstance(x, SimulatedTensor):
        x = x.content
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x


@cache
def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


@cache
def _written(func: Any) -> tuple[int, str] | None:
    """Return the place and the name of the argument that the operator writes to."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return place, argument.name
    return None


@cache
def _is_composite(func: Any) -> bool:
    """Return whether the operator is made of others, on whatever device."""
    name = func.name()
    return func is not aten.is_pinned.default and bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


@contextmanager
def python_tensors(card: SimulatedCard) -> Iterator[None]:
    """Inside, what torch does with tensors before an operator is called knows of the card too."""
    plain_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **rest: Any) -> Tensor:
        made = plain_tensor(data, **rest)
        return made if device is None else made.to(device)

    is_pinned = Tensor.is_pinned
    torch.tensor, Tensor.is_pinned = tensor, lambda self, *_: card.host.is_locked(self)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.tensor, Tensor.is_pinned = plain_tensor, is_pinned  # type: ignore[method-assign]
