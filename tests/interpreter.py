"""Triton's interpreter, without two thirds of what it does over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter makes Triton's language its own at every call of a device function, though it stays so until the
    launch ends: a fifth of the time that a launch would take."""
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    done: set[tuple[bool, bool]] = set()  # which modules of it, in this launch

    @cache
    def modules_of(fn: Any) -> tuple[bool, bool]:
        known = fn.__globals__.values()
        return any(value is tl for value in known), any(value is tl.core for value in known)

    def patched(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules in done:
            return interpreter._LangPatchScope()
        scope = patch_language(fn)
        if not done:  # the launch itself
            restore = scope.restore

            def ended() -> None:
                done.clear()
                restore()

            scope.restore = ended
        done.add(modules)
        return scope

    def patch_member(place: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        """Without Triton's wrapper, which asks for the semantics that are given here."""
        plain = getattr(member, "__wrapped__", member)

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return plain(*arguments, **named)

        scope.set_attr(place, name, called)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        patch.setattr(interpreter, "_patch_attr", patch_member)
        yield


@contextmanager
def types_looked_up_once() -> Iterator[None]:
    """The interpreter makes its table of types anew whenever it looks one up: a tenth of the time."""
    known = cache(interpreter._get_np_dtype)

    def found(dtype: Any) -> Any:
        scalar = dtype.scalar
        return numpy.dtype(numpy.uint64) if isinstance(scalar, tl.pointer_type) else known(scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", found)
        with _types_made_once(patch):
            yield


@contextmanager
def _types_made_once(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter makes two types of a block for nearly every operation, and looks through their shapes: a third of
    the time. With each sum, difference and product of integers it computes whether that overflows, of which it then
    asserts nothing, as it asserts where `debug` is set and it sets that nowhere: a quarter of the time."""
    assert not interpreter.interpreter_builder.options.debug
    core = tl.core
    make_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[int, tuple[int, ...]], tl.block_type] = {}  # each holds its element's type, whose id it is
    shapes: dict[tuple[int, ...], Any] = {}

    def init_block(block: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        numbers = tuple(getattr(shape, "values", shape))
        if not all(type(number) is int for number in numbers):
            make_block(block, element_ty, shape)
            return
        key = (id(element_ty), numbers)
        if key not in blocks:
            make_block(block, element_ty, shape)
            block.shape = shapes.setdefault(numbers, block.shape)
            blocks[key] = block
        block.__dict__ = blocks[key].__dict__

    def with_element(block: tl.block_type, element_ty: tl.dtype) -> tl.block_type:
        known = blocks.get((id(element_ty), tuple(block.shape.values)))
        return core.block_type(element_ty, block.shape) if known is None else known

    def init(tensor: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        shape_of = kind.__dict__.get("shape_of_tensors")
        if shape_of is None:
            init_tensor(tensor, handle, kind)
            kind.__dict__["shape_of_tensors"] = tensor.shape, tensor.numel
            return
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = shape_of

    def as_one_shape(semantic: TritonSemantic, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        shape, other_shape = (
            getattr(each.type, "shape", None) for each in (one, other)
        )  # one object of each, see above
        if shape is other_shape:
            return one, other
        return broadcast(semantic, one, other)

    patch.setattr(TritonSemantic, "broadcast_impl_value", as_one_shape)
    patch.setattr(core.block_type, "__init__", init_block)
    patch.setattr(core.block_type, "with_element_ty", with_element)
    patch.setattr(core.block_type, "to_ir", lambda block, _builder: block)
    patch.setattr(core.tensor, "__init__", init)
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None)
    yield
