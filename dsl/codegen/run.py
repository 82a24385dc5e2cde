"""The function `run` of a generated file: allocates results and launches its kernels.

Dimensions: G KV heads, H query heads, n tokens of a layer, W queries of a window, D head size.
"""

from __future__ import annotations

from kvpolicy.dsl.codegen.parts import Parts, Result

_PREFILL = '''def run(
    q, k, key_slots, v, value_slots, positions, tokens, inputs, numbers, *, block=None
):
    """Launches the kernels; nothing waits for the device.

    Args:
        q: [H, W, D] the window's queries, or None where the kernels read none.
        k: [*, G, D] keys: token t is row key_slots[t], or row t where these are None.
        key_slots: int [n] or None; v, value_slots: the same of values, or None.
        positions: int64 [n] original positions; None: 0 to n - 1.
        tokens: n, above 0.
{rest}'''

_STEPS = '''def run(
    q, query_positions, k, key_ids, v, value_ids, positions, holds, ranks, order, inputs, numbers,
    *, block=None, split=None
):
    """Launches the kernels; nothing waits for the device.

    Args:
        q: [H, W, D] queries at query_positions, int64 [W], or None where the kernels read none.
        k: [G, n, D] keys, or [E, D] where entry j of KV head g is row key_ids[g, j].
        key_ids: int64 [G, n] or None; v, value_ids: the same of values, or None.
        positions: int64 [n] of the entries, ascending; n is above 0.
        holds: int8 [G, n], which entries a KV head holds; None: all hold all.
        ranks: int32 [G, n], how many entries up to each one the head holds.
        order: int32 [G, n], the entries that a head holds, in order, then the others. Both are None
            without holds, or where no kernel reads them.
{rest}'''

_REST = '''\
        inputs: tensors, numbers: of the host, in the order in which they are unpacked below.
        block: tokens of a tile, a power of two; None: by device.
{split}
    Returns:
        Tensors of the results, and bool tensors{size} that are false if the model's tensors held
        NaN or infinity.
    """'''


_SPLIT = "        split: tokens after which a row's sum is cut; None: by device.\n"
_SPLITS = 128  # of a list at a decode step, at most


def run_text(made: Parts) -> str:
    """The text of `run`."""
    size, split = (" [G]", _SPLIT) if made.form.steps else (", 0-d,", "")
    document = (_STEPS if made.form.steps else _PREFILL).format(
        rest=_REST.format(size=size, split=split)
    )
    lines = [document, *_sizes(made)]
    results = {each.name: each for each in made.results}
    tensors, numbers = made.arguments.tensors, made.arguments.numbers
    if tensors:
        lines.append(f"    ({', '.join(tensors)},) = inputs")
    if numbers:
        lines.append(f"    ({', '.join(numbers)},) = numbers")
    lines.append("    checks = []")
    if made.columns or made.rows:
        lines += _row_splits(made)
    if made.softmax:
        lines += _softmax(made)
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
            f"        {', '.join([*made.form.tail_marks, *names])}, tokens,",
            '        GROUP=sizes["GROUP"], GROUP_P=sizes["GROUP_P"], BLOCK_N=span,',
            f"        {made.form.flag}={_flag(made)},",
            "    )",
        ]
    out = ", ".join(each.name for each in made.results if not each.stage)
    lines.append(f"    return ({out},), checks")
    return "\n\n" + "\n".join(lines) + "\n"


def _flag(made: Parts) -> str:
    return f"{'holds' if made.form.steps else 'positions'} is not None"


def _strides(made: Parts, name: str) -> str:
    """Of keys or values: from row to row, and from head to head."""
    if not made.form.steps:
        return f"{name}.stride(0), {name}.stride(1)"
    ids = f"{'key' if name == 'k' else 'value'}_ids"
    return f"{name}.stride(-2), {name}.stride(0) if {ids} is None else 0"


def _sizes(made: Parts) -> list[str]:
    shape, tiles, rows = made.bound.shape, made.tiles, made.form.rows
    queries = "0" if made.bundle.window is None else "q.shape[1]"
    first = [f"    kv, gpu, queries = k.shape[1], k.is_cuda, {queries}"]
    if made.form.steps:
        first = [
            f"    tokens, gpu, queries = positions.shape[0], k.is_cuda, {queries}",
            "    kv = (k if key_ids is None else key_ids).shape[0]",
        ]
    return [
        *first,
        "    sizes = {",
        f'        "GROUP": {shape.group}, "GROUP_P": {tiles.group}, "BLOCK_W": {tiles.width},',
        f'        "HEAD_DIM": {shape.head_dim}, "HEAD_DIM_P": {tiles.dim},',
        f'        "BLOCK_N": block or ({tiles.block} if gpu else 256),',
        f'        "SCALE": {shape.head_dim}**-0.5,',
        "        # The interpreter multiplies float32 only; a GPU takes keys as they are, float32",
        "        # in three products of tensor cores, as exact as its own rounding.",
        '        "UPCAST": not gpu or (q is not None and q.dtype != k.dtype),',
        '        "PRECISION": "tf32x3" if gpu else "ieee",',
        f'        "KEYS_GATHERED": key_{rows} is not None,',
        f'        "VALUES_GATHERED": value_{rows} is not None,',
        f'        "{made.form.flag}": {_flag(made)},',
        "    }",
        f'    launch = {{"num_warps": {tiles.warps}, "num_stages": {tiles.stages}}}',
        '    total = triton.cdiv(tokens, sizes["BLOCK_N"])',
        "    wanted = 2",
        "    if gpu:",
        "        device = torch.cuda.get_device_properties(k.device)",
        "        wanted = 2 * device.multi_processor_count  # programs that fill the card",
    ]


