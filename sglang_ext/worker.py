"""SGLang's HTTP application as its worker processes import it (`--tokenizer-worker-num`).

SGLang loads no plugins there, so what clients are told about policies would be missing.
"""

from kvpolicy.sglang_ext.face import compat
from kvpolicy.sglang_ext.frontend import FactsHeader

app = compat.worker_app()
compat.add_middleware(FactsHeader)  # once it has started it takes no more
