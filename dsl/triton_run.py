"""The function `run` of a generated file: allocates results and launches its kernels.

Dimensions: G KV heads, H query heads, n tokens of a layer, W queries of a window, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.dsl.triton_source import Generator, Result

_DOCUMENT = '''def run(
    q, k, key_slots, v, value_slots, positions, tokens, inputs, numbers, *, block=None
):
    """Launches the kernels; nothing waits for the device.

    Args:
        q: [H, W, D] the window's queries, or None where the kernels read none.
        k: [*, G, D] keys: token t is row key_slots[t], or row t where these are None.
        key_slots: int [n] or None; v, value_slots: the same of values, or None.
        positions: int64 [n] original positions; None: 0 to n - 1.
        tokens: n, above 0.
        inputs: tensors, numbers: of the host, in the order in which they are unpacked below.
        block: tokens of a tile, a power of two; None: by device.

    Returns:
        Tensors of the results, and 0-d bool tensors that are false if the model's tensors held NaN
        or infinity.
    """'''


def run_text(made: Generator) -> str:
    """The text of `run`."""
    lines = [_DOCUMENT, *_sizes(made)]
    results = {each.name: each for each in made.results}
    tensors, numbers = made.arguments.tensors, made.arguments.numbers
    if tensors:
        lines.append(f"    ({', '.join(tensors)},) = inputs")
    if numbers:
        lines.append(f"    ({', '.join(numbers)},) = numbers")
    lines.append("    checks = []")
    if made.columns or made.rows:
        lines += _row_splits()
    if made.softmax:
        lines += _softmax()
    for each in results.values():
        lines.append(f"    {each.name} = {_empty(each, made.bound.shape.group)}")
    if made.columns or made.vectors:
        lines += _columns(made)
    if made.rows:
        lines += _rows(made)
    if made.pools:
        names = [*made.tail_reads, *made.tail_used, *made.tail_results]
        lines += [
            "    span = block or (256 if gpu else 1024)",
            "    tail[(triton.cdiv(tokens, span), kv)](",
            f"        positions, {', '.join(names)}, tokens,",
            '        GROUP=sizes["GROUP"], GROUP_P=sizes["GROUP_P"], BLOCK_N=span,',
            "        POSITIONS=positions is not None,",
            "    )",
        ]
    out = ", ".join(each.name for each in made.results if not each.stage)
    lines.append(f"    return ({out},), checks")
    return "\n\n" + "\n".join(lines) + "\n"


def _sizes(made: Generator) -> list[str]:
    shape = made.bound.shape
    group = 1 << (shape.group - 1).bit_length()
    most = max(16, 128 // group)
    least = max(1, 16 // group)
    if made.bundle.window is None:
        width = [f"    queries, width = 0, {least}"]
    elif made.whole:
        fit = max(least, 1 << max(0, made.window - 1).bit_length())
        width = [f"    queries, width = q.shape[1], {fit}  # one tile holds the window"]
    else:
        width = [f"    queries, width = q.shape[1], {max(least, min(most, 128 // group))}"]
    return [
        "    kv, gpu = k.shape[1], k.is_cuda",
        *width,
        "    sizes = {",
        f'        "SCALE": {shape.head_dim}**-0.5, "GROUP": {shape.group}, "GROUP_P": {group},',
        f'        "HEAD_DIM": {shape.head_dim}, '
        f'"HEAD_DIM_P": {max(16, 1 << (shape.head_dim - 1).bit_length())},',
        '        "BLOCK_W": width, "BLOCK_N": block or (64 if gpu else 256),',
        "        # The interpreter multiplies float32 only; a GPU takes keys as they are.",
        '        "UPCAST": not gpu or (q is not None and q.dtype != k.dtype),',
        '        "KEYS_GATHERED": key_slots is not None,',
        '        "VALUES_GATHERED": value_slots is not None,',
        '        "POSITIONS": positions is not None,',
        "    }",
        f'    warps = 8 if width * {group} * sizes["BLOCK_N"] >= 8192 else 4',
        '    total = triton.cdiv(tokens, sizes["BLOCK_N"])',
        "    wanted = 2",
        "    if gpu:",
        "        device = torch.cuda.get_device_properties(k.device)",
        "        wanted = 2 * device.multi_processor_count  # programs that fill the card",
    ]


def _row_splits() -> list[str]:
    return [
        "    tiles = triton.cdiv(queries, width)",
        "    splits = max(1, min(total, wanted // max(1, tiles * kv)))",
        "    blocks = triton.cdiv(total, splits)",
        "    splits = triton.cdiv(total, blocks)",
    ]


def _softmax() -> list[str]:
    return [
        '    rows_of_all = kv * sizes["GROUP"] * queries',
        "    partial = torch.empty(splits, rows_of_all, dtype=torch.float32, device=k.device)",
        "    row_lse = partial",
        "    if queries:",
        "        row_partials[(splits, kv, tiles)](",
        "            q, k, key_slots, partial, tokens, queries, q.stride(0), q.stride(1),",
        "            k.stride(0), k.stride(1), blocks, KV=kv, num_warps=warps, **sizes,",
        "        )",
        "    if queries and splits > 1:",
        "        row_lse = torch.empty_like(partial[0])",
        "        row_combine[(triton.cdiv(rows_of_all, 64),)](",
        "            partial, row_lse, rows_of_all, splits,",
        "            SPLITS_P=triton.next_power_of_2(splits), BLOCK=64,",
        "        )",
        "    checks.append(row_lse.isfinite().all())",
    ]


def _empty(result: Result, group: int) -> str:
    sizes = {"kv": "kv", "group": str(group), "token": "tokens", "query": "queries"}
    shape = ", ".join(sizes[axis] for axis in result.axes)
    shape = f"splits, {shape}" if result.splits else shape
    dtype = "torch.int8" if result.truth else "torch.float32"
    return f"torch.empty({shape}, dtype={dtype}, device=k.device)"


def _columns(made: Generator) -> list[str]:
    lines = []
    windowed = bool(made.columns)
    if made.flags:
        lines += [
            "    flags = torch.empty(kv, total, dtype=torch.int32, device=k.device)",
        ]
    if windowed and not made.whole:
        lines.append("    step = 1  # the loop is over queries")
    else:
        lines.append("    step = triton.cdiv(total, max(1, triton.cdiv(2 * wanted, kv)))")
    q = "q" if windowed else "None"
    stride = "q.stride(0), q.stride(1)" if windowed else "0, 0"
    v = "v, value_slots" if made.reads_values else "None, None"
    v_stride = "v.stride(0), v.stride(1)" if made.reads_values else "0, 0"
    lse = "row_lse" if made.softmax and windowed else "None"
    names = "".join(f"{name}, " for name in made.column_arguments)
    return [
        *lines,
        "    columns[(triton.cdiv(total, step), kv)](",
        f"        {q}, k, key_slots, {v}, {lse}, positions, {'flags' if made.flags else 'None'},",
        f"        {names}tokens, queries,",
        f"        {stride}, k.stride(0), k.stride(1), {v_stride},",
        "        step, num_warps=warps, **sizes,",
        "    )",
        *(["    checks.append(flags.sum() == 0)"] if made.flags else []),
    ]


def _rows(made: Generator) -> list[str]:
    names = "".join(f"{name}, " for name in made.row_arguments)
    return [
        "    if queries:",
        "        rows[(splits, kv, tiles)](",
        f"            q, k, key_slots, {'row_lse' if made.softmax else 'None'}, positions, {names}",
        "            tokens, queries, q.stride(0), q.stride(1), k.stride(0), k.stride(1), blocks,",
        "            KV=kv, num_warps=warps, **sizes,",
        "        )",
    ]
