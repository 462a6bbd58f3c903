"""Arguments aligned to 16 bytes only, as memory of C libraries and numpy is, rather than to 64 bytes, as memory that
compiled code allocates is.

Code generation derives from a buffer's declared alignment how vectors may be loaded.
"""

from __future__ import annotations

from typing import Any

from tvm import s_tir, tirx

from schedules.analysis import replaced, walk

__all__ = ["ANYWHERE", "BYTES", "relax_alignment"]

#: the attribute of a function: the numbers of its parameters that a caller of the model may have allocated
ANYWHERE = "mlc.anywhere"
#: a multiple of so many bytes is where these begin
BYTES = 16


def relax_alignment(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Declare buffers of parameters marked :data:`ANYWHERE` as aligned to :data:`BYTES` only. Returns the same object
    if there are none."""
    if not (func.attrs and ANYWHERE in func.attrs):
        return func
    params = [func.params[int(number)] for number in func.attrs[ANYWHERE]]
    image: dict[Any, Any] = {param: _lower(param) for param in params}

    def match(block: s_tir.SBlock) -> None:
        """What an instruction is handed of such a buffer is not better aligned."""
        for region in block.match_buffers:
            if any(region.source.source.same_as(param) for param in params):
                image[region.buffer] = _lower(region.buffer)

    walk(func.body, (s_tir.SBlock, match))
    made = tirx.PrimFunc([image.get(param, param) for param in func.params], replaced(func.body, image), func.ret_type)
    for key, value in func.attrs.items():
        made = made.with_attr(key, value)
    return made


def _lower(buffer: Any) -> Any:
    return tirx.decl_buffer(
        buffer.shape, str(buffer.dtype), name=str(buffer.name), strides=buffer.strides or None,
        elem_offset=buffer.elem_offset, scope=buffer.scope(), data_alignment=min(BYTES, int(buffer.data_alignment)),
        offset_factor=int(buffer.offset_factor))
