"""A CUDA card that is played on the CPU, so that the branches for one run where there is none.

    def test_something(simulated_card, packed_int8):
        with simulated_card(CardConfig(schedule="copies-late")) as card, packed_int8.opened(DEVICE) as placed:
            placed.place(blocks(packed_int8, "streamed"), 8)
            assert packed_int8.text(placed) == expected

The fixture `simulated_card` is every test's (tests/conftest.py). Inside, torch has one card, `cuda:0`, for the thread
that enters (`OnCard(card)` for another one), and the real Engine, OffloadedModel, GpuProgram, Lane, Pinning and plans
run on it with `device.type == "cuda"`. What it plays:

- **Streams that run late** (`streams`): work is done when somebody waits for it, under a schedule: lazy, copies-early,
  copies-late, random, eager. A wait that is missing is a wrong text in every run. Time is a clock of the card's own
  (`CardConfig.link_gbs`), which events read: a slow link takes no time of a test.
- **Memory** (`memory`) by the rules of torch's allocator: reused at once on the same stream, cut from segments, with
  pools for graphs, all of it 0xFF when it is given out. `mem_get_info`, `memory_reserved`, the cap and `empty_cache`
  count along; `card.take(bytes)` is another program.
- **The driver's rules** (`device`): a synchronization, or a copy of pageable memory, in a capture; tensors of two
  devices; pageable memory given to a kernel; memory unregistered that work on its way reads. Each raises what CUDA,
  torch or Triton raises, and stands in `card.broken_rules`: a test fails that leaves one there, though the engine may
  have gone on with torch's operators.
- **Faults** (`card.set_faults(Faults(...))`): no memory at the n-th allocation, at a kernel's or a graph's load, an
  illegal access. `CardConfig.lockable_bytes`: the host's memory that can be page-locked, 0 for a machine without any.
- **Kernels** (`kernels`): `kernels="references"` replaces the functions of `localllm/kernels/gpu` that make launches by
  torch's operators: a whole answer takes 0.2 s. `kernels="interpreted"` runs the true ones in Triton's interpreter.

What it cannot show: how fast anything is, what ptxas makes of a kernel, and races within one.
"""
