"""Load on a running server, and what its clients see of it: `dflash-serve bench`, `bench/serve.py`."""
