"""Slots that must be free to admit a request: for its prompt now, for its output later."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from kvpolicy.sglang_ext.request import admission  # noqa: E402

PROMPT, COPY, OUTPUT, HELD = 100, 20, 30, 35  # a running request has 15 of its tokens to come
STORE = SimpleNamespace(
    whole_pages=lambda slots: slots,
    dense_capacity=1000,
    arena=SimpleNamespace(slot_bytes=1),
)


class Adder:
    """Replaces SGLang's prefill adder: a running batch, and the slots that it counts with."""

    per_req_token_overhead = 1
    tree_cache = SimpleNamespace(disable=False)
    rem_chunk_tokens = None

    def __init__(self, free, running, folds=False):
        state = SimpleNamespace(folds=folds)
        requests = [SimpleNamespace(kv_policy_state=state) for _ in range(running)]
        self.running_batch = SimpleNamespace(reqs=requests)
        self.can_run_list = []
        needs = running * self._get_running_request_total_token_offset(None)
        self.memory_budget = SimpleNamespace(remaining_current=free, remaining_total=free - needs)

    def ceil_paged_tokens(self, tokens):
        return tokens

    def _get_running_request_total_token_offset(self, _):
        return OUTPUT - (HELD - COPY)


def request(prefix=0):
    sampling = SimpleNamespace(max_new_tokens=OUTPUT, ignore_eos=False, custom_params=None)
    kv = SimpleNamespace(holds_kv=False)
    return SimpleNamespace(
        kv=kv,
        sampling_params=sampling,
        output_ids=[],
        prefix_len=prefix,
        full_untruncated_fill_ids=[0] * PROMPT,
    )


def admits(adder, req, may_move=False):
    """Whether SGLang's check admits a request; slots left for others in the pass; its state."""
    state = SimpleNamespace(
        wanted=True,
        slots=COPY,
        prompt=PROMPT,
        folds=False,
        in_place=False,
        may_move=lambda _: may_move,
    )
    extend = PROMPT - req.prefix_len
    tokens = extend + OUTPUT + adder.per_req_token_overhead
    total = tokens + admission.reserve(STORE, adder, req, state, None)
    adder.memory_budget.remaining_total -= req.prefix_len  # pinned
    adder.memory_budget.remaining_current -= req.prefix_len
    fits = total < adder.memory_budget.remaining_total
    adder.can_run_list.append(req)
    total = tokens + admission.reserve(STORE, adder, req, state, extend)
    return fits, adder.memory_budget.remaining_total - total, state


NOW = PROMPT + COPY + admission.IN_FLIGHT + 1  # a page more, as SGLang wants
MEANWHILE = 4 * (admission.IN_FLIGHT + 1)


@pytest.mark.parametrize(("free", "fits"), [(NOW + MEANWHILE, False), (NOW + MEANWHILE + 1, True)])
@pytest.mark.parametrize("prefix", [0, 10])
def test_a_prompt_takes_for_a_moment_what_running_requests_need_later(free, fits, prefix):
    """Running requests need 60 slots in the end, but few before the prompt's slots return."""
    found, left, state = admits(Adder(free, running=4), request(prefix))
    assert (found, state.in_place) == (fits, False)
    if fits:
        assert left == 1  # for nobody else in this pass


def test_it_is_compacted_in_place_before_it_waits():
    found, left, state = admits(Adder(NOW + MEANWHILE, running=4), request(), may_move=True)
    assert (found, left, state.in_place) == (True, 1, True)


def test_what_comes_later_must_fit_too():
    """With all output, running requests and the new one fill exactly the free slots."""
    running = 6
    free = NOW + running * 3 + 1
    assert admits(Adder(free, running), request())[0]
    later = COPY + OUTPUT + 1 + running * (OUTPUT - (HELD - COPY))
    assert later < free
    many = Adder(free, running)
    many.memory_budget.remaining_total = COPY + OUTPUT + 1
    assert not admits(many, request())[0]


@pytest.mark.parametrize(("prefix", "room", "moves"), [(60, 55, True), (90, 40, False)])
def test_a_prompt_whose_prefix_fills_the_pool_does_not_wait_for_ever(prefix, room, moves):
    """SGLang pins the prefix before it looks at its budget; it may leave after the prefill."""
    fits, _, state = admits(Adder(prefix + room, running=0), request(prefix), may_move=moves)
    assert (fits, state.in_place) == (True, moves)


def test_folds_keep_their_slots():
    free = NOW + MEANWHILE + 1
    assert not admits(Adder(free, running=4, folds=True), request())[0]
    assert admits(Adder(NOW + 4 * 15 + 1, running=4, folds=True), request())[0]


def test_one_at_a_time():
    adder = Adder(NOW + MEANWHILE + 1, running=4)
    adder.can_run_list.append(request())
    assert not admits(adder, request())[0]


@pytest.mark.parametrize(
    ("free", "running", "others", "goes", "chunk"),
    [
        (64, 3, False, True, 64),  # all of it fits
        (50, 3, False, True, 50 - 3 * admission.IN_FLIGHT),  # those that run go on
        (6, 3, False, False, 64),  # it waits for them
        (0, 0, True, False, 64),  # or for those of other stages' batches
        (0, 0, False, True, 64),  # for nobody: what follows is SGLang's
    ],
)
def test_a_further_chunk_takes_what_is_free(free, running, others, goes, chunk):
    adder = Adder(free, running)
    adder.rem_chunk_tokens = 64
    assert admission.fits_chunk(adder, request(prefix=20), others=others) == goes
    assert adder.rem_chunk_tokens == chunk


@pytest.mark.parametrize(
    ("prefix", "chunk", "beside", "in_place", "reserved"),
    [
        (40, 30, 200, False, COPY + 30),  # the rest of the prompt is kept from others in the pass
        (40, 30, 200, True, 30),
        (40, 30, 25, False, 25),  # as far as there is room beside the chunk
        (40, 30, -1, False, 0),
        (70, 30, COPY, False, COPY),
        (70, 30, COPY - 1, False, 0),  # no copy is made
    ],
)
def test_a_further_chunk_reserves_what_has_room_beside_it(
    prefix, chunk, beside, in_place, reserved
):
    req, adder = request(prefix), Adder(0, running=0)
    req.kv.holds_kv = True
    room = chunk + adder.per_req_token_overhead + beside
    adder.memory_budget = SimpleNamespace(remaining_current=room, remaining_total=room)
    state = SimpleNamespace(wanted=True, slots=COPY, prompt=PROMPT, in_place=in_place)
    assert admission.reserve(STORE, adder, req, state, chunk) == reserved


def test_nothing_is_reserved_before_sglang_has_looked_at_a_request():
    """SGLang asks so early what an urgent request needs that it does not know its prompt."""
    asking = request()
    asking.full_untruncated_fill_ids = []
    state = SimpleNamespace(wanted=True, slots=COPY, prompt=PROMPT, folds=False, uncompressed=None)
    assert admission.reserve(STORE, Adder(NOW, running=1), asking, state, None) == 0
    assert state.uncompressed is None
