"""How a tensor function may be scheduled: search spaces for CPUs and GPUs, and the lowering of scheduled functions.

- The contract: :mod:`space <schedules.space>`, :mod:`registry <schedules.registry>`; the spaces are in ``cpu`` and
  ``cuda``, their tensor intrinsics in ``intrin``. :mod:`machine <schedules.machine>` describes a machine to them, and
  ``analysis`` a function.
- Stored schedules: :mod:`trace <schedules.trace>`; what is accepted from outside: :mod:`language <schedules.language>`,
  :mod:`tvm_json <schedules.tvm_json>`, :mod:`size_limits <schedules.size_limits>`,
  :mod:`permuted_layout <schedules.permuted_layout>`.
- Free (dynamic) sizes: :mod:`free <schedules.free>`, :mod:`lockstep <schedules.lockstep>`, :mod:`pieces
  <schedules.pieces>`; before scheduling :mod:`flatten_spatial <schedules.flatten_spatial>`, :mod:`flatten_elementwise
  <schedules.flatten_elementwise>`, :mod:`merged <schedules.merged>`, :mod:`capped <schedules.capped>`; after it
  :mod:`tail_tiles <schedules.tail_tiles>`, :mod:`shifted_tail <schedules.shifted_tail>`, :mod:`even_chunks
  <schedules.even_chunks>`, :mod:`compact_buffers <schedules.compact_buffers>`, :mod:`partial_sums
  <schedules.partial_sums>`, :mod:`masked_tails <schedules.masked_tails>`, :mod:`range_conditions
  <schedules.range_conditions>`, :mod:`trimmed <schedules.trimmed>`.
- The lowering of CPU functions: :mod:`lowering <schedules.lowering>`, which lists its passes.
"""
