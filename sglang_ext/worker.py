"""SGLang's HTTP application as its worker processes import it (`--tokenizer-worker-num`).

SGLang loads no plugins there; without them, answers would lack the facts about policies.
"""

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.frontend import FactsHeader

app = compat.worker_app()
compat.add_middleware(FactsHeader)  # a started application takes no more
