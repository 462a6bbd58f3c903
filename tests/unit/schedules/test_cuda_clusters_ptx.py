"""The emulator's clusters, and warpgroups that take turns at barriers."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from hopper_ptx import EXPECT, HEAD, INIT, INIT_FENCE, RNG, SHARED, UNTIL, rows_of, swizzled

from mlc.testing.cuda_emulator import Launch, run_source

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is compiled with g++")

#: two blocks, in each a barrier at 0 and a box at 1024, of which each asks for a half, for both
CLUSTER = [Launch((2, 1, 1), (128, 1, 1))]
MEET = 'asm volatile("barrier.cluster.arrive.release;\\nbarrier.cluster.wait.acquire;" ::: "memory");'


def in_own_memory(source: str) -> str:
    """Addresses from the begin of the block's shared memory on, which is 0 of one block alone."""
    return re.sub(r'"r"\((\d+u)', r'"r"(base + \1', source)


def fetched_by_both(x: np.ndarray, **change: str) -> np.ndarray:
    """What each block of a cluster has of 32 rows of 128 bytes, 16 copied by either for both; each counts itself at the
    other's barrier too when it has read its own."""
    steps = {"fence": INIT_FENCE, "meet": MEET, "bytes": "4096", "end": MEET, "rank": "rank", **change}
    source = HEAD.replace("void ", "void __cluster_dims__(2, 1, 1) ") + f"""k(
        const __grid_constant__ CUtensorMap map, uchar* __restrict__ y_ptr) {{
      {SHARED}
      int rank = blockIdx.x % 2;
      unsigned base = __cvta_generic_to_shared(buf);
      if (threadIdx.x == 0) {{
        {INIT} asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(8u), "r"(2)); {steps["fence"]}
      }}
      {steps["meet"]}
      if (threadIdx.x == 0) {{
        {EXPECT.format(bytes=steps["bytes"])}
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
          ".multicast::cluster [%0], [%1, {{%2, %3}}], [%4], %5;" :: "r"(1024u + 2048 * {steps["rank"]}),
          "l"((unsigned long long)(&(map))), "r"(0), "r"(16 * {steps["rank"]}), "r"(0u), "h"((unsigned short)3)
          : "memory");
      }}
      {UNTIL.format(parity=0)}
      for (int i = threadIdx.x; i < 4096; i += 128) y_ptr[rank * 4096 + i] = buf[1024 + i];
      if (threadIdx.x < 2) {{
        asm volatile("{{\\n.reg .b32 there;\\nmapa.shared::cluster.u32 there, %0, %1;\\n"
          "mbarrier.arrive.shared::cluster.b64 _, [there];\\n}}\\n"
          :: "r"(8u), "r"(threadIdx.x) : "memory");
      }}
      {UNTIL.format(parity=0).replace("done", "told").replace('"r"(0u)', '"r"(8u)')}
      {steps["end"]}
    }}"""
    y = np.zeros((2, 32, 64), "uint16")
    run_source(in_own_memory(source), CLUSTER, {"x": x, "y": y}, maps={"map": rows_of(x, 64, 16)})
    return y


def test_a_box_is_copied_to_both_blocks_of_a_cluster() -> None:
    x = RNG.integers(1, 1 << 16, (32, 64)).astype("uint16")
    for each in fetched_by_both(x):
        np.testing.assert_array_equal(each, swizzled(x))


@pytest.mark.parametrize(("change", "reason"), [
    ({"meet": "__syncthreads();"}, "its cluster meet before other blocks use it"),
    ({"fence": ""}, "must be fenced"),
    ({"bytes": "2048"}, "the others never reach|more threads arrive|must be waited for"),
    ({"bytes": "8192"}, "the others never reach"),
])
def test_a_missing_step_of_a_cluster_is_an_error(change: dict[str, str], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        fetched_by_both(np.ones((32, 64), "uint16"), **change)


def test_a_block_must_not_end_before_others_have_done_with_it() -> None:
    """The first leaves, and the second counts itself at its barrier."""
    source = HEAD.replace("void ", "void __cluster_dims__(2, 1, 1) ") + f"""k(uchar* __restrict__ y_ptr) {{
      {SHARED}
      unsigned base = __cvta_generic_to_shared(buf);
      if (threadIdx.x == 0) {{ {INIT} {INIT_FENCE} }}
      {MEET}
      if (blockIdx.x == 0) return;
      __syncthreads();
      if (threadIdx.x == 0) asm volatile("{{\\n.reg .b32 there;\\nmapa.shared::cluster.u32 there, %0, %1;\\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\\n}}\\n" :: "r"(0u), "r"(0) : "memory");
    }}"""
    with pytest.raises(RuntimeError, match="must not be of a block that has ended"):
        run_source(in_own_memory(source), CLUSTER, {"y": np.zeros(1, "uint8")})


TURNS = """
  int group = threadIdx.x / 128, own = 1 + group, other = 2 - group;
  if (group == 1) asm volatile("bar.arrive %0, 256;" :: "r"(other) : "memory");
  for (int i = 0; i < 3; ++i) {
    asm volatile("bar.sync %0, 256;" :: "r"(own) : "memory");
    if (threadIdx.x % 128 == 0) order_ptr[2 * i + group] = place_ptr[0]++;
    if (group == 0 || i < 2) asm volatile("bar.arrive %0, 256;" :: "r"(other) : "memory");
  }
"""


def in_turn(change: tuple[str, str] = ("", "")) -> np.ndarray:
    """The places in which two warpgroups, in turn, counted on."""
    order, place = np.full(6, -1, "int32"), np.zeros(1, "int32")
    head = HEAD.replace("128", "256")
    source = f"{head}k(int* __restrict__ order_ptr, int* __restrict__ place_ptr) {{{TURNS.replace(*change)}}}"
    run_source(source, [Launch((1, 1, 1), (256, 1, 1))], {"order": order, "place": place})
    return order


def test_warpgroups_take_turns_at_barriers_of_a_number() -> None:
    assert in_turn().tolist() == list(range(6))


@pytest.mark.parametrize(("change", "reason"), [
    (("if (group == 1) asm", "if (0) asm"), "wait at a barrier that the others never reach"),
    (('asm volatile("bar.sync', 'if (0) asm volatile("bar.sync'), "a thread must arrive once in a barrier's phase"),
    (("group == 0 || i < 2", "1"), "a barrier of a number must not be left by some of its threads"),
    (('"r"(own)', '"r"(own + 15)'), "must have one from 1 to 15"), (("sync %0, 256", "sync %0, 100"), "whole warps"),
    (("sync %0, 256", "sync %0, 224"), "all must say the same"),
])
def test_a_turn_too_few_or_too_many_is_an_error(change: tuple[str, str], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        in_turn(change)
