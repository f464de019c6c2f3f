"""Builds the extension module _uds from _uds_helper.c with cffi (API mode, stable ABI)."""

import re
from pathlib import Path

from cffi import FFI

_HERE = Path(__file__).parent

ffibuilder = FFI()
ffibuilder.cdef(re.sub(r"/\*.*?\*/", "", (_HERE / "_uds_helper.h").read_text(), flags=re.DOTALL))
ffibuilder.set_source(
    "_uds",
    '#include "_uds_helper.h"',
    sources=["_uds_helper.c"],
    include_dirs=["."],
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror=implicit-function-declaration"],
    py_limited_api=True,
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