def _row_splits(made: Parts) -> list[str]:
    if made.form.steps:
        return [
            "    # A list is cut by its length alone: its sums do not depend on other lists.",
            '    blocks = max((split or (8192 if gpu else 512)) // sizes["BLOCK_N"], 1)',
            f"    blocks = max(blocks, triton.cdiv(total, {_SPLITS}))",
            "    splits = max(triton.cdiv(total, blocks), 1)",
            '    tiles = triton.cdiv(queries, sizes["BLOCK_W"])',
        ]
    return [
        '    tiles = triton.cdiv(queries, sizes["BLOCK_W"])',
        "    splits = max(1, min(total, wanted // max(1, tiles * kv)))",
        "    blocks = triton.cdiv(total, splits)",
        "    splits = triton.cdiv(total, blocks)",
    ]


def _softmax(made: Parts) -> list[str]:
    form = made.form
    pointers = ", ".join([*form.window, "k", f"key_{form.rows}", *form.pass_marks])
    # At decode steps a query may see nothing.
    finite = '(row_lse < float("inf"))' if form.steps else "row_lse.isfinite()"
    most = _SPLITS if form.steps else "max(1, wanted // kv)"
    return [
        '    rows_of_all = kv * sizes["GROUP"] * queries',
        "    partial = torch.empty(splits, rows_of_all, dtype=torch.float32, device=k.device)",
        "    row_lse = partial",
        "    if queries:",
        "        row_partials[(splits, kv, tiles)](",
        f"            {pointers}, partial, tokens, queries, q.stride(0), q.stride(1),",
        f"            {_strides(made, 'k')}, blocks, KV=kv,",
        "            **sizes, **launch,",
        "        )",
        "    if queries and splits > 1:",
        "        row_lse = torch.empty_like(partial[0])",
        "        row_combine[(triton.cdiv(rows_of_all, 16),)](",
        "            partial, row_lse, rows_of_all, splits,",
        "            # The most that there are for any prompt, so that it is compiled once.",
        f"            SPLITS_P=triton.next_power_of_2({most}), BLOCK=16,",
        "        )",
        f"    checks.append({finite}{'.view(kv, -1).all(1)' if form.steps else '.all()'})",
    ]


def _empty(result: Result, group: int) -> str:
    sizes = {"kv": "kv", "group": str(group), "token": "tokens", "query": "queries"}
    shape = ", ".join(sizes[axis] for axis in result.axes)
    shape = f"splits, {shape}" if result.splits else shape
    dtype = "torch.int8" if result.truth else "torch.float32"
    return f"torch.empty({shape}, dtype={dtype}, device=k.device)"


def _columns(made: Parts) -> list[str]:
    lines = []
    windowed = bool(made.columns)
    alike = made.softmax and windowed  # programs then go over the keys of those of the first pass
    if made.flags:
        lines += [
            "    flags = torch.empty(kv, total, dtype=torch.int32, device=k.device)",
        ]
    if windowed and not made.whole:
        lines.append("    step = 1  # the loop is over queries")
    elif alike:
        lines.append("    step = blocks")
    else:
        lines.append("    step = triton.cdiv(total, max(1, triton.cdiv(2 * wanted, kv)))")
    form = made.form
    q = ", ".join(name if windowed else "None" for name in form.window)
    stride = "q.stride(0), q.stride(1)" if windowed else "0, 0"
    v = f"v, value_{form.rows}" if made.reads_values else "None, None"
    v_stride = _strides(made, "v") if made.reads_values else "0, 0"
    lse = "row_lse" if made.softmax and windowed else "None"
    names = "".join(f"{name}, " for name in made.column_arguments)
    return [
        *lines,
        "    columns[(triton.cdiv(total, step), kv)](",
        f"        {q}, k, key_{form.rows}, {v}, {lse}, {', '.join(form.marks)}, "
        f"{'flags' if made.flags else 'None'},",
        f"        {names}tokens, queries,",
        f"        {stride}, {_strides(made, 'k')}, {v_stride},",
        "        step, **sizes, **launch,",
        "    )",
        *(
            [f"    checks.append(flags.sum({'1' if form.steps else ''}) == 0)"]
            if made.flags
            else []
        ),
    ]


def _rows(made: Parts) -> list[str]:
    names = "".join(f"{name}, " for name in made.row_arguments)
    form, lse = made.form, "row_lse" if made.softmax else "None"
    pointers = ", ".join([*form.window, "k", f"key_{form.rows}", lse, *form.marks])
    return [
        "    if queries:",
        "        rows[(splits, kv, tiles)](",
        f"            {pointers}, {names}",
        f"            tokens, queries, q.stride(0), q.stride(1), {_strides(made, 'k')}, blocks,",
        "            KV=kv, **sizes, **launch,",
        "        )",
    ]
