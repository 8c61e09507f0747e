"""Compiled kernels on all threads of torch's own OpenMP team.

A second pool of threads would fight torch's for the cores and lose milliseconds; so work is done in parallel regions of the
very same team, by the calls that compilers used for `#pragma omp parallel` (GOMP_parallel_start and GOMP_parallel_end of GNU
libgomp). Where torch was built on another runtime, it is done on the calling thread: slower, with the same result, since every
item of it belongs to exactly one thread either way.

In a region the other threads form a crew: they look at a board for one piece of work after another until they are dismissed. A
piece of work is an entry, a compiled function of one address, that takes items by a counter until none is left. So it is done
whoever joins in, and nobody waits for a thread that comes late, as threads do where something else wants the cores.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

COUNT, START, END, CREW_ENTRY, PRODUCT_ENTRY, QUANTIZE_ENTRY, ATTEND_ENTRY, BOARD = range(8)
"""What stands where in a team, int64 [8]: the number of threads, the addresses of GOMP_parallel_start and GOMP_parallel_end (0:
this thread is alone), those of the entries, and that of the board of the crew that it is (0: it is none)."""

BOARD_WORDS = 24
_STATE, _ENTRY, _DATA, _INSIDE = 0, 64, 72, 128  # bytes from its address; what different threads write lies on different lines
_PATIENCE = 10_000  # looks, some 100 microseconds, after which others may need the core more

_jit = njit(nogil=True, cache=True, error_model="numpy")


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An integer address as a pointer, for carray."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def _add(typing: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, in one step; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _read(typing: Any, address: Any) -> Any:
    """The int64 at an address that other threads write to."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _write(typing: Any, address: Any, number: Any) -> Any:
    """Set the int64 at an address that other threads read."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _call(typing: Any, entry: Any, data: Any) -> Any:
    """entry(data), both addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _begin(typing: Any, start: Any, entry: Any, data: Any, count: Any) -> Any:
    """Let `count` - 1 other threads run entry(data), by GOMP_parallel_start at the address `start`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        opaque, number = cgutils.voidptr_t, ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [opaque, opaque, number]).as_pointer()
        work = builder.inttoptr(args[1], opaque), builder.inttoptr(args[2], opaque), builder.trunc(args[3], number)
        builder.call(builder.inttoptr(args[0], kind), work)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def _finish(typing: Any, end: Any) -> Any:
    """Wait until they have returned, by GOMP_parallel_end at the address `end`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.call(builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell an x86 processor that this thread waits for another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@_jit
def _wait(num_looks: int) -> int:
    """Wait a moment before the next look; returns how many there were."""
    _pause()
    if num_looks < _PATIENCE:
        return num_looks + 1
    _sched_yield()
    return 0


@_jit
def take(counter: int) -> int:
    """The next item of a piece of work, 0, 1, 2, ..., whoever asks; for entries. `counter` is an address."""
    return int(_add(counter, 1))


@cfunc(types.void(types.voidptr), cache=True, nopython=True)
def crew_entry(data: Any) -> None:
    """What the others of a crew do: whatever is on the board at the address `data`, until they are dismissed.

    The state is odd while there is work, another odd number for each piece, and negative in the end. A thread counts itself in
    before it makes sure that the work it saw is still there, and who posted it takes it down before looking who is in: one of
    the two sees the other. So none touches work that is done.
    """
    board = carray(data, (BOARD_WORDS,), np.int64).ctypes.data
    done, num_looks = 0, 0
    while True:
        state = _read(board + _STATE)
        if state < 0:
            break
        if state == done or state % 2 == 0:
            num_looks = _wait(num_looks)
            continue
        _add(board + _INSIDE, 1)
        if _read(board + _STATE) == state:
            _call(_read(board + _ENTRY), _read(board + _DATA))
        _add(board + _INSIDE, -1)
        done, num_looks = state, 0


@_jit
def muster(team: Any, board: Any) -> Any:
    """The team as a crew around `board` (int64 [BOARD_WORDS], zeros), until `dismiss`. Some 3 microseconds."""
    crew = team.copy()
    crew[BOARD] = board.ctypes.data
    if team[START]:
        _begin(team[START], team[CREW_ENTRY], board.ctypes.data, team[COUNT])
    return crew


@_jit
def dismiss(crew: Any, board: Any) -> None:
    """Let the others of a crew go; nothing is posted there any more."""
    if crew[START]:
        _write(board.ctypes.data + _STATE, -1)
        _finish(crew[END])


@_jit
def _post(board: int, entry: int, data: int) -> None:
    """Do a piece of work together with the crew."""
    state = _read(board + _STATE)
    _write(board + _ENTRY, entry)
    _write(board + _DATA, data)
    _write(board + _STATE, state + 1)
    _call(entry, data)
    _write(board + _STATE, state + 2)
    num_looks = 0
    while _read(board + _INSIDE):
        num_looks = _wait(num_looks)


@_jit
def run(team: Any, entry: int, args: Any) -> int:
    """Have all threads work at `entry`, a place in `team`: a crew, or else as one formed for this alone.

    `args` is what the entry reads, int64 [n]; args[0], 0 at first, counts items. Returns how often one was asked for.
    (Addresses keep nothing alive: that `args` is read afterwards does.)
    """
    if team[BOARD]:
        _post(team[BOARD], team[entry], args.ctypes.data)
    else:
        board = np.zeros(BOARD_WORDS, np.int64)
        crew = muster(team, board)
        _post(crew[BOARD], team[entry], args.ctypes.data)
        dismiss(crew, board)
    return int(args[0])
